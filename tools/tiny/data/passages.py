"""Questions about a passage in the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.more_relations import MORE_RELATIONS
from whalepod.tools.tiny.data.relations import RELATIONS, Relation
from whalepod.tools.tiny.data.sample import (
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


TEXT_OPENINGS = (
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
        first = rng.choice(TEXT_OPENINGS) + "{text}"
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


OPAQUE_CORES: dict[str, Sequence[str]] = {
    "city": ("{n} {w} in {v}", "{n} {w} {v}", "in {v} {w} {n}", "the {o} of {n} is {v}"),
    "job": ("{n} {w} as a {v}", "{n} {w} a {v}", "as a {v} {w} {n}", "{n}, a {v}, {w}"),
    "food": ("{n} {w} {v}", "{n} {w} {o} {v}", "{v} {w} {n}", "{n} {w} {o} and {v}"),
    "color": ("{n} {w} a {v} {t}", "a {v} {t} {w} {n}", "the {v} {t} {w} {n}", "{n} {w} {v} {t}"),
    "count": ("{n} {w} {v} {ts}", "{v} {ts} {w} {n}", "{n} {w} with {v} {ts}"),
    "pet": ("{n} {w} a {p} {o} {v}", "{n} {w} the {p} {v}", "the {o} of {n}'s {p} {w} {v}"),
    "day": ("{n} {w} on {v}", "{n} {w} {o} on {v}", "on {v} {w} {n}", "{n}'s {o} {w} on {v}"),
    "code": ("{n} {w} the code {v}", "{n} {w} {v}", "the code {v} {w} {n}", "{v} {w} {n}"),
}
_VERBS = words.listed(
    """
    sees holds seeks knows asks gives sings reads writes draws says picks drops sends needs hides
    calls cleans counts shows shares wins chooses names meets feels pulls brings hears marks looks
    hopes turns stays waits chose sold held met took saw made drew got gave knew felt is was has
    """
)
_TAILS = (
    "", "", "", "", " today", " again", " at last", " with joy", " in the evening", " so far",
    " too", " and smiles", " every week", " above all", " at the moment", " without a word",
    " like before", " more than ever", " all the time", " this month",
)  # fmt: skip
_OPAQUE_SHARE = 0.15


def opaque_form(rng: random.Random, relation: str) -> str:
    """Make a training sentence whose verb says nothing: only owner and kind of value do."""
    told = ALL_RELATIONS[relation].told
    while True:
        coined = words.made_up_word(rng, rng.choice((1, 2))) + rng.choice(("s", "s", "ed", ""))
        verb = coined if rng.random() < 0.6 else rng.choice(_VERBS)
        other = rng.choice((words.made_up_word(rng), "own", "big", "new", "good", "old", "first"))
        core = rng.choice(OPAQUE_CORES[relation]).replace("{w}", verb).replace("{o}", other)
        form = core + rng.choice(_TAILS) + "."
        form = form if form[0] == "{" else form[0].upper() + form[1:]
        if not any(spoken(held) in spoken(form) for held in (*told.dev, *told.test)):
            return form


@dataclass(frozen=True, slots=True)
class _Fact:
    relation: str
    slots: dict[str, str]

    @property
    def form(self) -> Relation:
        return ALL_RELATIONS[self.relation]

    def told(self, rng: random.Random, split: Split) -> str:
        form = self.form.told.pick(rng, split)
        if split == "train" and self.relation in OPAQUE_CORES and rng.random() < _OPAQUE_SHARE:
            form = opaque_form(rng, self.relation)
        elif split == "train" and form.startswith(("{n}", "{v}")) and rng.random() < 0.06:
            form = rng.choice(_TOLD_OPENINGS) + form
            if any(
                spoken(other) in spoken(form)
                for other in (*self.form.told.dev, *self.form.told.test)
            ):
                form = self.form.told.pick(rng, split)
        return form.format(**self.slots)

    def asked(self, rng: random.Random, split: Split) -> str:
        return self.form.asked.pick(rng, split).format(**self.slots)

    def answer(self) -> str:
        return self.form.answer.format(**self.slots)


ALL_RELATIONS = RELATIONS | {name: relation for name, (_, relation) in MORE_RELATIONS.items()}


_MORE_SHARE = 0.35


def _relations(rng: random.Random, split: Split) -> list[str]:
    """List the relations of one passage; a third of training's may be of any kind."""
    more = split == "train" and rng.random() < _MORE_SHARE
    return sorted(ALL_RELATIONS if more else RELATIONS)


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


def draw_fact(rng: random.Random, split: Split, relation: str, owner: str) -> _Fact:
    thing = rng.choice(words.THINGS)
    slots = {"n": owner, "v": _value(rng, split, relation), "t": thing}
    slots |= {"ts": words.plural(thing), "p": rng.choice(words.ANIMALS)}
    return _Fact(relation, slots)


_SAME_KIND_SHARE = 0.5
"""Passages that tell the same of everybody, so that the owner alone decides."""


def _facts(rng: random.Random, split: Split, count: int) -> list[_Fact]:
    """Draw facts that leave every question with one answer: no owner has a relation twice."""
    num_owners, num_kinds = max(2, (count + 1) // 2), max(2, count // 2 + 1)
    if split == "train" and rng.random() < _SAME_KIND_SHARE:
        num_owners, num_kinds = max(2, count), rng.choice((1, 2))
    owners = words.names(rng, split, num_owners)
    relations = _relations(rng, split)
    kinds = rng.sample(relations, num_kinds)
    pairs = rng.sample([(kind, owner) for kind in kinds for owner in owners], count)
    facts: list[_Fact] = []
    for kind, owner in pairs:
        fact = draw_fact(rng, split, kind, owner)
        taken = [*owners, *(other.slots["v"] for other in facts)]
        while fact.slots["v"] in taken:
            fact = draw_fact(rng, split, kind, owner)
        facts.append(fact)
    return facts


def told_passage(rng: random.Random, split: Split, facts: list[_Fact], num_fillers: int) -> str:
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
        missing = draw_fact(rng, split, wanted.relation, words.name(rng, split))
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
    text = told_passage(rng, split, facts, rng.choice((0, 0, 1)))
    asked = rng.sample(facts, len(facts) - rng.choice((0, 0, 1)))
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
