"""Questions about a passage in the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import patterns
from whalepod.tools.tiny.data.relations import ALL_RELATIONS, RELATIONS, Relation
from whalepod.tools.tiny.data.sample import (
    Expected,
    Message,
    Sample,
    Split,
    assistant,
    spoken,
    user,
)
from whalepod.tools.tiny.data.tables import load

UNKNOWN = "The text does not say."


_TABLE = load("passages")
TEXT_OPENINGS: list[str] = _TABLE["text_openings"]
_FRAMES = patterns(_TABLE["frames"])
_VERBS: list[str] = _TABLE["verbs"].split()


def _framed(rng: random.Random, split: Split, text: str, question: str) -> str:
    """Put text and question into one message; training's frames are joined at random."""
    if split != "train":
        return _FRAMES.pick(rng, split).format(text=text, q=question)
    held_out = [spoken(frame) for frame in (*_FRAMES.dev, *_FRAMES.test)]
    while True:
        first = rng.choice(TEXT_OPENINGS) + "{text}"
        second = rng.choice(_TABLE["question_openings"]) + "{q}"
        if rng.random() < 0.15:
            first, second = second, first
        frame: str = first + rng.choice(_TABLE["joints"]) + second
        if frame.endswith("{q}"):
            frame += rng.choice(_TABLE["endings"])
        if not any(other in spoken(frame) for other in held_out):
            return frame.format(text=text, q=question)


_OPAQUE_SHARE = 0.15


def opaque_form(rng: random.Random, relation: str) -> str:
    """Make a training sentence whose verb says nothing: only owner and kind of value do."""
    told = ALL_RELATIONS[relation].told
    while True:
        coined = words.made_up_word(rng, rng.choice((1, 2))) + rng.choice(("s", "s", "ed", ""))
        verb = coined if rng.random() < 0.6 else rng.choice(_VERBS)
        other = rng.choice((words.made_up_word(rng), "own", "big", "new", "good", "old", "first"))
        core = rng.choice(ALL_RELATIONS[relation].opaque).replace("{w}", verb).replace("{o}", other)
        form: str = core + rng.choice(_TABLE["tails"]) + "."
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
        if split == "train" and self.form.opaque and rng.random() < _OPAQUE_SHARE:
            form = opaque_form(rng, self.relation)
        elif split == "train" and form.startswith(("{n}", "{v}")) and rng.random() < 0.06:
            form = rng.choice(_TABLE["told_openings"]) + form
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


_MORE_SHARE = 0.35


def _relations(rng: random.Random, split: Split) -> list[str]:
    """List the relations of one passage; a third of training's may be of any kind."""
    more = split == "train" and rng.random() < _MORE_SHARE
    return sorted(ALL_RELATIONS if more else RELATIONS)


def draw_fact(rng: random.Random, split: Split, relation: str, owner: str) -> _Fact:
    thing = rng.choice(words.THINGS)
    slots = {"n": owner, "v": str(ALL_RELATIONS[relation].draw(rng, split)), "t": thing}
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
    fillers: list[str] = _TABLE["fillers"]
    return fillers + _TABLE["more_fillers"] if split == "train" else fillers


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
