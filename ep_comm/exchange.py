"""Every rank tells every other one a record of fixed size: counts, digests, waiting times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.ep_comm.group import (
    Arrivals,
    CallStatus,
    Expected,
    Group,
    signal_value,
)
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.rows import Outbox, staging_bytes

_NUM_SETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRegions:
    """The parts of the heap of one exchange."""

    record_bytes: int
    words: Region
    records: Region
    staging: Region


def carve(heap: HeapLayout, record_bytes: int, name: str) -> ExchangeRegions:
    """Reserve an exchange of records of `record_bytes`, a multiple of 8."""
    assert record_bytes % 8 == 0, record_bytes
    places = _NUM_SETS * heap.num_ranks
    return ExchangeRegions(
        record_bytes=record_bytes,
        words=heap.take_signals(f"{name}.words", places),
        records=heap.take(f"{name}.records", places * record_bytes),
        staging=heap.take(f"{name}.staging", staging_bytes([record_bytes] * heap.num_ranks)),
    )


class Exchange:
    """Gathers one record per rank, on all ranks.

    Two sets of records, used in turn: a rank sends number n + 2 only after number n + 1 has come
    from all, which each of them sent after it had read number n.
    """

    def __init__(self, group: Group, regions: ExchangeRegions, name: str) -> None:
        self._group = group
        self._regions = regions
        self._name = name
        self._outbox = Outbox(group, regions.staging)
        self._epoch = 0

    def gather(self, record: Tensor, deadline_ms: float) -> tuple[dict[int, Tensor], CallStatus]:
        """Return every rank's record by rank (copies); those of missing ranks are not there.

        `record` is contiguous, of any dtype, and of the size that was carved.
        """
        self.post(record)
        return self.collect(record.dtype, deadline_ms)

    def has_begun(self) -> bool:
        """Say whether another rank has posted its record of the next exchange already."""
        self._epoch += 1
        words = [word for source, word, _ in self._expected() if source in self._group.live()]
        least = signal_value(self._epoch, 0)
        self._epoch -= 1
        return any(self._group.transport.signal_fetch(word) >= least for word in words)

    def post(self, record: Tensor) -> None:
        """Do the first half of `gather`: send the record, wait for nobody."""
        size = self._regions.record_bytes
        data = record.reshape(-1).view(torch.uint8)
        assert data.numel() == size, (data.numel(), size)
        self._epoch += 1
        self._outbox.begin()
        place = self._place(self._group.rank)
        offset = self._regions.records.offset + place * size
        for rank in self._group.live():
            block = self._outbox.open(rank, offset, size)
            block.copy_(data)
            word = self._regions.words.word(place)
            self._outbox.send(rank, offset, block, size, word, self._epoch, 1)

    def collect(
        self, dtype: torch.dtype, deadline_ms: float
    ) -> tuple[dict[int, Tensor], CallStatus]:
        """Do the second half: wait for the records of all ranks, and read them as `dtype`."""
        size = self._regions.record_bytes
        arrivals = Arrivals(self._group, self._name, self._epoch)
        here = arrivals.wait(self._expected(), deadline_ms)
        records = self._regions.records.view(self._group.transport.heap).view(-1, size)
        found = {rank: records[self._place(rank)].clone().view(dtype) for rank in here}
        arrivals.check_unchanged()
        return found, arrivals.status()

    @property
    def number(self) -> int:
        """Return the number of the last exchange."""
        return self._epoch

    def abort(self) -> None:
        """Take part in the next exchange only by giving it up."""
        self._epoch += 1
        word = self._regions.words.word(self._place(self._group.rank))
        value = signal_value(self._epoch, self._group.abort_count())
        for rank in self._group.hearers():
            self._group.transport.signal_op(word, value, rank)

    def resume(self, number: int) -> None:
        """Number the next exchange `number`, above all used so far, on all ranks."""
        assert number > self._epoch, (number, self._epoch)
        self._epoch = number - 1

    def _place(self, rank: int) -> int:
        return (self._epoch % _NUM_SETS) * self._group.num_ranks + rank

    def _expected(self) -> list[Expected]:
        words = self._regions.words
        ranks = range(self._group.num_ranks)
        return [Expected(rank, words.word(self._place(rank)), rank) for rank in ranks]
