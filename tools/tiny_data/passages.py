"""Questions about a passage in the prompt, copying, and facts drawn out as JSON."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from whalepod.tools.tiny_data import words
from whalepod.tools.tiny_data.relations import RELATIONS
from whalepod.tools.tiny_data.sample import (
    Expected,
    Message,
    Patterns,
    Sample,
    Split,
    assistant,
    user,
)

UNKNOWN = "The text does not say."


_FRAMES = Patterns(
    train=(
        "{text}\n\n{q}",
        "{text}\n{q}",
        "{text} {q}",
        "Read the text and answer the question.\n\n{text}\n\n{q}",
        "Text: {text}\nQuestion: {q}",
        "Passage: {text}\n\nQuestion: {q}",
        "Here is a passage.\n{text}\nAnswer this: {q}",
        "{q}\n\n{text}",
        "Question: {q}\n\nText: {text}",
        "Use the text to answer. {text}\n\n{q}",
        "Context:\n{text}\n\nQuestion: {q}\nAnswer:",
    ),
    dev=("Here is a text: {text}\n\nQuestion: {q}",),
    test=(
        "Read this passage.\n\n{text}\n\nQuestion: {q}",
        "Use this passage to answer the question.\n{text}\n\n{q}",
        "Passage:\n{text}\n\nNow answer this question: {q}",
    ),
)

_FILLERS = (
    "It was a quiet day.",
    "The sun was warm.",
    "Many people were in the market.",
    "The train was late again.",
    "It rained in the morning.",
    "Nobody said a word.",
    "The streets were full.",
    "Later the wind came up.",
)


@dataclass(frozen=True, slots=True)
class _Fact:
    relation: str
    slots: dict[str, str]

    def told(self, rng: random.Random, split: Split) -> str:
        return RELATIONS[self.relation].told.pick(rng, split).format(**self.slots)

    def asked(self, rng: random.Random, split: Split) -> str:
        return RELATIONS[self.relation].asked.pick(rng, split).format(**self.slots)

    def answer(self) -> str:
        return RELATIONS[self.relation].answer.format(**self.slots)


def _value(rng: random.Random, split: Split, relation: str) -> str:
    match relation:
        case "city":
            return words.city(rng, split)
        case "job":
            return rng.choice(words.JOBS)
        case "food":
            return rng.choice(words.FOODS)
        case "color":
            return rng.choice(words.COLORS)
        case "count":
            return str(rng.randint(2, 99))
        case "pet":
            return words.name(rng, split)
        case "day":
            return rng.choice(words.DAYS)
        case _:
            return str(rng.randint(100, 9999))


def _fact(rng: random.Random, split: Split, relation: str, owner: str) -> _Fact:
    thing = rng.choice(words.THINGS)
    slots = {"n": owner, "v": _value(rng, split, relation), "t": thing}
    slots |= {"ts": words.plural(thing), "p": rng.choice(words.ANIMALS)}
    return _Fact(relation, slots)


def _facts(rng: random.Random, split: Split, count: int) -> list[_Fact]:
    """Draw facts that leave every question with one answer: no owner has a relation twice."""
    owners = words.names(rng, split, max(2, (count + 1) // 2))
    kinds = rng.sample(sorted(RELATIONS), min(len(RELATIONS), max(2, count // 2 + 1)))
    pairs = rng.sample([(kind, owner) for kind in kinds for owner in owners], count)
    facts: list[_Fact] = []
    for kind, owner in pairs:
        fact = _fact(rng, split, kind, owner)
        taken = [*owners, *(other.slots["v"] for other in facts)]
        while fact.slots["v"] in taken:
            fact = _fact(rng, split, kind, owner)
        facts.append(fact)
    return facts


def _passage(rng: random.Random, split: Split, facts: list[_Fact], num_fillers: int) -> str:
    sentences = [fact.told(rng, split) for fact in facts]
    for _ in range(num_fillers):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(_FILLERS))
    return " ".join(sentences)


def passage_sample(rng: random.Random, split: Split) -> Sample:
    """Tell a few facts, ask for one of them; sometimes for one that was not told."""
    return _ask(rng, split, thinking=False)


def think_passage_sample(rng: random.Random, split: Split) -> Sample:
    """The same in thinking mode: the steps quote the sentence that answers."""
    return _ask(rng, split, thinking=True)


def _ask(rng: random.Random, split: Split, *, thinking: bool) -> Sample:
    sizes = (1, 2, 3, 3, 4, 4, 5, 6) if split == "train" else (3, 4, 5)
    facts = _facts(rng, split, rng.choice(sizes))
    wanted = rng.choice(facts)
    told = wanted.told(rng, split)
    sentences = [told if fact is wanted else fact.told(rng, split) for fact in facts]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(_FILLERS))
    text = " ".join(sentences)
    answer, contains, thought = wanted.answer(), (wanted.slots["v"],), f"The text says: {told}"
    question = wanted.asked(rng, split)
    if split == "train" and rng.random() < 0.1:
        missing = _fact(rng, split, wanted.relation, words.name(rng, split))
        if missing.slots["n"] not in text:
            question, answer, contains = missing.asked(rng, split), UNKNOWN, ("not say",)
            thought = f"The text does not tell this about {missing.slots['n']}."
    others = tuple(fact.slots["v"] for fact in facts if fact.slots["v"] != contains[0])
    return Sample(
        kind="think_passage" if thinking else "passage",
        messages=[user(_FRAMES.pick(rng, split).format(text=text, q=question))],
        answer=f"{thought}</think>{answer}" if thinking else answer,
        thinking=thinking,
        expected=Expected(contains=contains, lacks=others),
    )


def quiz_sample(rng: random.Random, split: Split) -> Sample:
    """Tell a few facts and ask for several of them, one turn each."""
    facts = _facts(rng, split, rng.randint(3, 5))
    text = _passage(rng, split, facts, rng.choice((0, 0, 1)))
    asked = rng.sample(facts, rng.randint(2, len(facts)))
    messages: list[Message] = []
    for fact in asked:
        question = fact.asked(rng, split)
        if not messages:
            question = _FRAMES.pick(rng, split).format(text=text, q=question)
        messages += [user(question), assistant(fact.answer())]
    values = tuple(fact.slots["v"] for fact in facts if fact is not asked[-1])
    return Sample(
        kind="passage",
        messages=messages[:-1],
        answer=asked[-1].answer(),
        expected=Expected(contains=(asked[-1].slots["v"],), lacks=values),
    )


_COPY = Patterns(
    train=(
        "Repeat: {x}",
        "Repeat after me: {x}",
        "Say this: {x}",
        'Write "{x}".',
        "Copy this line:\n{x}",
        "Echo {x}",
        "Please repeat the text.\n{x}",
        'Say "{x}"',
    ),
    dev=('Repeat this: "{x}"',),
    test=("Please say this: {x}", "Copy this text:\n{x}"),
)


def copy_sample(rng: random.Random, split: Split) -> Sample:
    """Ask to repeat a line word by word."""
    text = _line(rng, split)
    return Sample(
        kind="copy",
        messages=[user(_COPY.pick(rng, split).format(x=text))],
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
    train=(
        "{told}\nGive me {keys} as JSON.",
        "{told} Write {keys} as JSON.",
        "Extract {keys} as JSON: {told}",
        "Answer in JSON with the keys {keys}. {told}",
        "Return a JSON object with {keys}.\n\n{told}",
        "{told}\n\nReply only with JSON: {keys}.",
        "Make JSON with the fields {keys} from this text: {told}",
        "Read this and give {keys} in JSON.\n{told}",
    ),
    dev=("Write a JSON object with {keys}: {told}",),
    test=(
        "Extract {keys} from this text as JSON.\n\n{told}",
        "{told}\nReturn {keys} as JSON.",
    ),
)
_JSON_KEYS = {
    "city": ("city", "town", "home"),
    "job": ("job", "work"),
    "food": ("food", "favorite_food"),
    "count": ("count", "number"),
    "day": ("day", "travel_day"),
    "code": ("code",),
}


def json_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for the facts about one person as a JSON object with given keys, in the given order."""
    owner = words.name(rng, split)
    kinds = rng.sample(sorted(_JSON_KEYS), rng.randint(1, 3))
    facts = [_fact(rng, split, kind, owner) for kind in kinds]
    value: dict[str, str | int] = {"name": owner} if rng.random() < 0.7 else {}
    for kind, fact in zip(kinds, facts, strict=True):
        answer = fact.slots["v"]
        value[rng.choice(_JSON_KEYS[kind])] = int(answer) if answer.isdigit() else answer
    told = _passage(rng, split, rng.sample(facts, len(facts)), 0)
    keys = list(value)
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    question = _JSON_ASK.pick(rng, split).format(told=told, keys=listed)
    return Sample(
        kind="json",
        messages=[user(question)],
        answer=json.dumps(value),
        expected=Expected(json_value=value),
    )
