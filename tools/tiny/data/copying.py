"""Copying a line, and facts of a text drawn out as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.passages import TEXT_OPENINGS, draw_fact, told_passage
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, user
from whalepod.tools.tiny.data.tables import load

_TABLE = load("copying")
_COPY, _JSON_ASK, _JSON_DEEDS = (
    patterns(_TABLE[name]) for name in ("copy", "json_ask", "json_deeds")
)
_JSON_KEYS: dict[str, list[str]] = _TABLE["json_keys"]
_MORE_JSON_KEYS: dict[str, list[str]] = _TABLE["more_json_keys"]


def copy_sample(rng: random.Random, split: Split) -> Sample:
    """Ask to repeat a line word by word."""
    text = _line(rng, split)
    return Sample(
        kind="copy",
        messages=[user(opened(rng, split, _COPY, 0.15).format(x=text))],
        answer=text,
        expected=Expected(contains=(text,)),
    )


def _line(rng: random.Random, split: Split) -> str:
    nouns = words.THINGS + words.FOODS + words.ANIMALS + words.JOBS + words.PLACES
    parts: list[str] = []
    for _ in range(rng.randint(1, 7)):
        draw = rng.random()
        if draw < 0.3:
            parts.append(words.name(rng, split))
        elif draw < 0.45:
            parts.append(str(rng.randint(0, 9999)))
        elif draw < 0.6:
            parts.append(words.made_up_word(rng, rng.choice((1, 2, 3))))
        else:
            parts.append(rng.choice(nouns))
    return rng.choice((" ", " ", ", ", "-")).join(parts)


def _json_question(rng: random.Random, split: Split, told: str, keys: str) -> str:
    if split != "train":
        return _JSON_ASK.pick(rng, split).format(told=told, keys=keys)
    ask = opened(rng, split, _JSON_DEEDS, 0.15)
    first, second = rng.choice(TEXT_OPENINGS) + told, ask.format(keys=keys)
    if rng.random() < 0.35:
        first, second = second.rstrip(".") + rng.choice((":", ".", ".\n\n", "\n")), told
    return first + rng.choice((" ", "\n", "\n\n")) + second


def _json_key(rng: random.Random, split: Split, spelled: Sequence[str]) -> str:
    """Spell a key; training's have a word of no meaning before them now and then."""
    key = rng.choice(spelled)
    if split == "train" and rng.random() < 0.15:
        return f"{rng.choice(('the', 'my', 'new', 'user', 'person'))}_{key}"
    return key


def json_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for the facts about one person as a JSON object with given keys, in the given order."""
    owner = words.name(rng, split)
    keys_of = _JSON_KEYS | _MORE_JSON_KEYS if split == "train" else _JSON_KEYS
    kinds = rng.sample(sorted(keys_of), rng.randint(1, 3))
    facts = [draw_fact(rng, split, kind, owner) for kind in kinds]
    value: dict[str, str | int] = {"name": owner} if rng.random() < 0.7 else {}
    for kind, fact in zip(kinds, facts, strict=True):
        answer = fact.slots["v"]
        value[_json_key(rng, split, keys_of[kind])] = int(answer) if answer.isdigit() else answer
    told = told_passage(rng, split, rng.sample(facts, len(facts)), 0)
    keys = list(value)
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    question = _json_question(rng, split, told, listed)
    return Sample(
        kind="json",
        messages=[user(question)],
        answer=json.dumps(value),
        expected=Expected(json_value=value),
    )
