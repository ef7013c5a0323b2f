"""A transport that uses every freedom the interface leaves, around one that does not.

x86 delivers stores in their order, so tests over shared memory cannot see a missing fence. Here
puts are cut in pieces and wait in a queue; what is due is delivered in random order, and only a
fence or `quiet` holds anything back. The bytes of a put are read when it is delivered, so a source
that changes before `quiet` shows too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from torch import Tensor

from whalepod.ep_comm.transport.interface import (
    MappedMemory,
    SignalWait,
    Topology,
    Transport,
    barrier_by_signals,
)


class RankDropped(Exception):
    """This rank dies here, as planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong.

    max_piece_bytes  puts are cut into pieces of at most this size
    max_delay        a put waits for 0 .. max_delay deliveries; a signal for a tenth of that
    drops            rank -> number of its operations after which it dies
    poll_ms          how long a wait lasts between two deliveries
    """

    max_piece_bytes: int = 512
    max_delay: int = 20
    drops: dict[int, int] = field(default_factory=dict)
    poll_ms: float = 0.05


@dataclass(slots=True, eq=False)
class _Operation:
    """One piece of a put (`source`), or a signal (`value`)."""

    rank: int
    offset: int
    due: int
    generation: int
    source: Tensor | None = None
    value: int = 0


class FaultyTransport:
    """`inner` with delays, reordering, torn puts and dead ranks; deterministic for a seed."""

    def __init__(self, inner: Transport, seed: int, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._random = random.Random(seed * 1_000_003 + inner.rank)
        self._pending: list[_Operation] = []
        self._generation = [0] * inner.topology.num_ranks
        self._now = 0
        self._num_operations = 0
        self._num_barriers = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def topology(self) -> Topology:
        return self._inner.topology

    @property
    def heap(self) -> Tensor:
        return self._inner.heap

    @property
    def num_operations(self) -> int:
        """Operations so far: the points at which `FaultPlan.drops` can kill."""
        return self._num_operations

    @property
    def num_pending(self) -> int:
        """Pieces and signals that no `quiet` has completed."""
        return len(self._pending)

    def now_ms(self) -> float:
        return self._inner.now_ms()

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        self._count_operation()
        self._queue_put(offset, source, rank)

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        self._count_operation()
        self._queue_signal(signal_offset, value, rank)

    def signal_fetch(self, signal_offset: int) -> int:
        return self._inner.signal_fetch(signal_offset)

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        self._count_operation()
        while self._pending:
            self._deliver_due()
            step_ms = min(deadline_ms, self.now_ms() + self._plan.poll_ms)
            result = self._inner.signal_wait(signal_offset, at_least, step_ms)
            if result.arrived or self.now_ms() >= deadline_ms:
                return result
        return self._inner.signal_wait(signal_offset, at_least, deadline_ms)

    def fence(self, rank: int) -> None:
        self._count_operation()
        self._generation[rank] += 1

    def quiet(self) -> None:
        self._count_operation()
        self._drain()

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    @property
    def mapped(self) -> MappedMemory | None:
        """Return None: rows go through the transport."""
        return None

    def peer_view(self, rank: int) -> Tensor | None:
        """Return None: a plain store could not be delayed."""
        return None

    def close(self) -> None:
        self._drain()
        self._inner.close()

    def _count_operation(self) -> None:
        self._num_operations += 1
        limit = self._plan.drops.get(self.rank)
        if limit is not None and self._num_operations > limit:
            self._pending.clear()
            raise RankDropped(f"rank {self.rank} dies after {limit} operations")

    def _queue_put(self, offset: int, source: Tensor, rank: int) -> None:
        start = 0
        while start < source.numel():
            end = start + self._random.randint(1, self._plan.max_piece_bytes)
            piece = self._operation(rank, offset + start, self._plan.max_delay)
            piece.source = source[start:end]
            self._pending.append(piece)
            start = end

    def _queue_signal(self, offset: int, value: int, rank: int) -> None:
        signal = self._operation(rank, offset, self._plan.max_delay // 10)
        signal.value = value
        self._pending.append(signal)

    def _operation(self, rank: int, offset: int, max_delay: int) -> _Operation:
        return _Operation(
            rank=rank,
            offset=offset,
            due=self._now + self._random.randint(0, max_delay),
            generation=self._generation[rank],
        )

    def _drain(self) -> None:
        while self._pending:
            self._deliver_due()

    def _deliver_due(self) -> None:
        """Let one unit of time pass and deliver, in random order, what is due and not held back."""
        self._now += 1
        oldest: dict[int, int] = {}
        for operation in self._pending:
            generation = oldest.get(operation.rank, operation.generation)
            oldest[operation.rank] = min(generation, operation.generation)
        ready = [
            operation
            for operation in self._pending
            if operation.due <= self._now and operation.generation == oldest[operation.rank]
        ]
        self._random.shuffle(ready)
        for operation in ready:
            self._deliver(operation)
        delivered = set(ready)
        self._pending = [operation for operation in self._pending if operation not in delivered]

    def _deliver(self, operation: _Operation) -> None:
        if operation.source is None:
            self._inner.signal_op(operation.offset, operation.value, operation.rank)
        else:
            self._inner.put_nbi(operation.offset, operation.source, operation.rank)
