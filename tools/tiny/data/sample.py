"""What every generator makes: a conversation whose last message is the wanted answer."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "dev", "test"]
"""dev and test have sentence patterns, names and numbers that train never shows."""

Message = dict[str, Any]
"""One message in OpenAI's chat format."""

Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How an answer is judged: every condition that is set must hold."""

    contains: tuple[str, ...] = ()
    """Strings that the answer must hold, as whole words."""
    lacks: tuple[str, ...] = ()
    """Strings that would give the answer away as guessed."""
    calls: tuple[Call, ...] = ()
    """Tool calls that the answer must make, in any order; none: it must make none."""
    one_of: tuple[str, ...] = ()
    """The whole answer must be one of these."""
    json_value: Any = None
    """The JSON value that the whole answer must be equal to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation: the prompt in OpenAI's format, the answer as raw text."""

    kind: str
    messages: list[Message]
    answer: str
    """What the model writes after the generation prompt, tool markup and `</think>` included."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    expected: Expected = Expected()


@dataclass(frozen=True, slots=True)
class Patterns:
    """Sentence patterns by split; a pattern is in one split only."""

    train: Sequence[str]
    dev: Sequence[str]
    test: Sequence[str]
    weights: Sequence[int] | None = None
    """How often each training pattern is drawn; all alike without."""

    def pick(self, rng: random.Random, split: Split) -> str:
        if split == "train" and self.weights:
            return rng.choices(self.train, self.weights)[0]
        return rng.choice({"train": self.train, "dev": self.dev, "test": self.test}[split])


def spoken(form: str) -> str:
    """Return the words of a pattern alone, to find one pattern in another."""
    return " " + " ".join(re.findall(r"[\w{}'+-]+", form.lower())) + " "


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def sloppy(rng: random.Random, text: str) -> str:
    """Write like a hurried user now and then: no final mark, small first letter."""
    if rng.random() < 0.08 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.06:
        text = text[0].lower() + text[1:]
    return text


def has_word(text: str, words: str) -> bool:
    """Tell whether `words` stand in `text` and not as a part of longer words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
