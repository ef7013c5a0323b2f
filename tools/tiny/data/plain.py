"""Plain passages of a sentence or two, as a user types them, asked from either side."""

from __future__ import annotations

import random
from dataclasses import dataclass

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, sloppy, user


@dataclass(frozen=True, slots=True)
class Plain:
    """Sentences that tell one thing, and pairs of question and answer."""

    told: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


PLAIN = (
    Plain(
        (
            "{n} has a {p} called {m}.", "{n} has a {p} named {m}.", "{n} has a {p}, {m}.",
            "{n}'s {p} is called {m}.", "My friend {n} has a {p} called {m}.",
        ),
        (
            ("What is the {p} called?", "{n}'s {p} is called {m}."),
            ("What is the {p}'s name?", "{n}'s {p} is called {m}."),
            ("What is the name of the {p}?", "{n}'s {p} is called {m}."),
            ("What is {n}'s {p} called?", "{n}'s {p} is called {m}."),
            ("Who has a {p}?", "{n} has a {p}."),
            ("Who has a {p} called {m}?", "{n} has a {p}."),
            ("Which animal does {n} have?", "{n} has a {p}."),
            ("Who is {m}?", "{n}'s {p} is called {m}."),
        ),
    ),
    Plain(
        ("{n} lives in {c}.", "My friend {n} lives in {c}.", "{n} has a house in {c}."),
        (
            ("Where does {n} live?", "{n} lives in {c}."),
            ("Who lives in {c}?", "{n} lives in {c}."),
            ("What city is it?", "{n} lives in {c}."),
        ),
    ),
    Plain(
        ("{n} is a {j}.", "{n} works as a {j}.", "My friend {n} is a {j}."),
        (
            ("What is the job of {n}?", "{n} is a {j}."),
            ("What does {n} do?", "{n} is a {j}."),
            ("Who is a {j}?", "{n} is a {j}."),
            ("Who works as a {j}?", "{n} is a {j}."),
        ),
    ),
    Plain(
        ("{n} likes {f}.", "{n} eats {f}.", "{n} likes {f} very much."),
        (
            ("What does {n} like?", "{n} likes {f}."),
            ("What does {n} eat?", "{n} likes {f}."),
            ("Who likes {f}?", "{n} likes {f}."),
        ),
    ),
    Plain(
        ("{n} has a {k} {t}.", "The {t} of {n} is {k}.", "{n} bought a {k} {t}."),
        (
            ("What color is the {t}?", "{n}'s {t} is {k}."),
            ("Which color is the {t}?", "{n}'s {t} is {k}."),
            ("What is {k}?", "{n}'s {t} is {k}."),
            ("Who has a {k} {t}?", "{n} has a {k} {t}."),
            ("Who has a {t}?", "{n} has a {k} {t}."),
        ),
    ),
    Plain(
        ("{n} has {d} {ts}.", "{n} owns {d} {ts}.", "{n} got {d} {ts}."),
        (
            ("How many {ts} does {n} have?", "{n} has {d} {ts}."),
            ("How many {ts} are there?", "{n} has {d} {ts}."),
            ("Who has {d} {ts}?", "{n} has {d} {ts}."),
        ),
    ),
    Plain(
        ("{n} travels on {w}.", "{n} leaves on {w}.", "The trip of {n} is on {w}."),
        (
            ("When does {n} travel?", "{n} travels on {w}."),
            ("Who travels on {w}?", "{n} travels on {w}."),
            ("On which day is the trip?", "{n} travels on {w}."),
        ),
    ),
    Plain(
        ("The code of {n} is {d}.", "{n} has code {d}.", "{n}'s code is {d}."),
        (
            ("What is the code?", "The code of {n} is {d}."),
            ("What is the code of {n}?", "The code of {n} is {d}."),
            ("Whose code is {d}?", "The code of {n} is {d}."),
        ),
    ),
)  # fmt: skip
"""{n} a name, {m} another, {p} animal, {c} city, {j} job, {f} food, {k} color, {t} thing,
{d} number, {w} weekday."""


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
