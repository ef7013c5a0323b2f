"""Every rank tells every other one a record of fixed size: counts, digests, what a step will do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.ep_comm.group import Arrivals, CallStatus, Group, signal_value
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.slots import RecvSlots, SendBuffer, Target, TransferId, staging_bytes

NUMBERS_PER_EPOCH = 1 << 27
"""Gathers are numbered anew with each membership: number n of epoch e is e * this + n. So 2**19
epochs can be told apart (`group.COUNT_BITS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRegions:
    """The parts of the heap of one gather: a place per rank, of one record."""

    slots: RecvSlots
    staging: Region


def reserve(heap: HeapLayout, record_bytes: int, name: str) -> GatherRegions:
    """Reserve a gather of records of `record_bytes`, a multiple of 8."""
    assert record_bytes % 8 == 0, record_bytes
    return GatherRegions(
        slots=RecvSlots.reserve(heap, name, heap.num_ranks, 1, record_bytes),
        staging=heap.take(f"{name}.staging", staging_bytes([record_bytes] * heap.num_ranks)),
    )


class AllGather:
    """Gathers one record per rank, on all ranks.

    A rank sends number n + 2 only after number n + 1 has come from all, which each of them sent
    after it had read number n: two sets of places are enough.
    """

    def __init__(self, group: Group, regions: GatherRegions, name: str) -> None:
        self._group = group
        self._slots = regions.slots
        self._name = name
        self._send_buffer = SendBuffer(group, regions.staging)
        self._number = 0

    def gather(self, record: Tensor, deadline_ms: float) -> tuple[dict[int, Tensor], CallStatus]:
        """Return every rank's record by rank (copies); those of missing ranks are not there.

        `record` is contiguous, of any dtype, and of the reserved size.
        """
        self.post(record)
        return self.collect(record.dtype, deadline_ms)

    def has_begun(self) -> bool:
        """Return whether another rank has posted its record of the next gather already."""
        transfer = TransferId(self._number + 1)
        signals = [self._slots.signal(transfer, rank) for rank in self._group.live()]
        least = signal_value(transfer.epoch, 0)
        return any(self._group.transport.signal_fetch(signal) >= least for signal in signals)

    @property
    def num_in_epoch(self) -> int:
        """Return how many gathers of the present epoch were numbered."""
        return self._number % NUMBERS_PER_EPOCH

    def post(self, record: Tensor) -> None:
        """Do the first half of `gather`: send the record, wait for no one."""
        data = record.reshape(1, -1).view(torch.uint8)
        assert data.numel() == self._slots.record_bytes, (data.numel(), self._slots.record_bytes)
        self._number += 1
        transfer = TransferId(self._number)
        self._send_buffer.begin()
        for rank in self._group.live():
            target = Target(rank, self._slots, self._group.rank)
            block = self._send_buffer.open(target, transfer)
            block.copy_(data)
            self._send_buffer.send(target, transfer, block, 1)

    def collect(
        self, dtype: torch.dtype, deadline_ms: float
    ) -> tuple[dict[int, Tensor], CallStatus]:
        """Do the second half: wait for the records of all ranks, and read them as `dtype`."""
        transfer = TransferId(self._number)
        arrivals = Arrivals(self._group, self._name, transfer.epoch)
        here = arrivals.wait(self._slots.expect_all(transfer), deadline_ms)
        records = self._slots.of_set(self._group.transport.heap, transfer)
        found = {rank: records[rank, 0].clone().view(dtype) for rank in here}
        arrivals.check_unchanged()
        return found, arrivals.status()

    def abort(self) -> None:
        """Take part in the next gather only by giving it up."""
        self._number += 1
        for rank in self._group.hearers():
            target = Target(rank, self._slots, self._group.rank)
            self._send_buffer.give_up(target, TransferId(self._number))

    def resume(self, number: int) -> None:
        """Number the next gather `number`, above all used so far, on all ranks."""
        assert number > self._number, (number, self._number)
        self._number = number - 1
