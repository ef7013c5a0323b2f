"""What the gateway and the engine need of the grammar library."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from whalepod.scheduler.params import Constraint


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for the client."""


class CompilerUnavailableError(RuntimeError):
    """Whether a grammar compiles is unknown for now; the message is for the client."""


class Matcher(Protocol):
    """How far a text got in a grammar. It is at the beginning when new."""

    def consume(self, token_id: int) -> bool:
        """Take the next token; False, and nothing changes, if the grammar forbids it."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, `[V]`: after the end, only tokens that end a text.

        Raises GrammarError when the library gives up on the grammar.
        """
        ...

    def copy(self) -> Self:
        """Return a matcher of its own at the same place."""
        ...


class Compiler(Protocol):
    """Compiles grammars for one vocabulary. May be used from several threads."""

    def compile(self, constraint: Constraint) -> Matcher:
        """Return a new matcher; GrammarError says what is wrong with the grammar."""
        ...
