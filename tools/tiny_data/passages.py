"""Questions about a passage in the prompt, copying, and facts drawn out as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.tools.tiny_data import words
from whalepod.tools.tiny_data.more_relations import MORE_RELATIONS
from whalepod.tools.tiny_data.phrasing import opened, varied
from whalepod.tools.tiny_data.relations import RELATIONS, Relation
from whalepod.tools.tiny_data.sample import (
    Expected,
    Message,
    Patterns,
    Sample,
    Split,
    assistant,
    spoken,
    user,
)

UNKNOWN = "The text does not say."


_TEXT_OPENINGS = (
    "", "", "", "", "", "Text: ", "Passage: ", "Context:\n", "Context: ", "Here is a passage.\n",
    "Read the text and answer the question.\n\n", "Use the text to answer. ", "Read:\n",
    "Story: ", "News: ", "Look at this. ", "I read this: ", "Notes:\n", "Facts: ", "Given: ",
    "Read carefully. ", "Here are some facts.\n", "This is known: ", "A short story:\n",
    "Below is a text.\n\n", "Read the following. ", "Information:\n", "I was told: ",
    "Answer the question about the text.\n", "### Text\n", "My friend wrote: ", "Source: ",
)  # fmt: skip
_JOINTS = ("\n\n", "\n\n", "\n", "\n", " ", " ")
_QUESTION_OPENINGS = (
    "", "", "", "", "", "", "Question: ", "Question:\n", "Q: ", "Now tell me: ", "My question: ",
    "Please answer: ", "Here is the question. ", "Based on the text: ", "And now: ", "Tell me: ",
    "What I ask: ", "So, ", "### Question\n", "From this text: ", "I want to know this: ", "OK. ",
    "Now the question: ", "Answer this: ", "Think well. ", "Say in one sentence: ", "Well, ",
)  # fmt: skip
_ENDINGS = ("", "", "", "", "", "", "", "", "\nAnswer:", "\nA:", " Thanks!", " Please.")


def _framed(rng: random.Random, split: Split, text: str, question: str) -> str:
    """Put text and question into one message; training's frames are joined at random."""
    if split != "train":
        return _FRAMES.pick(rng, split).format(text=text, q=question)
    held_out = [spoken(frame) for frame in (*_FRAMES.dev, *_FRAMES.test)]
    while True:
        first = rng.choice(_TEXT_OPENINGS) + "{text}"
        second = rng.choice(_QUESTION_OPENINGS) + "{q}"
        if rng.random() < 0.15:
            first, second = second, first
        frame = first + rng.choice(_JOINTS) + second
        if frame.endswith("{q}"):
            frame += rng.choice(_ENDINGS)
        if not any(other in spoken(frame) for other in held_out):
            return frame.format(text=text, q=question)


_FRAMES = Patterns(
    train=("{text}\n\n{q}",),
    dev=("Here is a text: {text}\n\nQuestion: {q}",),
    test=(
        "Read this passage.\n\n{text}\n\nQuestion: {q}",
        "Use this passage to answer the question.\n{text}\n\n{q}",
        "Passage:\n{text}\n\nNow answer this question: {q}",
    ),
)

_TOLD_OPENINGS = (
    "I heard that ", "They say that ", "It is true that ", "We know that ", "Everyone knows that ",
    "I know that ", "You should know that ", "My friend says that ", "It seems that ", "Now ",
    "Today ", "And ", "Also, ", "Besides, ", "Then ", "By the way, ", "In fact, ", "Of course, ",
    "This year ", "It is said that ", "I was told that ",
)  # fmt: skip
"""In front of a training sentence now and then."""
_MORE_FILLERS = (
    "The bus came at noon.", "A bird sang in a tree.", "The coffee was cold.", "It was a nice day.",
    "The door was open.", "Everybody was happy.", "The moon was out.", "Snow fell all night.",
    "The music was loud.", "Two boats lay in the harbor.", "The soup was good.", "Nothing is new.",
    "The shop was closed.", "A dog ran over the road.", "The clock stood still.", "It was late.",
    "The lights went out.", "We all laughed.", "Time goes by.", "The garden is green.",
    "The letter was lost.", "I like this place.", "Nobody knows why.", "That was long ago.",
    "The water was cold.", "There was a lot to do.", "It got dark early.", "Winter is near.",
)  # fmt: skip
_DRINKS = ("tea", "coffee", "milk", "water", "wine", "juice", "beer", "cocoa")
_SPORTS = ("chess", "tennis", "football", "cards", "golf", "piano", "guitar", "hockey", "darts")

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

    @property
    def form(self) -> Relation:
        return ALL_RELATIONS[self.relation]

    def told(self, rng: random.Random, split: Split) -> str:
        form = self.form.told.pick(rng, split)
        if split == "train" and form.startswith(("{n}", "{v}")) and rng.random() < 0.12:
            form = rng.choice(_TOLD_OPENINGS) + form
            if any(spoken(other) in spoken(form) for other in self.form.told.test):
                form = self.form.told.pick(rng, split)
        return form.format(**self.slots)

    def asked(self, rng: random.Random, split: Split) -> str:
        return self.form.asked.pick(rng, split).format(**self.slots)

    def answer(self) -> str:
        return self.form.answer.format(**self.slots)


ALL_RELATIONS = RELATIONS | {name: relation for name, (_, relation) in MORE_RELATIONS.items()}


