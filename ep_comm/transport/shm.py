"""Ranks of one machine over shared memory: each heap is a memfd that every rank maps.

The launcher makes the memfds (`create_heaps`) and the ranks inherit them, so that nothing has a
name and nothing is left behind when ranks or launcher are killed. Pages are taken when they are
first written.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

import torch

from whalepod.ep_comm.row_kernels.waiting import wait_for_signal
from whalepod.ep_comm.transport.interface import SignalWait, Topology
from whalepod.ep_comm.transport.mapped import MappedHeaps


def create_heaps(num_ranks: int, heap_bytes: int) -> list[int]:
    """Create one zeroed heap per rank; returns file descriptors for the ranks to inherit.

    Descriptors close on exec: pass them with `subprocess`'s `pass_fds`, or fork.
    """
    descriptors = []
    for rank in range(num_ranks):
        descriptor = os.memfd_create(f"whalepod-heap-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, heap_bytes)
        descriptors.append(descriptor)
    return descriptors


class ShmTransport(MappedHeaps):
    """One rank of a machine. The caller keeps (and closes) the descriptors."""

    def __init__(
        self, rank: int, descriptors: Sequence[int], *, ranks_per_node: int | None = None
    ) -> None:
        maps = [mmap.mmap(fd, os.fstat(fd).st_size) for fd in descriptors]
        heaps = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        topology = Topology(len(maps), ranks_per_node or len(maps))
        super().__init__(rank, topology, heaps, can_wait=True)

    def now_ms(self) -> float:
        return time.monotonic() * 1e3

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        address = int(self.mapped.heaps_R[self.rank]) + signal_offset
        value: int = wait_for_signal(address, at_least, int(1e6 * deadline_ms))
        return SignalWait(value >= at_least, value)
