"""Facts of a small closed world, the same in every split: capitals, opposites, colors, order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Expected, Patterns, Sample, Split, sloppy, user
from whalepod.tools.tiny.data.tables import load


@dataclass(frozen=True, slots=True)
class _Topic:
    """Facts of one form: {k} is asked for, {v} answers; `share` of all questions."""

    share: float
    values: Mapping[str, str]
    asked: Patterns
    answer: str


def _values(name: str, table: Mapping[str, Any]) -> dict[str, str]:
    if name == "order":
        orders = (words.DAYS, words.LISTS["months"])
        return {first: second for order in orders for first, second in itertools.pairwise(order)}
    values: dict[str, str] = table["values"]
    if name == "opposites":
        return values | {value: key for key, value in values.items()}
    return values


_TABLES = load("facts")
_COUNT = patterns(_TABLES.pop("count")["asked"])
TOPICS = tuple(
    _Topic(table["share"], _values(name, table), patterns(table["asked"]), table["answer"])
    for name, table in _TABLES.items()
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
