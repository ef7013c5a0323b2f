"""A grammar that any model can follow: the tokens of a text climb, and begin again below."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import GrammarError, Matcher

TOO_HIGH = 100


@dataclass(frozen=True)
class Rungs:
    """Token i of a text is `first` + i modulo `num_rungs`, or a multiple of that above it, below
    `end`."""

    first: int
    num_rungs: int
    end: int
    vocab_size: int
    eos: int


class Ladder:
    """A matcher: after `length` tokens the text must end."""

    def __init__(self, rungs: Rungs, length: int) -> None:
        self._rungs = rungs
        self._length = length
        self._num_tokens = 0

    def consume(self, token_id: int) -> bool:
        fits = bool(self.allowed()[token_id])
        self._num_tokens += fits
        return fits

    def allowed(self) -> NDArray[np.bool_]:
        if self._num_tokens > TOO_HIGH:
            raise GrammarError("too high")
        rungs = self._rungs
        mask_V = np.zeros(rungs.vocab_size, np.bool_)
        if self._num_tokens == self._length:
            mask_V[rungs.eos] = True
        else:
            rung = rungs.first + self._num_tokens % rungs.num_rungs
            mask_V[rung : rungs.end : rungs.num_rungs] = True
        return mask_V

    def copy(self) -> Self:
        copied = type(self)(self._rungs, self._length)
        copied._num_tokens = self._num_tokens
        return copied


class LadderCompiler:
    """Compiles a number to a ladder of that length, once `gate` is open."""

    def __init__(self, rungs: Rungs) -> None:
        self._rungs = rungs
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, constraint: Constraint) -> Matcher:
        assert self.gate.wait(10)
        if not constraint.grammar.isdecimal():
            raise GrammarError(f"{constraint.grammar} is no number")
        return Ladder(self._rungs, int(constraint.grammar))
