"""Many ways to ask for one thing: cores of sentences in frames, hundreds of forms from a few."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from whalepod.tools.tiny.data.sample import Patterns, Split, spoken

_BARE = (
    "Please {c}", "Can you {c}", "Could you {c}", "Could you please {c}", "Can you please {c}",
    "Would you {c}", "Will you {c}", "I want you to {c}", "I would like you to {c}",
    "I need you to {c}", "Now {c}", "Go ahead and {c}", "Next, {c}", "Do this: {c}", "Just {c}",
    "Your task: {c}", "I want to {c}", "I need to {c}", "Help me to {c}", "Be so kind and {c}",
    "First {c}", "Try to {c}", "May I ask you to {c}", "{C}", "{C}", "Then {c}",
)  # fmt: skip
"""Nothing may follow the core: it ends with a text of the user's own."""
_DEEDS = (
    "{C}.", "{C}.", "{C}", "Please {c}.", "Can you {c}?", "Could you {c}?", "Could you please {c}?",
    "Can you please {c}?", "Would you {c}?", "Would you please {c}?", "Will you {c}?",
    "{C}, please.", "{C} for me.", "{C} for me, please.", "Can you {c} for me?",
    "Could you {c} for me?", "Will you {c} for me?", "I want you to {c}.",
    "I would like you to {c}.", "I need you to {c}.", "Now {c}.", "{C} now.", "Go ahead and {c}.",
    "Let us {c}.", "It is time to {c}.", "You should {c}.", "I have to {c}. Can you do it?",
    "I must {c}. Please do it.", "I want to {c}.", "I need to {c}.", "I have to {c}.",
    "I must {c}.", "Help me to {c}.", "Help me {c}.", "Your task: {c}.", "Task: {c}",
    "Be so kind and {c}.", "Kindly {c}.", "Just {c}.", "First {c}.", "Are you able to {c}?",
    "May I ask you to {c}?", "Do this: {c}", "Try to {c}.", "We have to {c}.",
    "Make sure to {c}.", "Next, {c}.", "Then {c}.", "I ask you to {c}.", "Can we {c}?",
    "Can someone {c}?", "Somebody must {c}.", "Do me a favor and {c}.", "Can you help me to {c}?",
    "I would like to {c}.", "How about you {c}?", "Please {c} now.", "Please {c} right away.",
    "{C} again.", "{C} today, please.", "You can {c} for me.", "Hurry and {c}.",
    "Please {c} for me.", "Could you please {c} for me?", "Would you {c} for me, please?",
    "I want you to {c} for me.", "Just {c} for me.", "{C} for us.", "Please {c} for us.",
    "{C} for me now.", "{C} for me, thanks.",
)  # fmt: skip
_THINGS = (
    "What is {c}?", "What is {c}?", "Tell me {c}.", "Give me {c}.", "{C}?", "{C}", "{C}, please.",
    "I want to know {c}.", "I need {c}.", "Do you know {c}?", "Can you tell me {c}?",
    "Could you tell me {c}?", "Can you give me {c}?", "I would like to know {c}.",
    "Please tell me {c}.", "Please give me {c}.", "Say {c}.", "Name {c}.", "Find {c}.",
    "Find out {c}.", "Show me {c}.", "Let me know {c}.", "I am looking for {c}.",
    "I forgot {c}. What is it?", "{C}: what is it?", "What was {c} again?", "May I know {c}?",
    "Would you tell me {c}?", "My question is about {c}. What is it?", "Who knows {c}?",
    "Write {c}.", "Check {c}.", "Get me {c}.", "I need to know {c}.", "Could you give me {c}?",
    "I must know {c}.", "Can you find {c}?", "What would {c} be?", "I do not know {c}. Do you?",
    "Please find {c}.", "Look for {c}.", "Could you find out {c}?", "I ask for {c}.",
    "Is there a way to know {c}?", "I want {c}.", "State {c}.", "Can I have {c}?", "What's {c}?",
    "Let me have {c}.", "Tell us {c}.", "Do you remember {c}?", "Can you say {c}?",
)  # fmt: skip
_CLAUSES = (
    "Tell me {c}.", "Can you tell me {c}?", "Could you tell me {c}?", "Do you know {c}?",
    "I want to know {c}.", "I would like to know {c}.", "Say {c}.", "Find out {c}.",
    "I wonder {c}.", "Let me know {c}.", "Please say {c}.", "Please tell me {c}.",
    "May I ask {c}?", "Can you say {c}?", "I forgot {c}.", "I need to know {c}.",
    "Would you tell me {c}?", "Do you remember {c}?", "Show me {c}.", "Who can tell me {c}?",
    "Could you say {c}?", "I do not know {c}. Do you?", "I have to know {c}.", "I ask {c}.",
    "Can you find out {c}?", "I must know {c}.", "Write {c}.", "Tell us {c}.",
    "Please find out {c}.", "I am not sure {c}.", "Can you see {c}?", "It matters {c}.",
    "What I want to know is {c}.", "The question is {c}.",
)  # fmt: skip
_FRAMES = {"do": _DEEDS, "say": _BARE, "what": _THINGS, "if": _CLAUSES}

