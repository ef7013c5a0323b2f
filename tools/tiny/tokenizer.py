"""Trains the embedded model's tokenizer and turns conversations into token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from whalepod.tools.tiny.data import markup, mixture, tool_tasks, words
from whalepod.tools.tiny.data.sample import Sample

VOCAB_SIZE = 1536
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK_BEGIN, THINK_END = "<think>", "</think>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
CONTROL = (BOS, EOS, PAD)
"""Hidden by `skip_special_tokens`; the markers below stay visible, as in DeepSeek's own files."""
MARKERS = (
    USER,
    ASSISTANT,
    THINK_BEGIN,
    THINK_END,
    markup.CALLS_BEGIN,
    markup.CALLS_END,
    markup.CALL_BEGIN,
    markup.CALL_END,
    markup.SEPARATOR,
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    OUTPUT_BEGIN,
    OUTPUT_END,
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
)

PATTERN = (
    r"'s|_?\p{Ll}+| \p{Ll}+|\p{Lu}+\p{Ll}*|\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Digits stand alone; a capitalised word never takes the space or quote before it.

So a name has the same tokens in a sentence, in JSON and at the start of a line, which makes
copying it easy for a model of this size."""


def train_tokenizer(num_samples: int = 30_000, seed: int = 0) -> Tokenizer:
    """Train the byte-level BPE on the generator's own training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False) for token in (*CONTROL, *MARKERS)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_samples, seed), trainer)
    return tokenizer


def _texts(num_samples: int, seed: int) -> Iterator[str]:
    """Yield the text of samples, and the words that must stay short often enough."""
    cities = words.CITIES["train"] * 3  # many and long, so each needs more weight
    for word in (*cities, *words.NAMES["train"], *tool_tasks.tool_words()):
        yield from (f"{word}\n {word}\n" for _ in range(num_samples // 250))
    yield from ("## Tools\n" for _ in range(num_samples // 10))
    for sample in itertools.islice(mixture.samples(seed, "train"), num_samples):
        for message in sample.messages:
            yield message["content"] or ""
        for tool in sample.tools:
            yield json.dumps(tool["function"])
        yield _without_markers(sample.answer)


def _without_markers(text: str) -> str:
    for marker in MARKERS:
        text = text.replace(marker, "\n")
    return text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json beside the chat template."""
    stored = json.loads(tokenizer.to_str())
    for token in stored["added_tokens"]:  # the trainer marks all as special
        token["special"] = token["content"] in CONTROL
    written = json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer.json").write_text(written, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)  # type: ignore[no-any-return]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[int]:
    """Render and encode a sample's prompt, generation prompt included."""
    text = tokenizer.apply_chat_template(
        sample.messages,
        tools=[*sample.tools] or None,
        add_generation_prompt=True,
        thinking=sample.thinking,
        tokenize=False,
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def training_ids(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[int]:
    """Encode prompt, answer and end-of-sentence."""
    answer: list[int] = tokenizer.encode(sample.answer + EOS, add_special_tokens=False)
    return prompt_ids(tokenizer, sample) + answer


def answer_mask(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bool]:
    """Mark the tokens that an assistant wrote, its end-of-sentence included.

    A turn starts after the tag that follows `<｜Assistant｜>`, or after the last tool output.
    """
    number = tokenizer.convert_tokens_to_ids
    eos, assistant, output_end, output_begin = map(
        number, (EOS, ASSISTANT, OUTPUT_END, OUTPUT_BEGIN)
    )
    mask, writing = [], False
    for index, token in enumerate(ids):
        if (index >= 2 and ids[index - 2] == assistant) or (
            ids[index - 1] == output_end and index and token != output_begin
        ):
            writing = True
        mask.append(writing)
        if token == eos:
            writing = False
    return mask
