"""Values that tables name by a word: a list of words, a range of numbers, or a function here."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.sample import Split

Draw = Callable[[random.Random, Split], Any]
Result = Callable[[random.Random, dict[str, Any]], Any]

_COMMANDS = ("ls", "cat", "rm", "wc", "git add", "python")
_SYMBOL_LETTERS = "ABCDEFGHKLMNPRSTVWXZ"


def draw(name: str) -> Draw:
    """Return what draws the values that a table names.

    name  `1..99`, `a | b | c`, lists of words.toml (`things + foods`), or a key of `_DRAWS`
    """
    if name in _DRAWS:
        return _DRAWS[name]
    if numbers := re.fullmatch(r"(-?\d+)\.\.(\d+)", name):
        low, high = map(int, numbers.groups())
        return lambda rng, split: rng.randint(low, high)
    if " | " in name:
        items: Sequence[str] = name.split(" | ")
    else:
        items = [word for part in name.split(" + ") for word in words.LISTS[part]]
    return lambda rng, split: rng.choice(items)


def result(name: str) -> Result:
    """Return what draws a tool's result; beside the names of `draw`, those of `_RESULTS`."""
    if name in _RESULTS:
        return _RESULTS[name]
    drawn = draw(name.removeprefix("digits "))
    if name.startswith("digits "):
        return lambda rng, slots: str(drawn(rng, "train"))
    return lambda rng, slots: drawn(rng, "train")


def short_text(rng: random.Random, split: Split) -> str:
    """Draw a short message."""
    return _text(rng, words.name(rng, split), lambda: words.city(rng, split))


def _found_text(rng: random.Random, slots: dict[str, Any]) -> str:
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


def _query(rng: random.Random, split: Split) -> str:
    return rng.choice(
        (
            f"{rng.choice(words.COLORS)} {words.plural(rng.choice(words.THINGS))}",
            f"{rng.choice(words.PLACES)} in {words.city(rng, split)}",
            f"{words.name(rng, split)} {rng.choice(words.JOBS)}",
            rng.choice(words.FOODS) + " " + rng.choice(words.FOODS),
            words.city(rng, split),
        )
    )


def _path(rng: random.Random, split: Split) -> str:
    stem = rng.choice((*words.THINGS, *words.PLACES, words.made_up_word(rng)))
    folder = rng.choice(("", "", "docs/", "src/", "data/", "/tmp/"))
    return folder + stem + rng.choice((".txt", ".md", ".py", ".json", ".csv"))


def _symbol(rng: random.Random, split: Split) -> str:
    return "".join(rng.choice(_SYMBOL_LETTERS) for _ in range(rng.choice((3, 4))))


_DRAWS: dict[str, Draw] = {
    "city": words.city,
    "name": words.name,
    "word": lambda rng, split: words.made_up_word(rng, rng.choice((1, 2, 3))),
    "word_of_2": lambda rng, split: words.made_up_word(rng, 2),
    "word_of_3": lambda rng, split: words.made_up_word(rng, 3),
    "text": short_text,
    "query": _query,
    "path": _path,
    "symbol": _symbol,
    "command": lambda rng, split: rng.choice(_COMMANDS) + " " + _path(rng, split),
}
_RESULTS: dict[str, Result] = {
    "clock": lambda rng, slots: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    "counted_thing": lambda rng, slots: f"{rng.randint(0, 99)} {rng.choice(words.THINGS)}",
    "found_text": _found_text,
    "product": lambda rng, slots: slots["a"] * slots["b"],
    "roll": lambda rng, slots: rng.randint(1, slots["sides"]),
    "sum": lambda rng, slots: slots["a"] + slots["b"],
}
