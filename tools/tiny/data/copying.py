"""Copying a line, and facts of a text drawn out as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.passages import TEXT_OPENINGS, draw_fact, told_passage
from whalepod.tools.tiny.data.phrasing import opened, varied
from whalepod.tools.tiny.data.sample import Expected, Patterns, Sample, Split, user

_COPY = varied(
    (
        "Repeat: {x}", "Repeat after me: {x}", "Say this: {x}", "Copy this line:\n{x}", "Echo {x}",
        "Please repeat the text.\n{x}", "Now you: {x}", "Once more: {x}", "Your line: {x}",
        'do> write "{x}"', 'do> say "{x}"', 'do> repeat "{x}"', 'do> echo "{x}"', 'do> copy "{x}"',
        'do> repeat the words "{x}"', "say> repeat: {x}", "say> say: {x}", "say> write: {x}",
        "say> copy: {x}", "say> repeat after me: {x}", "say> repeat these words: {x}",
        "say> write this down: {x}", "say> copy this line:\n{x}", "say> repeat the line:\n{x}",
        "say> print {x}", "say> answer only: {x}", "say> give this back: {x}",
        "say> write the same text: {x}", "say> say only {x}", "say> repeat word for word: {x}",
    ),
    dev=('Repeat this: "{x}"',),
    test=("Please say this: {x}", "Copy this text:\n{x}"),
)  # fmt: skip


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


_JSON_ASK = Patterns(
    train=("{told}\n{ask}",),
    dev=("Write a JSON object with {keys}: {told}",),
    test=(
        "Extract {keys} from this text as JSON.\n\n{told}",
        "{told}\nReturn {keys} as JSON.",
    ),
)
_JSON_DEEDS = varied(
    (
        "do> give me {keys} as JSON", "do> write {keys} as JSON", "do> extract {keys} as JSON",
        "do> answer in JSON with the keys {keys}", "do> return a JSON object with {keys}",
        "do> make JSON with the fields {keys}", "do> give {keys} in JSON",
        "do> make a JSON object of {keys}", "do> fill in JSON with the keys {keys}",
        "do> put {keys} into JSON", "do> find {keys} and write JSON", "do> list {keys} as JSON",
        "do> turn this into JSON with {keys}", "do> reply only with JSON: {keys}",
        "do> collect {keys} in a JSON object", "JSON with {keys}", "JSON, keys: {keys}",
        "what> {keys} as JSON", "what> the JSON with {keys}", "what> a JSON object with {keys}",
        "Keys: {keys}. Answer with JSON.", "I need JSON. The keys are {keys}.",
    ),
    dev=("Write a JSON object with {keys}.",),
    test=("Return {keys} as JSON.", "Extract {keys} from this text as JSON."),
)  # fmt: skip
"""Training joins them with the text; the whole forms above are the held-out ones."""


def _json_question(rng: random.Random, split: Split, told: str, keys: str) -> str:
    if split != "train":
        return _JSON_ASK.pick(rng, split).format(told=told, keys=keys)
    ask = opened(rng, split, _JSON_DEEDS, 0.15)
    first, second = rng.choice(TEXT_OPENINGS) + told, ask.format(keys=keys)
    if rng.random() < 0.35:
        first, second = second.rstrip(".") + rng.choice((":", ".", ".\n\n", "\n")), told
    return first + rng.choice((" ", "\n", "\n\n")) + second


_JSON_KEYS = {
    "city": ("city", "town", "home"),
    "job": ("job", "work"),
    "food": ("food", "favorite_food"),
    "count": ("count", "number"),
    "day": ("day", "travel_day"),
    "code": ("code",),
}


_MORE_JSON_KEYS = {
    "birthplace": ("birthplace", "origin", "born_in"),
    "age": ("age", "years"),
    "friend": ("friend", "best_friend"),
    "sister": ("sister",),
    "room": ("room", "room_number"),
    "phone": ("phone", "phone_number"),
    "points": ("points", "score"),
    "language": ("language", "speaks"),
    "lost": ("lost", "lost_item"),
    "drink": ("drink",),
    "secret": ("word", "secret"),
}


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
