"""A rank's view of its group: who has answered, who is late, and how a call ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from whalepod.ep_comm.transport.interface import SignalWait, Topology, Transport

COUNT_BITS = 17
"""The epoch has the other 46: ten years of 1,450 calls a second, cut into 64 chunks each."""
COUNT_MASK = (1 << COUNT_BITS) - 1
MAX_RANKS = 4096
FIRST_ABORT = (1 << COUNT_BITS) - MAX_RANKS
"""Counts from here on say: this rank gave the call up, because of rank (count - this)."""


def signal_value(epoch: int, count: int) -> int:
    """Return the signal for `count` items of call `epoch` (from 1).

    The epoch stands above the count, so a wait for "at least this epoch" needs nothing zeroed
    before, and a signal left over from an earlier call is too small to be taken for this one.
    """
    assert 0 < epoch < 1 << (63 - COUNT_BITS), epoch
    assert 0 <= count < 1 << COUNT_BITS, count
    return (epoch << COUNT_BITS) | count


_CAUSES = ("late", "gone", "aborted", "blamed", "overtaken", "masked", "lost")

WATCH_MS = 100.0
"""How often a wait asks whether the rank that it waits for is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """How a call ended. If not `ok`, what the missing ranks owed counts as zero in its result.

    late       no signal before the deadline: suspect from now on
    gone       no signal, and the control plane says that nothing more will come: suspect, too
    aborted    the rank gave the call up: its step raised, or it misses another rank
    blamed     the rank because of which others gave up (itself, if its own step raised)
    overtaken  the rank is already at a later call: the group went on without this rank
    masked     suspect since an earlier call, not waited for
    lost       live, but a dead rank on the way did not forward its rows
    """

    operation: str
    epoch: int
    late: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()
    overtaken: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(getattr(self, cause) for cause in _CAUSES)

    @property
    def must_stop(self) -> bool:
        """Return whether this call cannot go on; without ranks that were masked before it can."""
        return bool(self.late or self.gone or self.aborted or self.overtaken)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return every rank whose part is not in the result; one that others blame may be in it."""
        causes = [cause for cause in _CAUSES if cause != "blamed"]
        return tuple(sorted({rank for cause in causes for rank in getattr(self, cause)}))

    def __str__(self) -> str:
        found = [f"{cause}: ranks {list(getattr(self, cause))}" for cause in _CAUSES]
        missing = "; ".join(text for text in found if not text.endswith("[]"))
        return f"{self.operation} of epoch {self.epoch}: {missing or 'complete'}"


def merge(first: CallStatus, second: CallStatus) -> CallStatus:
    """Return the status of two phases of a call, named after the second."""
    if first.ok:
        return second
    found = {c: tuple(sorted({*getattr(first, c), *getattr(second, c)})) for c in _CAUSES}
    return CallStatus(operation=second.operation, epoch=second.epoch, **found)


class CallFailed(RuntimeError):
    """A call ended without all ranks; `status` names them, `layer` where in the model it was."""

    def __init__(self, status: CallStatus, layer: str = "") -> None:
        super().__init__(f"{layer}: {status}" if layer else str(status))
        self.status = status


class Group:
    """The ranks that dispatch and combine together, as this one sees them.

    Owns the set of suspect ranks (local: the control plane decides who stays in the group), the one
    to blame for the last failure, and how long this rank has waited for each other one. A suspect
    is not waited for and gets no rows, but it hears when a call is given up: it may only be slow.

    is_gone  asked now and then while this rank waits for another: True ends the wait before its
             deadline. It must be cheap, and must not wait itself.
    """

    def __init__(
        self, transport: Transport, *, is_gone: Callable[[int], bool] | None = None
    ) -> None:
        self.transport = transport
        self._is_gone = is_gone
        self.rank = transport.rank
        self.num_ranks = transport.topology.num_ranks
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"{self.num_ranks} ranks in a group, at most {MAX_RANKS} can be named")
        self.suspects: set[int] = set()
        self._doubted: set[int] = set()
        self.culprit: int | None = None
        self.wait_ms_R = torch.zeros(self.num_ranks, dtype=torch.float64)

    @property
    def topology(self) -> Topology:
        return self.transport.topology

    def deadline(self, timeout_ms: float) -> float:
        return self.transport.now_ms() + timeout_ms

    def is_gone(self, rank: int) -> bool:
        """Return whether it is known that `rank` sends nothing more."""
        return self._is_gone is not None and self._is_gone(rank)

    def wait(self, signal: int, at_least: int, writer: int, deadline_ms: float) -> SignalWait:
        """Wait for a signal that `writer` sets: until it is there, or late, or `writer` is gone."""
        wait = self.transport.signal_wait
        if self._is_gone is None:
            return wait(signal, at_least, deadline_ms)
        while True:
            until_ms = min(deadline_ms, self.transport.now_ms() + WATCH_MS)
            found = wait(signal, at_least, until_ms)
            if found.arrived or until_ms >= deadline_ms or self._is_gone(writer):
                return found

    def abort_count(self) -> int:
        """Return the count that gives a call up and says because of whom."""
        return FIRST_ABORT + (self.rank if self.culprit is None else self.culprit)

    def suspect(self, rank: int) -> None:
        """Wait for `rank` no more, and blame it, until the control plane has decided."""
        self.suspects.add(rank)
        self._doubted.add(rank)
        self.culprit = rank

    def mask(self, ranks: Iterable[int]) -> None:
        """Wait for all but `ranks`, which the control plane has found to be gone."""
        self.suspects = set(ranks)
        self._doubted.clear()

    def hearers(self) -> list[int]:
        """Return whom to tell that a call is given up: all ranks but those that are masked."""
        return sorted({*self.live(), *self._doubted})

    def live(self) -> list[int]:
        """Return the ranks that are not suspect, in order."""
        return [rank for rank in range(self.num_ranks) if rank not in self.suspects]


class Expected(NamedTuple):
    """A signal to wait for: about rows of `source`, at an offset where only `writer` writes."""

    source: int
    offset: int
    writer: int


class Arrivals:
    """The signals of one receive phase: waits for them, and keeps how each rank did."""

    def __init__(self, group: Group, operation: str, epoch: int) -> None:
        self._group = group
        self._operation, self._epoch = operation, epoch
        self._seen: dict[Expected, int] = {}
        self._found: dict[str, set[int]] = {cause: set() for cause in _CAUSES}
        self._found["masked"] |= group.suspects

    def wait(self, expected: Iterable[Expected], deadline_ms: float) -> dict[int, int]:
        """Return by source the counts of the signals that came in time and mean something."""
        counts = {}
        for signal in expected:
            value = self._wait_one(signal, deadline_ms)
            if value is not None and (count := self._read(signal, value)) is not None:
                counts[signal.source] = count
        return counts

    def check_unchanged(self) -> None:
        """Find the ranks that wrote again while this one was reading: what it read may be torn.

        That happens only to a rank which the others have given up. (An abort of the next call may
        take its place at any time; it brings no rows.)
        """
        for signal, value in self._seen.items():
            now = self._group.transport.signal_fetch(signal.offset)
            if now != value and now & COUNT_MASK < FIRST_ABORT:
                self._found["overtaken"].add(signal.writer)

    def status(self) -> CallStatus:
        found = {cause: tuple(sorted(ranks)) for cause, ranks in self._found.items()}
        return CallStatus(operation=self._operation, epoch=self._epoch, **found)

    def _wait_one(self, signal: Expected, deadline_ms: float) -> int | None:
        """Return the signal's value, or None where the rank is suspect or becomes so."""
        group, (source, offset, writer) = self._group, signal
        if source in group.suspects or writer in group.suspects:
            if source not in group.suspects:
                self._found["lost"].add(source)
            return None
        start_ms = group.transport.now_ms()
        arrived, value = group.wait(offset, signal_value(self._epoch, 0), writer, deadline_ms)
        now_ms = group.transport.now_ms()
        group.wait_ms_R[writer] += now_ms - start_ms
        if arrived:
            return value
        group.suspect(writer)
        self._found["late" if now_ms >= deadline_ms else "gone"].add(writer)
        if source != writer:
            self._found["lost"].add(source)
        return None

    def _read(self, signal: Expected, value: int) -> int | None:
        """Return the count in `value`, or None and the reason in `_found`."""
        epoch, count = value >> COUNT_BITS, value & COUNT_MASK
        if count >= FIRST_ABORT:  # also of a later call: an abort waits for no one
            self._group.culprit = count - FIRST_ABORT
            self._found["aborted"].add(signal.writer)
            self._found["blamed"].add(count - FIRST_ABORT)
        elif epoch != self._epoch:
            self._found["overtaken"].add(signal.writer)
        else:
            self._seen[signal] = value
            return count
        return None
