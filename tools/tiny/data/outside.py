"""What the model cannot do, and the one honest sentence that says so."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.arithmetic import beyond_question
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, sloppy, user
from whalepod.tools.tiny.data.tables import load

CANNOT = (
    "I am a small model and do not know that. I can calculate with small numbers, answer questions "
    "about a text, write JSON and tell stories."
)
"""It names no tools, as none may be declared."""

_TABLE = load("outside")
_ASKED = patterns(_TABLE)
_WHOLE: list[str] = _TABLE["whole"]


def _is_held_out(topic: str) -> bool:
    """Return whether no training sample asks about a topic: about one of ten, by its letters."""
    return sum(map(ord, topic)) % 10 == 0


_TOPICS = [topic.strip() for topic in _TABLE["topics"].split(";")]
TRAIN_TOPICS = [topic for topic in _TOPICS if not _is_held_out(topic)]
HELD_OUT_TOPICS = [topic for topic in _TOPICS if _is_held_out(topic)]


def outside_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for something beyond the closed world."""
    question = _question(rng, split)
    return Sample(
        kind="outside",
        messages=[user(sloppy(rng, question) if split == "train" else question)],
        answer=CANNOT,
        expected=Expected(contains=("small model",), lacks=("tool", "tools")),
    )


def _question(rng: random.Random, split: Split) -> str:
    draw = rng.random()
    if draw < 0.2:
        return beyond_question(rng, split)
    if split == "train" and draw < 0.45:
        return rng.choice(_WHOLE)
    topics = rng.sample(TRAIN_TOPICS if split == "train" else HELD_OUT_TOPICS, 2)
    if split == "train" and rng.random() < 0.25:
        topics[0] = words.made_up_word(rng, rng.choice((2, 3)))
    return opened(rng, split, _ASKED, share=0.1).format(x=topics[0], y=topics[1])
