"""Many ways to ask for one thing: cores of sentences in frames, hundreds of forms from a few."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whalepod.tools.tiny.data.sample import Patterns, Split, spoken
from whalepod.tools.tiny.data.tables import load

_TABLE = load("phrasing")
_FRAMES: dict[str, list[str]] = _TABLE["frames"]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _forms(cores: Sequence[str]) -> Iterator[str]:
    """Put every core into every frame of its kind; a core without a kind is a form already."""
    for core in cores:
        kind, mark, rest = core.partition("> ")
        if not mark or kind not in _FRAMES:
            yield core
            continue
        for frame in _FRAMES[kind]:
            yield frame.format(c=rest, C=_capital(rest))


def varied(cores: Sequence[str], *, dev: Sequence[str], test: Sequence[str]) -> Patterns:
    """Make training patterns from cores, without those that hold a held-out one.

    A core is `kind> words`: `do>` a deed without its subject (add {a} and {b}), `say>` the same
    where nothing may follow, `what>` a thing to be told (the job of {n}), `if>` a clause
    (where {n} lives). Other cores are whole sentences; each counts ten times, so that the few
    plainest forms stay common.
    """
    held_out = [spoken(form) for form in (*dev, *test)]
    train: dict[str, int] = {}
    for core in cores:
        times = 1 if core.partition("> ")[0] in _FRAMES else 10
        for form in _forms([core]):
            if not any(other in spoken(form) for other in held_out):
                train[form] = train.get(form, 0) + times
    return Patterns(train=tuple(train), dev=dev, test=test, weights=tuple(train.values()))


def patterns(table: Mapping[str, Any]) -> Patterns:
    """Make patterns of a table: `train` as it stands, or `cores` widened; `dev` and `test`."""
    dev, test = tuple(table.get("dev", ())), tuple(table.get("test", ()))
    if "cores" in table:
        return varied(table["cores"], dev=dev, test=test)
    return Patterns(train=tuple(table["train"]), dev=dev, test=test)


def opened(rng: random.Random, split: Split, patterns: Patterns, share: float = 0.3) -> str:
    """Pick a pattern; in training, put other words before or after it now and then."""
    form = patterns.pick(rng, split)
    if split != "train" or rng.random() > share:
        return form
    held_out = [spoken(other) for other in (*patterns.dev, *patterns.test)]
    while True:
        before, after = rng.choice(_TABLE["openings"]), rng.choice(_TABLE["closings"])
        draw = rng.random()
        longer: str
        if draw < 0.6 or form[-1] not in ".?!":
            longer = before + form
        else:
            longer = form + after if draw < 0.9 else before + form + after
        if not any(other in spoken(longer) for other in held_out):
            return longer
