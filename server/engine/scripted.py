"""The test hook: a sequence that emits given pieces of text, one per step (DESIGN 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

RAISE = "!raise"
"""The piece that makes its step fail."""

Encode = Callable[[str], Sequence[int]]
"""Text to token ids; a marker that is one vocabulary item becomes that token."""


class ScriptError(Exception):
    """The script asked for a failure."""


class Script:
    """The steps of one sequence, as tokens. Where it stands follows from the text's length.

    Having no state of its own, a script goes on rightly after a failed or repeated step.
    """

    def __init__(self, pieces: Sequence[str], encode: Encode, eos_token_id: int) -> None:
        self._steps: dict[int, tuple[int, ...] | None] = {}
        self._eos_token_id = eos_token_id
        num_tokens = 0
        for piece in pieces:
            token_ids = None if piece == RAISE else tuple(encode(piece))
            if token_ids == ():
                continue  # a step that yields nothing is no step
            self._steps.setdefault(num_tokens, token_ids)
            num_tokens += len(token_ids or ())

    def step(self, num_generated: int) -> tuple[int, ...]:
        """Return the tokens of the step that starts after so many; ScriptError on `!raise`."""
        token_ids = self._steps.get(num_generated, (self._eos_token_id,))
        if token_ids is None:
            raise ScriptError(f"the test script failed after {num_generated} tokens")
        return token_ids
