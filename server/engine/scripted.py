"""The test hook: a sequence that emits given pieces of text, one per step (DESIGN 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whalepod.scheduler.plan import SequenceOutput

RAISE = "!raise"
"""The piece that makes its step fail."""

Encode = Callable[[str], Sequence[int]]
"""Text to token ids; a marker that is one vocabulary item becomes that token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestHooks:
    """What the request key `test_steps` needs; an engine without it refuses the key."""

    encode: Encode
    eos_token_id: int


class ScriptError(Exception):
    """The script asked for a failure."""


class Script:
    """The tokens of one sequence, cut into steps. Where it stands follows from the text's length.

    The model computes one token after the other as always; what a step of the script holds is
    sent together when its last token is there, as if one step had yielded them all. Having no
    state, a script goes on rightly after a failed or a repeated step.
    """

    def __init__(self, pieces: Sequence[str], encode: Encode, eos_token_id: int) -> None:
        self._token_ids: list[int | None] = []  # None fails
        self._step_ends: set[int] = set()
        self._eos_token_id = eos_token_id
        for piece in pieces:
            self._token_ids += [None] if piece == RAISE else list(encode(piece))
            self._step_ends.add(len(self._token_ids))

    def token(self, num_generated: int) -> int:
        """Return the token after so many, past the last EOS. Raises ScriptError on `!raise`."""
        if num_generated >= len(self._token_ids):
            return self._eos_token_id
        token_id = self._token_ids[num_generated]
        if token_id is None:
            raise ScriptError(f"the test script failed after {num_generated} tokens")
        return token_id

    def ends_step(self, num_generated: int) -> bool:
        """Say whether a step of the script ends after so many tokens."""
        return num_generated in self._step_ends or num_generated > len(self._token_ids)


class ScriptedOutputs:
    """Holds back what scripted sequences yield until a step of their script is whole."""

    def __init__(self) -> None:
        self._scripts: dict[int, Script] = {}
        self._held: dict[int, SequenceOutput] = {}

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._scripts

    def add(self, sequence_id: int, script: Script) -> None:
        """Take a sequence before its first output."""
        self._scripts[sequence_id] = script

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that ended."""
        self._scripts.pop(sequence_id, None)
        self._held.pop(sequence_id, None)

    def join(self, sequence_id: int, output: SequenceOutput) -> SequenceOutput:
        """Return an output behind those that were held back."""
        held = self._held.pop(sequence_id, None)
        return output if held is None else held.join(output)

    def join_step(
        self, sequence_id: int, output: SequenceOutput, num_generated: int
    ) -> SequenceOutput | None:
        """Return what a step of the script yielded if it ends after so many tokens, else None."""
        output = self.join(sequence_id, output)
        if self._scripts[sequence_id].ends_step(num_generated):
            return output
        self._held[sequence_id] = output
        return None
