"""What transports share whose ranks reach every heap by plain stores: loopback, shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from whalepod.ep_comm.row_kernels.waiting import read_signal, set_signal
from whalepod.ep_comm.transport.interface import (
    MappedMemory,
    SignalWait,
    Topology,
    barrier_by_signals,
)


class MappedHeaps(ABC):
    """One rank's end. What waiting and time are is for the subclass to say.

    A signal is stored with release and read with acquire order, so a put is seen before a signal
    that is set after it on every processor: a fence has nothing left to do.

    can_wait  see `MappedMemory`
    """

    def __init__(
        self, rank: int, topology: Topology, heaps: Sequence[Tensor], *, can_wait: bool
    ) -> None:
        self.rank = rank
        self.topology = topology
        self._heaps = list(heaps)
        self._num_barriers = 0
        self._addresses = [heap.data_ptr() for heap in heaps]
        self.mapped = MappedMemory(np.array(self._addresses, dtype=np.int64), can_wait)

    @property
    def heap(self) -> Tensor:
        return self._heaps[self.rank]

    @abstractmethod
    def now_ms(self) -> float: ...

    @abstractmethod
    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait: ...

    def fence(self, rank: int) -> None:  # noqa: B027  (what both subclasses need)
        """Do nothing: a signal is set after the puts before it."""

    def quiet(self) -> None:  # noqa: B027
        """Do nothing: puts are plain stores."""

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        self._heaps[rank][offset : offset + source.numel()] = source

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        set_signal(self._addresses[rank] + signal_offset, value)

    def signal_fetch(self, signal_offset: int) -> int:
        value: int = read_signal(self._addresses[self.rank] + signal_offset)
        return value

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    def peer_view(self, rank: int) -> Tensor | None:
        return self._heaps[rank]

    def close(self) -> None:
        """Let go of the heaps; memory is unmapped as soon as no tensor refers to it any more."""
        self._heaps = []