_OPENINGS = (
    "Hello! ", "Hi. ", "Hi! ", "Hello. ", "Good morning. ", "Hey! ", "I have a question. ",
    "Quick question: ", "One more thing: ", "Please help me. ", "Tell me: ", "OK. ", "Question: ",
    "Excuse me. ", "Sorry to ask. ", "Dear tiny, ", "Hey tiny, ", "I need help. ", "Answer this: ",
    "Can you help? ", "Next: ", "My question: ", "Let us see. ", "Listen. ", "Good. ", "Quick: ",
    "Another question: ", "So, ", "Well. ", "Here is my question: ", "Next task. ", "Great. ",
    "You are nice. ", "I am back. ", "I am new here. ", "Good evening. ", "Say, ", "Please: ",
)  # fmt: skip
_CLOSINGS = (
    " Thanks!", " Thank you.", " Please.", " Please answer.", " It is important.", " I forgot it.",
    " Quickly, please.", " Can you help?", " That is all.", " I need it today.", " Thanks a lot.",
    " I am in a hurry.", " You can do it.", " I count on you.", " I want to be sure.",
)  # fmt: skip


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _forms(cores: Sequence[str]) -> Iterator[str]:
    """Put every core into every frame of its kind; a core without a kind is a form already."""
    for core in cores:
        kind, mark, rest = core.partition("> ")
        if not mark or kind not in _FRAMES:
            yield core
            continue
        for frame in _FRAMES[kind]:
            yield frame.format(c=rest, C=_capital(rest))


def varied(cores: Sequence[str], *, dev: Sequence[str], test: Sequence[str]) -> Patterns:
    """Make training patterns from cores, without those that hold a held-out one.

    A core is `kind> words`: `do>` a deed without its subject (add {a} and {b}), `say>` the same
    where nothing may follow, `what>` a thing to be told (the job of {n}), `if>` a clause
    (where {n} lives). Other cores are whole sentences; each counts ten times, so that the few
    plainest forms stay common.
    """
    held_out = [spoken(form) for form in (*dev, *test)]
    train: dict[str, int] = {}
    for core in cores:
        times = 1 if core.partition("> ")[0] in _FRAMES else 10
        for form in _forms([core]):
            if not any(other in spoken(form) for other in held_out):
                train[form] = train.get(form, 0) + times
    return Patterns(train=tuple(train), dev=dev, test=test, weights=tuple(train.values()))


def opened(rng: random.Random, split: Split, patterns: Patterns, share: float = 0.3) -> str:
    """Pick a pattern; in training, put other words before or after it now and then."""
    form = patterns.pick(rng, split)
    if split != "train" or rng.random() > share:
        return form
    held_out = [spoken(other) for other in (*patterns.dev, *patterns.test)]
    while True:
        before, after = rng.choice(_OPENINGS), rng.choice(_CLOSINGS)
        draw = rng.random()
        if draw < 0.6 or form[-1] not in ".?!":
            longer = before + form
        else:
            longer = form + after if draw < 0.9 else before + form + after
        if not any(other in spoken(longer) for other in held_out):
            return longer
