"""Sums: two numbers of two digits above all, with and without written steps."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import (
    Expected,
    Sample,
    Split,
    sloppy,
    spoken,
    user,
)
from whalepod.tools.tiny.data.tables import load

_TABLE = load("sums")
_PLAIN, _STORIES, _MINUS = (patterns(_TABLE[name]) for name in ("plain", "stories", "minus"))
_VERBS: list[str] = _TABLE["verbs"].split()


def addition_steps(a: int, b: int) -> str:
    """Write the school method for two numbers of at most two digits."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    text = f"{a} + {b}. Ones: {a % 10} + {b % 10} = {ones}. Tens: {a // 10} + {b // 10} = {tens}"
    if ones >= 10:
        text += f", carry 1 makes {tens + 1}"
    return f"{text}. So {a} + {b} = {a + b}."


def sum_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a sum of two numbers of two digits; the answer restates it."""
    return _sum(rng, split, thinking=False)


def _story(rng: random.Random, split: Split) -> str:
    """Pick a story's pattern; most of training's are joined at random."""
    if split != "train" or rng.random() < 0.2:
        return _STORIES.pick(rng, split)
    told = rng.choice(_TABLE["told"]).replace("{v}", rng.choice(_VERBS))
    return f"{told.replace('{w}', rng.choice(_VERBS))} {rng.choice(_TABLE['questions'])}"


def plain_form(rng: random.Random, split: Split) -> str:
    """Pick a pattern without a story; a quarter of training's are of two sentences."""
    if split != "train" or rng.random() > 0.25:
        return opened(rng, split, _PLAIN)
    while True:
        pattern = f"{rng.choice(_TABLE['numbers'])} {rng.choice(_TABLE['its_sum'])}"
        if not any(spoken(other) in spoken(pattern) for other in (*_PLAIN.dev, *_PLAIN.test)):
            return pattern


def think_sum_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a sum in thinking mode; the steps come before `</think>`."""
    return _sum(rng, split, thinking=True)


def _sum(rng: random.Random, split: Split, *, thinking: bool) -> Sample:
    if split == "train" and not thinking and rng.random() < 0.08:
        return _minus(rng, split)
    low = 1 if split == "train" and rng.random() < 0.12 else 10
    a, b = words.number_pair(rng, split, low=low)
    n, m = words.names(rng, split, 2)
    things = words.plural(rng.choice(words.THINGS))
    pattern = _story(rng, split) if rng.random() < 0.2 else plain_form(rng, split)
    question = pattern.format(a=a, b=b, n=n, m=m, things=things)
    answer = f"{a} + {b} = {a + b}."
    if thinking:
        answer = f"{addition_steps(a, b)}</think>{answer}"
    return Sample(
        kind="think_sum" if thinking else "sum",
        messages=[user(sloppy(rng, question) if split == "train" else question)],
        answer=answer,
        thinking=thinking,
        expected=Expected(contains=(str(a + b),)),
    )


def _minus(rng: random.Random, split: Split) -> Sample:
    b, a = sorted(words.number_pair(rng, split, low=1))
    return Sample(
        kind="sum",
        messages=[user(_MINUS.pick(rng, split).format(a=a, b=b))],
        answer=f"{a} - {b} = {a - b}.",
        expected=Expected(contains=(str(a - b),)),
    )
