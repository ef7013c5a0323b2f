"""Sums and differences of numbers of one to three digits, and products of one-digit numbers.

Every pair of lengths is drawn equally often, so that no length is a special case. Numbers of up to
two digits are answered at once; with three, the answer shows the school method, as does thinking.
"""

from __future__ import annotations

import random
from dataclasses import replace

from whalepod.tools.tiny.data import sums, words
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Expected, Sample, Split, sloppy, user
from whalepod.tools.tiny.data.tables import load

_TABLE = load("arithmetic")
_PLUS, _MINUS, _TIMES, _BEYOND = (
    patterns(_TABLE[name]) for name in ("plus", "minus", "times", "beyond")
)
_TYPED = {"+": _PLUS, "-": _MINUS, "*": _TIMES}
_PLACES = ("Ones", "Tens", "Hundreds")


def calculation_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a sum or a difference; both lengths are drawn."""
    return calculation(rng, split, rng.choice("+-"), rng.randint(1, 3), rng.randint(1, 3))


def think_calculation_sample(rng: random.Random, split: Split) -> Sample:
    """The same in thinking mode: the steps come before `</think>`."""
    operation, lengths = rng.choice("+-"), (rng.randint(1, 3), rng.randint(1, 3))
    return calculation(rng, split, operation, *lengths, thinking=True)


def typed_sample(rng: random.Random, split: Split) -> Sample:
    """Ask in one of the hurried forms."""
    operation = rng.choice("+-*")
    lengths = (1, 1) if operation == "*" else (rng.randint(1, 3), rng.randint(1, 3))
    sample = calculation(rng, split, operation, *lengths, typed=True)
    return replace(sample, kind="typed")


def product_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for a product of two numbers of one digit."""
    return calculation(rng, split, "*", 1, 1)


def beyond_question(rng: random.Random, split: Split) -> str:
    """Ask for something that is not calculated: quotients, roots, long numbers."""
    return _BEYOND.pick(rng, split).format(
        a=rng.randint(2, 99), b=rng.randint(2, 20), x=rng.randint(11, 999),
        y=rng.randint(11, 999), p=rng.randint(1_000, 99_999), q=rng.randint(1_000, 99_999),
    )  # fmt: skip


def calculation(
    rng: random.Random,
    split: Split,
    operation: str,
    first_length: int,
    second_length: int,
    *,
    thinking: bool = False,
    typed: bool = False,
) -> Sample:
    """Ask for one calculation with numbers of the given lengths."""
    a, b = _numbers(rng, split, first_length, second_length)
    if operation == "-" and a < b and rng.random() < 0.6 and first_length == second_length:
        a, b = b, a
    form = _TYPED[operation].pick(rng, split) if typed else _question(rng, split, operation)
    question = form.format(a=a, b=b)
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    told = f"{a} {operation} {b} = {result}."
    steps = column_steps(a, b) if operation == "+" else borrow_steps(a, b)
    shown = told if max(a, b) < 100 else steps
    return Sample(
        kind="think_calculation" if thinking else f"{first_length}{operation}{second_length}",
        messages=[user(sloppy(rng, question) if split == "train" else question)],
        answer=f"{steps}</think>{told}" if thinking else shown,
        thinking=thinking,
        expected=Expected(contains=(f"= {result}.",)),
    )


def _numbers(rng: random.Random, split: Split, *lengths: int) -> tuple[int, int]:
    """Draw two numbers; two of one digit are the same in every split, since all are learnt."""
    while True:
        a, b = (rng.randint(10 ** (n - 1) if n > 1 else 0, 10**n - 1) for n in lengths)
        if max(a, b) < 10 or words.number_split(a, b) == split:
            return a, b


def _question(rng: random.Random, split: Split, operation: str) -> str:
    if operation == "+" and rng.random() < 0.3:
        return sums.plain_form(rng, split)
    draw = rng.random()
    if draw < 0.35:
        return _TYPED[operation].pick(rng, split)
    return opened(rng, split, _TYPED[operation])


def _digits(number: int, count: int) -> list[int]:
    return [number // 10**place % 10 for place in range(count)]


def column_steps(a: int, b: int) -> str:
    """Write the school method of adding, place by place, for numbers of at most three digits."""
    count, carry, parts = max(2, len(str(max(a, b)))), 0, [f"{a} + {b}."]
    for place, x, y in zip(_PLACES, _digits(a, count), _digits(b, count), strict=False):
        text = f"{place}: {x} + {y} = {x + y}"
        if carry:
            text += f", carry 1 makes {x + y + 1}"
        parts.append(f"{text}.")
        carry = (x + y + carry) // 10
    return " ".join([*parts, f"So {a} + {b} = {a + b}."])


def borrow_steps(a: int, b: int) -> str:
    """Write the school method of subtracting; the larger number goes first."""
    high, low = max(a, b), min(a, b)
    count, borrow, parts = max(2, len(str(high))), 0, [f"{a} - {b}."]
    if a < b:
        parts.append(f"{b} is larger.")
    for place, x, y in zip(_PLACES, _digits(high, count), _digits(low, count), strict=False):
        top = x + 10 if x - borrow < y else x
        text = f"{place}: {top} - {y} = {top - y}"
        if borrow:
            text += f", less 1 makes {top - y - 1}"
        if top > x:
            text += ", borrow 1"
        parts.append(f"{text}.")
        borrow = top > x
    if a < b:
        parts.append(f"So {b} - {a} = {b - a} and {a} - {b} = {a - b}.")
    else:
        parts.append(f"So {a} - {b} = {a - b}.")
    return " ".join(parts)
