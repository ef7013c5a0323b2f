"""Outputs of one request between the channel that receives them and the request's reader."""

from __future__ import annotations

import asyncio
from collections import deque

from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import SequenceOutput

MAX_QUEUED_BYTES = 32 * 1024 * 1024
"""Memory that outputs may take while they wait for one reader."""
TOKEN_BYTES = 64
"""About what a token takes in memory, or one of its alternatives with its log-probability."""
MAX_QUEUED_OUTPUTS = 64
"""Outputs that wait for one slow reader; later ones are joined to the last of their sequence."""


class OutputQueue:
    """Outputs of one request on their way to its reader, in their order."""

    def __init__(self, num_sequences: int) -> None:
        self.live = set(range(num_sequences))
        """Answers whose end the reader has not seen."""
        self._outputs: deque[SequenceOutput] = deque()
        self._num_bytes = 0
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def put(self, output: SequenceOutput) -> bool:
        """Queue an output; for a slow reader it is joined to the last of its sequence.

        False: too much waits. Nothing is kept any more, and the reader is told.
        """
        if output.index not in self.live or self._error is not None:
            return True  # it was under way when the reader dropped the answer
        self._num_bytes += _size(output)
        if self._num_bytes > MAX_QUEUED_BYTES:
            self._outputs.clear()
            self.fail(RequestRejected("client_too_slow", "the client reads its answer too slowly"))
            return False
        self._append(output)
        return True

    def _append(self, output: SequenceOutput) -> None:
        if len(self._outputs) >= MAX_QUEUED_OUTPUTS:
            for place in range(len(self._outputs) - 1, -1, -1):
                if self._outputs[place].index == output.index:
                    self._outputs[place] = self._outputs[place].join(output)
                    return
        self._outputs.append(output)
        self._arrived.set()

    def drop(self, index: int) -> bool:
        """Keep nothing more of an answer; False when its end was read, or it was dropped before."""
        if index not in self.live:
            return False
        self.live.remove(index)
        self._outputs = deque(output for output in self._outputs if output.index != index)
        self._num_bytes = sum(map(_size, self._outputs))
        return True

    def fail(self, error: Exception) -> None:
        """Make the reader raise once it has read what came before."""
        self._error = error
        self._arrived.set()

    async def get(self) -> SequenceOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self._num_bytes -= _size(output)
        if output.finish_reason is not None:
            self.live.discard(output.index)
        return output


def _size(output: SequenceOutput) -> int:
    """Return about how many bytes an output takes."""
    logprobs = (*output.logprobs, *output.prompt_logprobs)
    num_parts = len(output.token_ids) + sum(1 + len(token.top) for token in logprobs)
    return num_parts * TOKEN_BYTES
