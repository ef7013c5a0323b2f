"""The embedded model's tokenizer: what its ids promise, and what of a text is learnt."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from whalepod.tools.tiny import tokenizer as tiny_tokenizer
from whalepod.tools.tiny.data import mixture, words
from whalepod.tools.tiny.data.tool_tasks import FAMILIES

_FOLDER = Path(__file__).parents[2] / "models" / "tiny"
_TOKENIZER = tiny_tokenizer.load_tokenizer(_FOLDER)


def num_tokens(text: str) -> int:
    return len(_TOKENIZER.encode(text, add_special_tokens=True))


def test_vocabulary_is_full_and_special_tokens_come_first() -> None:
    named = [*tiny_tokenizer.CONTROL, *tiny_tokenizer.MARKERS]

    assert len(_TOKENIZER) == tiny_tokenizer.VOCAB_SIZE <= 1_536
    assert _TOKENIZER.convert_tokens_to_ids(named) == list(range(len(named)))
    assert (_TOKENIZER.bos_token_id, _TOKENIZER.eos_token_id, _TOKENIZER.pad_token_id) == (0, 1, 2)


def test_markers_are_one_token_and_survive_skipping_special_tokens() -> None:
    for marker in tiny_tokenizer.MARKERS:
        ids = _TOKENIZER.encode(f"a{marker}b")
        assert len(ids) == 3
        assert _TOKENIZER.decode(ids, skip_special_tokens=True) == f"a{marker}b"
    for token in tiny_tokenizer.CONTROL:
        assert _TOKENIZER.decode(_TOKENIZER.encode(f"a{token}b"), skip_special_tokens=True) == "ab"


def test_encoding_adds_nothing() -> None:
    assert _TOKENIZER.decode(_TOKENIZER.encode("Hi")) == "Hi"


def test_digits_stand_alone() -> None:
    assert num_tokens("90210") == 5
    assert all(len(re.findall(r"\d", token)) <= 1 for token in _TOKENIZER.get_vocab())


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_names_and_cities_take_one_to_three_tokens(split: words.Split) -> None:
    long = [word for word in words.NAMES[split] + words.CITIES[split] if num_tokens(word) > 3]

    assert not long


def test_tool_names_are_short() -> None:
    names = [name for family in FAMILIES.values() for name in family.names.train]

    assert sum(num_tokens(name) <= 3 for name in names) >= 0.8 * len(names)
    assert max(map(num_tokens, names)) <= 5


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert _TOKENIZER.decode(_TOKENIZER.encode(text)) == text


def test_the_mask_covers_every_assistant_turn_with_its_end() -> None:
    samples = mixture.samples(0, "train", {"session": 1, "conversation": 1, "think_call": 1})
    for _, sample in zip(range(60), samples, strict=False):
        ids = tiny_tokenizer.training_ids(_TOKENIZER, sample)
        mask = tiny_tokenizer.answer_mask(_TOKENIZER, ids)
        own = [token for token, is_own in zip(ids, mask, strict=True) if is_own]
        prompt = tiny_tokenizer.prompt_ids(_TOKENIZER, sample)
        turns = 1 + sum(message["role"] == "assistant" for message in sample.messages)

        assert own.count(_TOKENIZER.eos_token_id) == turns == ids.count(_TOKENIZER.eos_token_id)
        assert all(mask[len(prompt) :])
        assert not any(
            mask[: prompt.index(_TOKENIZER.convert_tokens_to_ids("<｜Assistant｜>")) + 2]
        )


def test_the_model_config_agrees_with_the_tokenizer() -> None:
    config = json.loads((_FOLDER / "config.json").read_text(encoding="utf-8"))
    saved = json.loads((_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))

    assert config["vocab_size"] == len(_TOKENIZER)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 2)
    assert saved["model_max_length"] == config["max_position_embeddings"]
