"""All ranks in one process, one thread each, only one of which runs at a time.

A rank runs until it waits for a signal that is not there; then the next rank that can go on does.
The clock is virtual: it stands still while anyone can run, and jumps to the next deadline when all
wait. So a run is deterministic (also with `seed`, which shuffles whose turn it is), a group that
would hang reports its time-outs at once, and no test sleeps.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from whalepod.ep_comm.transport.interface import SignalWait, Topology, Transport
from whalepod.ep_comm.transport.mapped import MappedHeaps

T = TypeVar("T")


@dataclass(slots=True)
class _Waiter:
    """What a rank waits for; `is_ready` None: it only waits for its turn."""

    is_ready: Callable[[], bool] | None
    deadline_ms: float


class _Turns:
    """Decides which rank runs, and what time it is."""

    def __init__(self, num_ranks: int, seed: int | None) -> None:
        self.now_ms = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._gates = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waiters: dict[int, _Waiter] = {}

    def enter(self, rank: int) -> None:
        """Register a rank before its thread starts."""
        self._waiters[rank] = _Waiter(None, 0.0)

    def await_turn(self, rank: int) -> None:
        self._gates[rank].acquire()

    def wait(self, rank: int, is_ready: Callable[[], bool], deadline_ms: float) -> bool:
        """Let others run until `is_ready` or the deadline; return the former."""
        if is_ready():
            return True
        if deadline_ms <= self.now_ms:
            return False
        self._waiters[rank] = _Waiter(is_ready, deadline_ms)
        following = self._choose(rank)
        if following != rank:
            self._gates[following].release()
            self._gates[rank].acquire()
        return is_ready()

    def leave(self, rank: int) -> None:
        """End a rank's part; the next one goes on."""
        if self._waiters:
            self._gates[self._choose(rank)].release()

    def start(self) -> None:
        self.leave(-1)

    def _choose(self, rank: int) -> int:
        """Take the next rank that can run out of the waiting ones."""
        order = sorted(self._waiters, key=lambda r: (r <= rank, r))
        if self._random is not None:
            self._random.shuffle(order)
        for candidate in order:
            is_ready = self._waiters[candidate].is_ready
            if is_ready is None or is_ready():
                break
        else:
            candidate = min(order, key=lambda r: self._waiters[r].deadline_ms)
            self.now_ms = max(self.now_ms, self._waiters[candidate].deadline_ms)
        del self._waiters[candidate]
        return candidate


class LoopbackTransport(MappedHeaps):
    """One rank of a `LoopbackGroup`."""

    def __init__(self, rank: int, topology: Topology, heaps: list[Tensor], turns: _Turns) -> None:
        # a rank without others has nothing to wait for
        super().__init__(rank, topology, heaps, can_wait=len(heaps) == 1)
        self._turns = turns

    def now_ms(self) -> float:
        return self._turns.now_ms

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        arrived = self._turns.wait(
            self.rank, lambda: self.signal_fetch(signal_offset) >= at_least, deadline_ms
        )
        return SignalWait(arrived, self.signal_fetch(signal_offset))

    def close(self) -> None:
        """Do nothing: the group owns the heaps."""


class LoopbackGroup:
    """R ranks of one process. A group of one needs no `run`: use `transports[0]` as it is."""

    def __init__(
        self,
        num_ranks: int,
        heap_bytes: int,
        *,
        ranks_per_node: int | None = None,
        seed: int | None = None,
    ) -> None:
        topology = Topology(num_ranks, ranks_per_node or num_ranks)
        self._turns = _Turns(num_ranks, seed)
        words = -(-heap_bytes // 8)
        heaps = [torch.zeros(8 * words, dtype=torch.uint8) for _ in range(num_ranks)]
        self.transports = [
            LoopbackTransport(rank, topology, heaps, self._turns) for rank in range(num_ranks)
        ]

    def run(
        self,
        program: Callable[[Transport], T],
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> list[T | Exception]:
        """Run `program` on every rank and return what each returned or raised, by rank.

        `wrap` puts another transport around each rank's own. Exceptions are values here, because
        the other ranks go on; `results_of` raises them.
        """
        results: list[T | Exception] = [RuntimeError("did not run") for _ in self.transports]

        def body(inner: Transport) -> None:
            self._turns.await_turn(inner.rank)
            try:
                transport = wrap(inner)
                results[inner.rank] = program(transport)
                transport.close()
            except Exception as error:
                results[inner.rank] = error
            finally:
                self._turns.leave(inner.rank)

        threads = [threading.Thread(target=body, args=(t,), daemon=True) for t in self.transports]
        for transport in self.transports:
            self._turns.enter(transport.rank)
        for thread in threads:
            thread.start()
        self._turns.start()
        for thread in threads:
            thread.join()
        return results


def results_of(results: list[T | Exception]) -> list[T]:
    """Return the results of `LoopbackGroup.run`, or raise the first rank's exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]
