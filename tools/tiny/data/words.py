"""The closed world of the embedded model: names, places and things, with held-out ones apart."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data.sample import Split
from whalepod.tools.tiny.data.tables import load


def _by_split(table: dict[Split, str]) -> dict[Split, list[str]]:
    return {split: text.split() for split, text in table.items()}


_TABLE = load("words")
NAMES, CITIES = _by_split(_TABLE.pop("names")), _by_split(_TABLE.pop("cities"))
"""Held-out names are other words, spelled with pieces that training names have too."""
LISTS: dict[str, list[str]] = {name: text.split() for name, text in _TABLE.items()}
COLORS, ANIMALS, THINGS = (LISTS[name] for name in ("colors", "animals", "things"))
FOODS, JOBS, DAYS, PLACES = (LISTS[name] for name in ("foods", "jobs", "days", "places"))
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "nd", "rt", "x", "k"]


def made_up_word(rng: random.Random, syllables: int = 2) -> str:
    """Invent a word that can be said, so that copying is learnt and not a list of names."""
    parts = [rng.choice(LISTS["onsets"]) + rng.choice(LISTS["vowels"]) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_CODAS)


def _blend(rng: random.Random, listed: dict[Split, list[str]]) -> str:
    """Join the head of one training word to the tail of another: new words of familiar pieces."""
    while True:
        first, second = rng.sample(listed["train"], 2)
        word = first[: rng.choice((2, 3, 4))] + second[-rng.choice((2, 3, 4)) :].lower()
        if word not in listed["dev"] and word not in listed["test"]:
            return word


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.45:
        return made_up_word(rng, rng.choice((1, 2, 2, 2))).capitalize()
    return rng.choice(NAMES["train"])


def any_city(rng: random.Random) -> str:
    return made_up_word(rng).capitalize() if rng.random() < 0.4 else rng.choice(CITIES["train"])


def name(rng: random.Random, split: Split) -> str:
    draw = rng.random() if split == "train" else 1.0
    if draw < 0.25:
        return made_up_word(rng, rng.choice((1, 2, 2, 2))).capitalize()
    return _blend(rng, NAMES) if draw < 0.55 else rng.choice(NAMES[split])


def names(rng: random.Random, split: Split, count: int) -> list[str]:
    """Draw different names."""
    found: list[str] = []
    while len(found) < count:
        candidate = name(rng, split)
        if candidate not in found:
            found.append(candidate)
    return found


def city(rng: random.Random, split: Split) -> str:
    draw = rng.random() if split == "train" else 1.0
    if draw < 0.25:
        return made_up_word(rng).capitalize()
    return _blend(rng, CITIES) if draw < 0.5 else rng.choice(CITIES[split])


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("sh", "x", "s")) else "s")


def number_split(first: int, second: int) -> Split:
    """Say which split a pair of numbers belongs to, whatever the order of the two.

    A fixed mix of the pair, not Python's hash: the same for every process and version.
    """
    low, high = sorted((first, second))
    mixed = (low * 7919 + high * 104729 + low * high * 31) % 1009 % 20
    return "test" if mixed < 2 else "dev" if mixed == 2 else "train"


def number_pair(rng: random.Random, split: Split, low: int = 10, high: int = 99) -> tuple[int, int]:
    """Draw two numbers of `split`."""
    while True:
        pair = rng.randint(low, high), rng.randint(low, high)
        if number_split(*pair) == split:
            return pair
