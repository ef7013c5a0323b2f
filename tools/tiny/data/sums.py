"""Sums: two numbers of two digits above all, with and without written steps."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import opened, varied
from whalepod.tools.tiny.data.sample import (
    Expected,
    Patterns,
    Sample,
    Split,
    sloppy,
    spoken,
    user,
)

_PLAIN = varied(
    (
        "What is {a} + {b}?", "{a} + {b} = ?", "{a}+{b}", "{a} + {b}", "{a} + {b}?", "{a} + {b} =",
        "What is {a} plus {b}?", "How much is {a} + {b}?", "How much is {a} plus {b}?",
        "What do you get if you add {a} to {b}?", "{a} plus {b} is what?",
        "How much do {a} and {b} make?", "What does {a} + {b} make?", "{a} and {b} make what?",
        "What comes out if I add {a} and {b}?", "If I add {a} and {b}, what do I get?",
        "What do {a} and {b} add up to?", "Is {a} + {b} hard? What is it?", "{a} plus {b}",
        "Do you know what {a} and {b} make together?", "Solve: {a} + {b}",
        "do> add {a} and {b}", "do> add {a} to {b}", "do> sum up {a} and {b}",
        "do> calculate {a} + {b}", "do> compute {a} plus {b}", "do> work out {a} + {b}",
        "do> calculate the sum of {a} and {b}", "do> put {a} and {b} together",
        "do> solve {a} + {b}", "do> tell me what {a} + {b} makes", "do> count {a} and {b} together",
        "what> the sum of {a} and {b}", "what> the result of {a} + {b}", "what> {a} + {b}",
        "what> {a} plus {b}", "what> {a} and {b} together", "what> the total of {a} and {b}",
        "what> the answer to {a} + {b}", "what> the sum {a} + {b}", "if> what {a} + {b} is",
        "if> how much {a} and {b} is", "if> what {a} plus {b} makes", "if> what {a} and {b} make",
        "if> how much {a} plus {b} is", "if> what I get if I add {a} and {b}",
        "if> how much {a} and {b} make together",
    ),
    dev=("Can you tell me what {a} plus {b} is?", "Find the sum of {a} and {b}, please."),
    test=(
        "Please add {a} to {b}.",
        "Could you work out {a} plus {b}?",
        "Tell me: how much is {a} plus {b}?",
        "I have to add {a} and {b}. What is the result?",
        "Hi! Do you know the sum of {a} and {b}?",
        "What result do you get for {a} + {b}?",
    ),
)  # fmt: skip
_NUMBERS = (
    "I need to add {a} and {b}.", "I want to add {a} and {b}.", "I must add {a} to {b}.",
    "Here are two numbers: {a} and {b}.", "My numbers are {a} and {b}.", "Take {a} and {b}.",
    "I have {a} and {b}.", "There is a {a} and a {b}.", "We have the numbers {a} and {b}.",
    "Let me add {a} to {b}.", "I try to add {a} and {b}.", "Look at {a} + {b}.",
    "The first number is {a} and the second is {b}.", "I add {a} and {b}.",
    "This is my sum: {a} + {b}.", "I see {a} + {b} here.", "My teacher asks for {a} + {b}.",
    "I want the sum of {a} and {b}.", "I got {a} first and then {b}.", "You see {a} and {b}.",
    "One number is {a}, the other is {b}.", "I am adding {a} and {b}.", "We add {a} to {b}.",
    "It is about {a} and {b}.", "I paid {a} and then {b}.", "I counted {a} and {b} more.",
    "My sum is {a} plus {b}.", "The numbers {a} and {b} are given.", "I know {a} and {b}.",
)  # fmt: skip
_ITS_SUM = (
    "What is the sum?", "How much is it?", "What do I get?", "What is it?", "What is the total?",
    "How much is that?", "What comes out?", "Tell me the sum.", "Add them.", "Please add them.",
    "What is their sum?", "Can you do it?", "Give me the sum.", "What do they make?",
    "Work it out.", "How much do they make together?", "What is the answer?", "How much together?",
    "Do you know the result?", "What is that?", "How much is it together?", "Add the two.",
    "Please work it out.", "Can you add them?", "Tell me the total.", "What do we get?",
    "Could you give me the sum?", "Say the sum.", "What do you get?", "Help me with it.",
)  # fmt: skip
"""Joined at random, they ask in two sentences."""
_STORIES = Patterns(
    train=(
        "{n} has {a} {things} and buys {b} more. How many {things} does {n} have now?",
        "{n} has {a} {things} and {m} has {b}. How many {things} do they have together?",
        "{n} found {a} {things} on Monday and {b} on Friday. How many {things} is that?",
        "There are {a} {things} in one box and {b} in another. How many {things} are there?",
        "{n} had {a} {things}. {m} gave {n} {b} more. How many {things} does {n} have?",
        "A shop sold {a} {things} and then {b} {things}. How many {things} did it sell?",
    ),
    dev=("{n} owns {a} {things}, {m} owns {b}. How many {things} do they own?",),
    test=(
        "{n} bought {a} {things} and found {b} more. How many {things} does {n} have?",
        "{m} has {a} {things}, {n} has {b} {things}. How many {things} are there together?",
    ),
)
_VERBS = words.listed("has owns keeps holds sees makes sells takes finds counts packs brings")
_JOINTS = (
    "{n} {v} {a} {things} and {b} more.",
    "{n} {v} {a} {things} on Monday. On Tuesday {n} {w} {b} {things}.",
    "There are {a} {things} in the box. {n} {v} {b} more.",
    "{n} {v} {a} {things} and {m} {v} {b} {things}.",
    "{n} {v} {a} {things} in a bag and {b} in a box.",
    "In the morning {n} {v} {a} {things}, in the evening {b}.",
    "{m} gives {n} {a} {things}. Then {n} {v} {b} {things}.",
    "{n} {v} {a} red {things} and {b} blue {things}.",
    "Yesterday {n} {w} {a} {things}. Today {n} {w} {b}.",
    "A box has {a} {things}. A bag has {b} {things}.",
    "{n} {v} {a} {things}. {m} {w} {b}.",
    "{n} {v} {a} {things}, and {m} {w} {b} {things}.",
    "{n} {v} {a} {things} and then {w} {b} more.",
    "{n} {v} {a} {things} today and {b} tomorrow.",
    "{n} {v} {a} {things}; {m} {w} {b}.",
    "First {n} {v} {a} {things}, later {b} more.",
)
_QUESTIONS = (
    "How many {things} are there in all?",
    "How many {things} does that make?",
    "What is the sum?",
    "How many are that together?",
    "How many {things} does one find in all?",
    "What is the number of {things} in all?",
    "Can you say how many {things} that is?",
    "How many {things}?",
    "How many {things} are that?",
    "How many {things} in all?",
    "How many {things} is that together?",
    "What is the total?",
    "How many are there now?",
    "How many {things} do we count?",
    "Tell me the number of {things}.",
    "How many does that make?",
)
"""Joined at random, they make training stories; the held-out ones above are none of them."""


_MINUS = Patterns(
    train=("What is {a} - {b}?", "{a} - {b}", "What is {a} minus {b}?", "Take {b} from {a}."),
    dev=("Calculate {a} - {b}.",),
    test=("How much is {a} minus {b}?",),
)


def addition_steps(a: int, b: int) -> str:
    """Write the school method for two numbers of at most two digits."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    text = f"{a} + {b}. Ones: {a % 10} + {b % 10} = {ones}. Tens: {a // 10} + {b // 10} = {tens}"
    if ones >= 10:
        text += f", carry 1 makes {tens + 1}"
    return f"{text}. So {a} + {b} = {a + b}."


def sum_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a sum of two numbers of two digits; the answer restates it."""
    return _sum(rng, split, thinking=False)


def _story(rng: random.Random, split: Split) -> str:
    """Pick a story's pattern; most of training's are joined at random."""
    if split != "train" or rng.random() < 0.2:
        return _STORIES.pick(rng, split)
    told = rng.choice(_JOINTS).replace("{v}", rng.choice(_VERBS))
    return f"{told.replace('{w}', rng.choice(_VERBS))} {rng.choice(_QUESTIONS)}"


def _plain(rng: random.Random, split: Split) -> str:
    """Pick a pattern without a story; a quarter of training's are of two sentences."""
    if split != "train" or rng.random() > 0.25:
        return opened(rng, split, _PLAIN)
    while True:
        pattern = f"{rng.choice(_NUMBERS)} {rng.choice(_ITS_SUM)}"
        if not any(spoken(other) in spoken(pattern) for other in (*_PLAIN.dev, *_PLAIN.test)):
            return pattern


def think_sum_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a sum in thinking mode; the steps come before `</think>`."""
    return _sum(rng, split, thinking=True)


def _sum(rng: random.Random, split: Split, *, thinking: bool) -> Sample:
    if split == "train" and not thinking and rng.random() < 0.08:
        return _minus(rng, split)
    low = 1 if split == "train" and rng.random() < 0.12 else 10
    a, b = words.number_pair(rng, split, low=low)
    n, m = words.names(rng, split, 2)
    things = words.plural(rng.choice(words.THINGS))
    pattern = _story(rng, split) if rng.random() < 0.2 else _plain(rng, split)
    question = pattern.format(a=a, b=b, n=n, m=m, things=things)
    answer = f"{a} + {b} = {a + b}."
    if thinking:
        answer = f"{addition_steps(a, b)}</think>{answer}"
    return Sample(
        kind="think_sum" if thinking else "sum",
        messages=[user(sloppy(rng, question) if split == "train" else question)],
        answer=answer,
        thinking=thinking,
        expected=Expected(contains=(str(a + b),)),
    )


def _minus(rng: random.Random, split: Split) -> Sample:
    b, a = sorted(words.number_pair(rng, split, low=1))
    return Sample(
        kind="sum",
        messages=[user(_MINUS.pick(rng, split).format(a=a, b=b))],
        answer=f"{a} - {b} = {a - b}.",
        expected=Expected(contains=(str(a - b),)),
    )
