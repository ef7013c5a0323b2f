"""Outputs of one request between the channel that receives them and the request's reader."""

from __future__ import annotations

import asyncio
from collections import deque

from whalepod.scheduler.plan import SequenceOutput

MAX_QUEUED_OUTPUTS = 64
"""Outputs that wait for one slow reader; later ones are joined to the last of their sequence."""


class OutputQueue:
    """Outputs of one request on their way to its reader, in their order."""

    def __init__(self, num_sequences: int) -> None:
        self.live = set(range(num_sequences))
        """Answers whose end the reader has not seen."""
        self._outputs: deque[SequenceOutput] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def put(self, output: SequenceOutput) -> None:
        """Queue an output; for a slow reader it is joined to the last of its sequence."""
        if output.index not in self.live:
            return  # it was under way when the reader dropped the answer
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
        if output.finish_reason is not None:
            self.live.discard(output.index)
        return output
