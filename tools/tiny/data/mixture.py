"""The mixture of tasks: what share of the text each generator gets, and the held-out prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from whalepod.tools.tiny.data import (
    arithmetic,
    calls,
    copying,
    facts,
    known,
    outside,
    passages,
    plain,
    sums,
    talk,
)
from whalepod.tools.tiny.data.sample import Sample, Split

Maker = Callable[[random.Random, Split], Sample]

MAKERS: dict[str, Maker] = {
    "sum": sums.sum_sample,
    "think_sum": sums.think_sum_sample,
    "passage": passages.passage_sample,
    "think_passage": passages.think_passage_sample,
    "plain": plain.plain_sample,
    "copy": copying.copy_sample,
    "json": copying.json_sample,
    "call": calls.call_sample,
    "think_call": calls.think_call_sample,
    "session": talk.session_sample,
    "quiz": passages.quiz_sample,
    "drill": talk.drill_sample,
    "result": calls.result_sample,
    "missing": calls.missing_sample,
    "idle_tool": talk.idle_tool_sample,
    "greeting": talk.greeting_sample,
    "outside": outside.outside_sample,
    "known": known.known_sample,
    "calculation": arithmetic.calculation_sample,
    "think_calculation": arithmetic.think_calculation_sample,
    "product": arithmetic.product_sample,
    "fact": facts.fact_sample,
    "memory": talk.memory_sample,
    "story": talk.story_sample,
    "think_talk": talk.solved_sample,
    "conversation": talk.conversation_sample,
}

MIXTURE: dict[str, float] = {
    "sum": 6, "drill": 4, "think_sum": 2, "calculation": 18, "think_calculation": 4, "product": 4,
    "known": 5, "outside": 7, "passage": 7, "quiz": 9, "think_passage": 2, "copy": 4, "json": 5,
    "call": 7, "think_call": 2, "session": 10, "result": 4, "missing": 2, "idle_tool": 4,
    "greeting": 3, "fact": 4, "memory": 2, "story": 2, "think_talk": 1, "conversation": 3,
    "plain": 3,
}  # fmt: skip
"""Weights by number of samples; tool prompts are long, so their share of the tokens is larger."""

HELD_OUT: dict[str, int] = {
    "sum": 70, "think_sum": 50, "passage": 90, "think_passage": 10, "call": 90, "think_call": 20,
    "result": 40, "missing": 15, "idle_tool": 45, "json": 30, "copy": 15, "fact": 15, "story": 10,
}  # fmt: skip
"""Prompts of each kind in a held-out set: 500 in all."""


def samples(seed: int, split: Split, weights: Mapping[str, float] = MIXTURE) -> Iterator[Sample]:
    """Yield samples without end; the same seed, split and weights give the same samples."""
    rng = random.Random(f"{split}/{seed}")
    kinds = list(weights)
    shares = [weights[kind] for kind in kinds]
    while True:
        kind = rng.choices(kinds, shares)[0]
        yield talk.with_system(rng, MAKERS[kind](rng, split))


def held_out(split: Split = "test", scale: float = 1.0) -> list[Sample]:
    """Make the held-out prompts, 500 for `scale` 1; the order is mixed, the content fixed."""
    rng = random.Random(f"held-out/{split}")
    prompts = [
        talk.with_system(rng, MAKERS[kind](rng, split))
        for kind, count in HELD_OUT.items()
        for _ in range(round(count * scale))
    ]
    rng.shuffle(prompts)
    return prompts


def first_impressions(split: Split = "test", count: int = 30) -> list[Sample]:
    """Make what a newcomer types: `count` prompts for each operation and pair of lengths, more of
    each other kind. The same for every call, and none of it is in the held-out set above."""
    rng = random.Random(f"first-impressions/{split}")
    cells = itertools.product("+-", (1, 2, 3), (1, 2, 3))
    prompts = [arithmetic.calculation(rng, split, *cell) for cell in cells for _ in range(count)]
    makers = (arithmetic.typed_sample, arithmetic.product_sample, outside.outside_sample,
              known.known_sample, arithmetic.think_calculation_sample)  # fmt: skip
    return prompts + [maker(rng, split) for maker in makers for _ in range(4 * count)]
