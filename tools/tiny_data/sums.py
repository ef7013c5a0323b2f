"""Sums: two numbers of two digits above all, with and without written steps."""

from __future__ import annotations

import random

from whalepod.tools.tiny_data import words
from whalepod.tools.tiny_data.sample import Expected, Patterns, Sample, Split, sloppy, user

_PLAIN = Patterns(
    train=(
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "{a}+{b}",
        "{a} + {b}",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Calculate {a} + {b}.",
        "How much is {a} + {b}?",
        "What is the sum of {a} and {b}?",
        "Tell me the sum of {a} and {b}.",
        "Compute {a} plus {b}.",
        "Can you add {a} and {b}?",
        "Work out {a} + {b} for me.",
        "I need {a} + {b}.",
        "Please compute {a} + {b}.",
        "What do you get if you add {a} to {b}?",
        "Sum up {a} and {b}.",
        "{a} plus {b} is what?",
        "How much do {a} and {b} make?",
        "Solve: {a} + {b}",
        "Question: {a} + {b}?",
        "Give me the result of {a} + {b}.",
        "Find {a} + {b}.",
        "Do you know what {a} and {b} make together?",
        "Let us do a sum: {a} + {b}.",
        "Hello, what is {a} + {b}?",
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
)
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
    "{n} {v} {a} {things}. {m} {w} {b}.",
    "{n} {v} {a} {things}, and {m} {w} {b} {things}.",
    "{n} {v} {a} {things} and then {w} {b} more.",
    "{n} {v} {a} {things} today and {b} tomorrow.",
    "{n} {v} {a} {things}; {m} {w} {b}.",
    "First {n} {v} {a} {things}, later {b} more.",
)
_QUESTIONS = (
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
    if split != "train" or rng.random() < 0.3:
        return _STORIES.pick(rng, split)
    told = rng.choice(_JOINTS).replace("{v}", rng.choice(_VERBS))
    return f"{told.replace('{w}', rng.choice(_VERBS))} {rng.choice(_QUESTIONS)}"


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
    pattern = _story(rng, split) if rng.random() < 0.2 else _PLAIN.pick(rng, split)
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
