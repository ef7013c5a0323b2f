"""A byte-level BPE tokenizer for synthetic checkpoints, trained on text that is generated here.

It has DeepSeek's special tokens and a chat template in DeepSeek-V3's format, so that a random
checkpoint goes through every path that a real one does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKUP = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
)
"""Tokens of their own that stay in decoded text, because parsers look for them."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set system_roles = ["system", "developer"] -%}
{%- set instructions = messages | selectattr("role", "in", system_roles) -%}
{{- instructions | map(attribute="content") | join("\\n\\n") -}}
{%- for message in messages -%}
  {%- if message.role == "user" -%}
    {{- "<｜User｜>" + message.content -}}
  {%- elif message.role == "assistant" -%}
    {{- "<｜Assistant｜>" + (message.content or "") + eos_token -}}
  {%- elif message.role == "tool" -%}
    {{- "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" -}}
  {%- elif message.role not in system_roles -%}
    {{- raise_exception("unknown role " + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<｜Assistant｜>" -}}
{%- endif -%}
"""

_COMMON_WORDS = """
the of and to in is that it for as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out
so up said what its about than into them can only other time new some could these two may first then
do any like my now over such our man me even most made after also did many off before must well back
through years where much your way down should because long each just state people those too mr how
little world good very make year still see own work men day get here old life both between being
under three never know same last another while us might great go come since against right came take
used himself few house use place during high without again home around small however found general
model token number answer question city tool call result value name list return import class self
def print true false none error file data system user message content role string text line
"""
_ONSETS = "b c d f g h j k l m n p r s t v w st tr ch sh pl gr"
_VOWELS = "a e i o u ea ou ai"


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocab_size` tokens; the same one every time.

    Ids 0, 1, 2 are begin of sentence, end of sentence and padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, *MARKUP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; a synthetic tokenizer has "
            f"{256 + 3 + len(MARKUP)} to {tokenizer.get_vocab_size()} tokens"
        )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def write_tokenizer(folder: Path, *, vocab_size: int, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template)."""
    train_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _training_text() -> Iterator[str]:
    """Yield lines of common words, invented words, numbers and marks, always the same."""
    chance = random.Random(0)
    words = _COMMON_WORDS.split() + sorted({_invent_word(chance) for _ in range(9000)})
    for first in range(0, len(words), 8):
        yield " ".join(words[first : first + 8]) + f", {first}.\n"
    for _ in range(3000):
        # a cubed draw: common words, which come first in the list, are much more frequent
        line = [words[int(chance.random() ** 3 * len(words))] for _ in range(12)]
        line[0] = line[0].capitalize()
        yield " ".join(line) + chance.choice([".", "?", "!", ":", ' "', " (", ");", " = "]) + "\n"


def _invent_word(chance: random.Random) -> str:
    syllables = chance.choice([1, 2, 2, 3])
    return "".join(
        chance.choice(_ONSETS.split())
        + chance.choice(_VOWELS.split())
        + chance.choice(["", "", "n", "r", "s", "l", "t", "nd", "ng"])
        for _ in range(syllables)
    )
