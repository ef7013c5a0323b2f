"""What the model knows by heart: a few jokes, poems, greetings and famous questions."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, sloppy, user
from whalepod.tools.tiny.data.tables import load

_KNOWN = tuple((patterns(table), tuple(table["answers"])) for table in load("known").values())
KNOWN_PATTERNS = tuple(asked for asked, _ in _KNOWN)


def known_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for one of them; any of its answers is right. `dev` has no askings of its own."""
    asked, answers = rng.choice(_KNOWN)
    pattern = opened(rng, "train" if split == "dev" else split, asked, share=0.15)
    answer = rng.choice(answers)
    return Sample(
        kind="known",
        messages=[user(sloppy(rng, pattern) if split == "train" else pattern)],
        answer=answer,
        expected=Expected(one_of=answers),
    )
