"""What an exchange asks of a transport: one-sided puts into peers' heaps, and signals.

Semantics are NVSHMEM's. Every rank has a byte heap of one size; an offset means the same place on
all of them. A put is *not* ordered with anything that follows, except: a `fence(rank)` orders what
was sent to that rank before it with what is sent to it after; `quiet` completes everything. The
source of a put must not change before `quiet`. Deadlines are instants of the transport's own clock,
`now_ms()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class SignalWait(NamedTuple):
    """How a wait ended: the signal's last value, and whether it reached what was asked."""

    arrived: bool
    value: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks share a node: `ranks_per_node` neighbours each."""

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"num_ranks ({self.num_ranks}) must be a multiple of "
                f"ranks_per_node ({self.ranks_per_node}): every node needs as many ranks"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def index_of(self, rank: int) -> int:
        """Return the rank's place in its node."""
        return rank % self.ranks_per_node

    def rank_at(self, node: int, index: int) -> int:
        return node * self.ranks_per_node + index

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Heaps that compiled code may read and write by itself, in place of puts and signals.

    Stores become visible to other ranks in the order in which the machine makes them.

    heaps_R   int64 addresses of all heaps in this process, valid while a `peer_view` of each lives
    can_wait  what other ranks store arrives while compiled code waits for it, on the clock of
              `time.monotonic`; else only `signal_wait` lets them go on
    """

    heaps_R: NDArray[np.int64]
    can_wait: bool


class Transport(Protocol):
    """One rank's end. Not thread-safe: one thread of the rank calls it."""

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def heap(self) -> Tensor:
        """This rank's heap, uint8 `[heap_bytes]`, zero at first."""
        ...

    def now_ms(self) -> float:
        """Return the time in ms; only differences mean something."""
        ...

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        """Begin to copy `source` (uint8, contiguous) to `offset` of a rank's heap."""
        ...

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        """Set a 64-bit signal of a rank's heap; ordered after earlier puts by `fence` only."""
        ...

    def signal_fetch(self, signal_offset: int) -> int:
        """Return a signal of this rank's own heap."""
        ...

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        """Wait until a signal of this rank's own heap is at least `at_least`, or the deadline."""
        ...

    def fence(self, rank: int) -> None:
        """Order what was sent to `rank` before with what is sent to it from now on."""
        ...

    def quiet(self) -> None:
        """Return when all puts and signals of this rank have been delivered."""
        ...

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        """Quiet, then wait for all ranks to come here; returns the ranks that did not."""
        ...

    def peer_view(self, rank: int) -> Tensor | None:
        """Return the heap of `rank` if plain stores reach it, else None.

        Stores through it count as puts: only a `fence` orders them before a signal.
        """
        ...

    @property
    def mapped(self) -> MappedMemory | None:
        """How compiled code reaches all heaps without the transport; None: it must not."""
        ...

    def close(self) -> None:
        """Deliver what is under way and give the heap back."""
        ...


def barrier_by_signals(transport: Transport, count: int, deadline_ms: float) -> tuple[int, ...]:
    """Do the barrier number `count` (from 1) with the heap's first signals, one per rank."""
    transport.quiet()
    ranks = range(transport.topology.num_ranks)
    for rank in ranks:
        transport.signal_op(8 * transport.rank, count, rank)
    return tuple(r for r in ranks if not transport.signal_wait(8 * r, count, deadline_ms).arrived)
