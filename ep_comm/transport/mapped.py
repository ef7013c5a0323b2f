"""What transports share whose ranks reach every heap by plain stores: loopback, shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm.transport.interface import (
    MappedMemory,
    SignalWait,
    Topology,
    barrier_by_signals,
)


class MappedHeaps(ABC):
    """One rank's end. What waiting, time and order are is for the subclass to say.

    can_wait  see `MappedMemory`
    """

    def __init__(
        self, rank: int, topology: Topology, heaps: Sequence[Tensor], *, can_wait: bool
    ) -> None:
        self.rank = rank
        self.topology = topology
        self._heaps = list(heaps)
        self._signals = [heap.view(torch.int64).numpy() for heap in heaps]
        self._num_barriers = 0
        addresses = np.array([heap.data_ptr() for heap in heaps], dtype=np.int64)
        self.mapped = MappedMemory(addresses, can_wait)

    @property
    def heap(self) -> Tensor:
        return self._heaps[self.rank]

    @abstractmethod
    def now_ms(self) -> float: ...

    @abstractmethod
    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait: ...

    @abstractmethod
    def fence(self, rank: int) -> None: ...

    @abstractmethod
    def quiet(self) -> None: ...

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        self._heaps[rank][offset : offset + source.numel()] = source

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        self._signals[rank][signal_offset // 8] = value

    def signal_fetch(self, signal_offset: int) -> int:
        return int(self._signals[self.rank][signal_offset // 8])

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    def peer_view(self, rank: int) -> Tensor | None:
        return self._heaps[rank]

    def close(self) -> None:
        """Let go of the heaps; memory is unmapped as soon as no tensor refers to it any more."""
        self._signals, self._heaps = [], []
