"""Facts of a small closed world, the same in every split: capitals, opposites, colors, order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import opened, varied
from whalepod.tools.tiny.data.sample import Expected, Patterns, Sample, Split, sloppy, user

_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Germany": "Berlin", "Spain": "Madrid",
    "England": "London", "Japan": "Tokyo", "Austria": "Vienna", "Greece": "Athens",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Poland": "Warsaw", "Egypt": "Cairo",
    "India": "Delhi", "Peru": "Lima", "Korea": "Seoul", "China": "Beijing", "Russia": "Moscow",
    "Switzerland": "Bern", "Latvia": "Riga", "Estonia": "Tallinn", "Finland": "Helsinki",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Belgium": "Brussels", "Kenya": "Nairobi",
    "Cuba": "Havana", "Turkey": "Ankara", "Hungary": "Budapest", "Colombia": "Bogota",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "old": "new", "up": "down", "day": "night", "fast": "slow",
    "wet": "dry", "open": "closed", "good": "bad", "high": "low", "light": "dark", "yes": "no",
}  # fmt: skip
_SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "horse": "neighs",
    "whale": "sings", "lion": "roars", "bird": "sings", "frog": "croaks", "bee": "hums",
}  # fmt: skip
_COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "the sun": "yellow",
    "coal": "black", "a banana": "yellow", "milk": "white", "a leaf": "green", "the sea": "blue",
}  # fmt: skip
_MONTHS = words.listed(
    """
    January February March April May June July August September October November December
    """
)

_AFTER = {
    first: second for order in (words.DAYS, _MONTHS) for first, second in itertools.pairwise(order)
}


@dataclass(frozen=True, slots=True)
class _Topic:
    """Facts of one form: {k} is asked for, {v} answers; `share` of all questions."""

    share: float
    values: Mapping[str, str]
    asked: Patterns
    answer: str


TOPICS = (
    _Topic(
        0.45,
        _CAPITALS,
        varied(
            (
                "What is the capital of {k}?",
                "Capital of {k}?",
                "Which city is the capital of {k}?",
                "What's the capital of {k}?",
                "The capital of {k} is",
                "{k} has which capital?",
                "What city is the capital of {k}?",
                "Which capital does {k} have?",
                "what> the capital of {k}",
                "what> the capital city of {k}",
                "what> {k}'s capital",
                "what> the main city of {k}",
                "if> which city is the capital of {k}",
                "if> what the capital of {k} is",
                "if> what capital {k} has",
            ),
            dev=("What is the capital city of {k}?",),
            test=("Which city is {k}'s capital?", "Please name the capital of {k}."),
        ),
        "The capital of {k} is {v}.",
    ),
    _Topic(
        0.1,
        _OPPOSITES | {value: key for key, value in _OPPOSITES.items()},
        varied(
            (
                "What is the opposite of {k}?",
                "Opposite of {k}?",
                "What is the contrary of {k}?",
                "{k} is the opposite of what?",
                "what> the opposite of {k}",
                "what> the opposite word of {k}",
                "if> what the opposite of {k} is",
            ),
            dev=("Tell me the opposite of {k}.",),
            test=("Do you know the opposite of {k}?",),
        ),
        "The opposite of {k} is {v}.",
    ),
    _Topic(
        0.1,
        _SOUNDS,
        varied(
            (
                "What sound does a {k} make?",
                "How does a {k} sound?",
                "What does a {k} say?",
                "A {k} makes what sound?",
                "How does a {k} go?",
                "what> the sound of a {k}",
                "if> how a {k} sounds",
                "if> what a {k} says",
            ),
            dev=("Which sound does a {k} make?",),
            test=("Tell me what sound a {k} makes.",),
        ),
        "A {k} {v}.",
    ),
    _Topic(
        0.1,
        _COLORS,
        varied(
            (
                "What color is {k}?",
                "Which color does {k} have?",
                "What is the color of {k}?",
                "{k} has which color?",
                "What color does {k} have?",
                "what> the color of {k}",
                "if> what color {k} has",
                "if> which color {k} has",
            ),
            dev=("Which color is {k}?",),
            test=("Tell me the color of {k}.",),
        ),
        "{K} is {v}.",
    ),
    _Topic(
        0.15,
        _AFTER,
        varied(
            (
                "What comes after {k}?",
                "Which one comes after {k}?",
                "What follows {k}?",
                "{k} comes before what?",
                "After {k} comes what?",
                "What do we have after {k}?",
                "if> what follows {k}",
                "if> what is after {k}",
                "if> which one follows {k}",
            ),
            dev=("Tell me what comes after {k}.",),
            test=("What is next after {k}?",),
        ),
        "After {k} comes {v}.",
    ),
)

_COUNT = varied(
    (
        "Count from {k}.",
        "do> count from {k}",
        "do> count the numbers from {k}",
        "do> write the numbers from {k}",
        "what> the numbers from {k}",
    ),
    dev=("Count for me from {k}.",),
    test=("Count up from {k}.",),
)


def fact_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a fact of the closed world, or to count."""
    topic = rng.choices([None, *TOPICS], [0.1, *(topic.share for topic in TOPICS)])[0]
    if topic is None:
        low = rng.randint(1, 60)
        high = low + rng.randint(3, 9)
        asked, key, value = _COUNT, f"{low} to {high}", str(high)
        answer = " ".join(map(str, range(low, high + 1)))
    else:
        key, value = rng.choice(sorted(topic.values.items()))
        asked = topic.asked
        answer = topic.answer.format(k=key, K=key[0].upper() + key[1:], v=value)
    question = opened(rng, split, asked).format(k=key)
    return Sample(
        kind="fact",
        messages=[user(sloppy(rng, question) if split == "train" else question)],
        answer=answer,
        expected=Expected(contains=(value,)),
    )
