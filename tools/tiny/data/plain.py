"""Plain passages of a sentence or two, as a user types them, asked from either side."""

from __future__ import annotations

import random
from dataclasses import dataclass

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, sloppy, user
from whalepod.tools.tiny.data.tables import load


@dataclass(frozen=True, slots=True)
class Plain:
    """Sentences that tell one thing, and pairs of question and answer."""

    told: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


PLAIN = tuple(
    Plain(tuple(table["told"]), tuple((asked, answer) for asked, answer in table["asked"]))
    for table in load("plain").values()
)


def plain_sample(rng: random.Random, split: Split) -> Sample:
    """Tell one to three things, all of one kind or of several, and ask for one of them."""
    chosen = rng.sample(PLAIN, rng.choice((1, 1, 1, 2, 2, 3)))
    if len(chosen) > 1 and rng.random() < 0.5:
        chosen = chosen[:1] * len(chosen)
    slots = _distinct_slots(rng, split, len(chosen))
    told = [rng.choice(kind.told).format(**own) for kind, own in zip(chosen, slots, strict=True)]
    wanted = rng.randrange(len(chosen))
    alone = chosen.count(chosen[wanted]) == 1
    asked, form = rng.choice([pair for pair in chosen[wanted].asked if alone or "{" in pair[0]])
    answer = form.format(**slots[wanted])
    text = " ".join(told) + rng.choice((" ", " ", "\n", "\n\n")) + asked.format(**slots[wanted])
    return Sample(
        kind="passage",
        messages=[user(sloppy(rng, text))],
        answer=answer,
        expected=Expected(contains=(answer.rstrip("."),)),
    )


def _distinct_slots(rng: random.Random, split: Split, count: int) -> list[dict[str, str]]:
    """Draw the words of `count` sentences, none of them twice."""
    while True:
        found = [_slots(rng, split) for _ in range(count)]
        if len({word for slots in found for word in slots.values()}) == sum(map(len, found)):
            return found


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    thing = rng.choice(words.THINGS)
    name, other = words.names(rng, split, 2)
    return {
        "n": name, "m": other, "p": rng.choice(words.ANIMALS), "c": words.city(rng, split),
        "j": rng.choice(words.JOBS), "f": rng.choice(words.FOODS), "k": rng.choice(words.COLORS),
        "t": thing, "ts": words.plural(thing), "d": str(rng.randint(2, 999)),
        "w": rng.choice(words.DAYS),
    }  # fmt: skip