def _relations(split: Split) -> list[str]:
    return sorted(ALL_RELATIONS if split == "train" else RELATIONS)


def _value(rng: random.Random, split: Split, relation: str) -> str:
    if relation in MORE_RELATIONS:
        return _more_value(rng, split, MORE_RELATIONS[relation][0])
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


def _more_value(rng: random.Random, split: Split, values: str) -> str:
    match values:
        case "place":
            return words.city(rng, split)
        case "name":
            return words.name(rng, split)
        case "years":
            return str(rng.randint(3, 99))
        case "number":
            return str(rng.randint(2, 9999))
        case "word":
            return words.made_up_word(rng, rng.choice((1, 2, 3)))
        case _:
            return rng.choice(_LISTED_VALUES[values])


_LISTED_VALUES: dict[str, Sequence[str]] = {
    "thing": words.THINGS,
    "spot": words.PLACES,
    "language": words.LANGUAGES,
    "day": words.DAYS,
    "drink": _DRINKS,
    "sport": _SPORTS,
}


def _fact(rng: random.Random, split: Split, relation: str, owner: str) -> _Fact:
    thing = rng.choice(words.THINGS)
    slots = {"n": owner, "v": _value(rng, split, relation), "t": thing}
    slots |= {"ts": words.plural(thing), "p": rng.choice(words.ANIMALS)}
    return _Fact(relation, slots)


def _facts(rng: random.Random, split: Split, count: int) -> list[_Fact]:
    """Draw facts that leave every question with one answer: no owner has a relation twice."""
    owners = words.names(rng, split, max(2, (count + 1) // 2))
    relations = _relations(split)
    kinds = rng.sample(relations, min(len(relations), max(2, count // 2 + 1)))
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
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(_fillers(split)))
    return " ".join(sentences)


def _fillers(split: Split) -> Sequence[str]:
    return (*_FILLERS, *_MORE_FILLERS) if split == "train" else _FILLERS


def passage_sample(rng: random.Random, split: Split) -> Sample:
    """Tell a few facts, ask for one of them; sometimes for one that was not told."""
    return _ask(rng, split, thinking=False)


def think_passage_sample(rng: random.Random, split: Split) -> Sample:
    """The same in thinking mode: the steps quote the sentence that answers."""
    return _ask(rng, split, thinking=True)


def _ask(rng: random.Random, split: Split, *, thinking: bool) -> Sample:
    sizes = (1, 2, 3, 4, 4, 5, 5, 6) if split == "train" else (3, 4, 5)
    facts = _facts(rng, split, rng.choice(sizes))
    wanted = rng.choice(facts)
    told = wanted.told(rng, split)
    sentences = [told if fact is wanted else fact.told(rng, split) for fact in facts]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(_fillers(split)))
    text = " ".join(sentences)
    answer, contains, thought = wanted.answer(), (wanted.slots["v"],), f"The text says: {told}"
    question = wanted.asked(rng, split)
    if split == "train" and rng.random() < 0.05:
        missing = _fact(rng, split, wanted.relation, words.name(rng, split))
        if missing.slots["n"] not in text:
            question, answer, contains = missing.asked(rng, split), UNKNOWN, ("not say",)
            thought = f"The text does not tell this about {missing.slots['n']}."
    others = tuple(fact.slots["v"] for fact in facts if fact.slots["v"] != contains[0])
    return Sample(
        kind="think_passage" if thinking else "passage",
        messages=[user(_framed(rng, split, text, question))],
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
            question = _framed(rng, split, text, question)
        messages += [user(question), assistant(fact.answer())]
    values = tuple(fact.slots["v"] for fact in facts if fact is not asked[-1])
    return Sample(
        kind="passage",
        messages=messages[:-1],
        answer=asked[-1].answer(),
        expected=Expected(contains=(asked[-1].slots["v"],), lacks=values),
    )


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
    dev=(),
    test=("Return {keys} as JSON.", "Extract {keys} from this text as JSON."),
)  # fmt: skip
"""Training joins them with the text; the whole forms above are the held-out ones."""


def _json_question(rng: random.Random, split: Split, told: str, keys: str) -> str:
    if split != "train":
        return _JSON_ASK.pick(rng, split).format(told=told, keys=keys)
    while True:
        ask = opened(rng, split, _JSON_DEEDS, 0.15)
        if "a JSON object with {keys}" in ask and "write" in ask.lower():
            continue  # too near to the form of dev
        first, second = rng.choice(_TEXT_OPENINGS) + "{told}", ask
        if rng.random() < 0.35:
            first, second = ask.rstrip(".") + rng.choice((":", ".", ".\n\n", "\n")), "{told}"
        form = first + rng.choice((" ", "\n", "\n\n")) + second
        return form.format(told=told, keys=keys)


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
    facts = [_fact(rng, split, kind, owner) for kind in kinds]
    value: dict[str, str | int] = {"name": owner} if rng.random() < 0.7 else {}
    for kind, fact in zip(kinds, facts, strict=True):
        answer = fact.slots["v"]
        value[_json_key(rng, split, keys_of[kind])] = int(answer) if answer.isdigit() else answer
    told = _passage(rng, split, rng.sample(facts, len(facts)), 0)
    keys = list(value)
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    question = _json_question(rng, split, told, listed)
    return Sample(
        kind="json",
        messages=[user(question)],
        answer=json.dumps(value),
        expected=Expected(json_value=value),
    )
