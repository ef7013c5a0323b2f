"""What a family of tools is made of: spellings, arguments with their values, requests, results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.sample import Patterns, Split

Draw = Callable[[random.Random, Split], Any]


def choice(*items: Any) -> Draw:
    return lambda rng, split: rng.choice(items)


def integer(low: int, high: int) -> Draw:
    return lambda rng, split: rng.randint(low, high)


def coined(rng: random.Random, split: Split) -> str:
    return words.made_up_word(rng)


def short_text(rng: random.Random, split: Split) -> str:
    """Draw a short message."""
    return _text(rng, words.name(rng, split), lambda: words.city(rng, split))


def found_text(rng: random.Random) -> str:
    """Draw a short message that a tool gives back, the same for every split."""
    return _text(rng, words.any_name(rng), lambda: words.any_city(rng))


def _text(rng: random.Random, name: str, city: Callable[[], str]) -> str:
    thing = rng.choice(words.THINGS)
    return rng.choice(
        (
            f"The {thing} is ready",
            f"Bring the {thing} on {rng.choice(words.DAYS)}",
            f"{name} is in {city()}",
            f"Call {name}",
            f"Buy {rng.choice(words.FOODS)} and {rng.choice(words.FOODS)}",
            f"Meet {name} at the {rng.choice(words.PLACES)}",
            f"See you on {rng.choice(words.DAYS)}",
            "I am late",
            "Hello",
        )
    )


def query(rng: random.Random, split: Split) -> str:
    return rng.choice(
        (
            f"{rng.choice(words.COLORS)} {words.plural(rng.choice(words.THINGS))}",
            f"{rng.choice(words.PLACES)} in {words.city(rng, split)}",
            f"{words.name(rng, split)} {rng.choice(words.JOBS)}",
            rng.choice(words.FOODS) + " " + rng.choice(words.FOODS),
            words.city(rng, split),
        )
    )


def path(rng: random.Random, split: Split) -> str:
    stem = rng.choice((*words.THINGS, *words.PLACES, words.made_up_word(rng)))
    folder = rng.choice(("", "", "docs/", "src/", "data/", "/tmp/"))
    return folder + stem + rng.choice((".txt", ".md", ".py", ".json", ".csv"))


def symbol(rng: random.Random, split: Split) -> str:
    return "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(rng.choice((3, 4))))


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: spellings of its name by split, its JSON type and its values."""

    names: Patterns
    draw: Draw
    json_type: str = "string"


@dataclass(frozen=True, slots=True)
class Family:
    """Tools of one purpose. Requests use the keys of `arguments` as fields."""

    names: Patterns
    descriptions: tuple[str, ...]
    requests: Patterns
    arguments: dict[str, Argument] = field(default_factory=dict)
    result: Callable[[random.Random, dict[str, Any]], dict[str, Any]] = lambda rng, slots: {
        "status": "ok"
    }
    answer: str = "Done."


def same(*names: str) -> Patterns:
    return Patterns(train=names, dev=names[:1], test=names[:1])


CITY = Argument(
    Patterns(train=("city", "location", "town"), dev=("city",), test=("city", "place")), words.city
)
WHO = Argument(
    Patterns(train=("to", "name", "recipient"), dev=("to",), test=("to", "person")), words.name
)
