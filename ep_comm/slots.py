"""Slots that others write into and the buffer that is sent from: how blocks of records travel.

Every place of a `RecvSlots` has one writer: it puts records, then a fence, then the signal. Places
come in two sets, used in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.ep_comm.group import Expected, Group, signal_value
from whalepod.ep_comm.heap import ALIGNMENT_BYTES, HeapLayout, Region, align

NUM_SETS = 2


@dataclass(frozen=True, slots=True)
class TransferId:
    """Chunk `chunk` of call `call` (from 1), where epochs have `chunk_bits` for the chunk.

    Calls have an odd number of chunks, so sets alternate across calls too.
    """

    call: int
    chunk: int = 0
    chunk_bits: int = 0

    @property
    def epoch(self) -> int:
        return (self.call << self.chunk_bits) + self.chunk

    @property
    def set_index(self) -> int:
        return (self.call + self.chunk) % NUM_SETS

    def next(self) -> TransferId:
        return TransferId(self.call, self.chunk + 1, self.chunk_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvSlots:
    """`num_places` senders, each with up to `max_records` records of `record_bytes` at a time."""

    num_places: int
    max_records: int
    record_bytes: int
    signals: Region
    data: Region

    @staticmethod
    def reserve(
        heap: HeapLayout, name: str, num_places: int, max_records: int, record_bytes: int
    ) -> RecvSlots:
        """Reserve slots, the same on every rank."""
        blocks = NUM_SETS * num_places
        return RecvSlots(
            num_places=num_places,
            max_records=max_records,
            record_bytes=record_bytes,
            signals=heap.take_signals(f"{name}.signals", blocks),
            data=heap.take(f"{name}.data", blocks * max_records * record_bytes),
        )

    @property
    def block_bytes(self) -> int:
        return self.max_records * self.record_bytes

    def of_set(self, heap: Tensor, transfer: TransferId) -> Tensor:
        """Return all places of a transfer, uint8 `[num_places, max_records, record_bytes]`."""
        shape = (NUM_SETS, self.num_places, self.max_records, self.record_bytes)
        return self.data.view(heap).view(shape)[transfer.set_index]

    def received(self, heap: Tensor, transfer: TransferId, place: int, count: int) -> Tensor:
        """Return the records that arrived in a place, uint8 `[count, record_bytes]`."""
        assert count <= self.max_records, (self.data.name, place, count, self.max_records)
        start = self.offset(transfer, place)
        return heap[start : start + count * self.record_bytes].view(count, self.record_bytes)

    def signal(self, transfer: TransferId, place: int) -> int:
        """Return the offset of the signal of a place."""
        return self.signals.signal(self._block(transfer, place))

    def offset(self, transfer: TransferId, place: int) -> int:
        """Return where a place's records begin in the heap."""
        return self.data.offset + self._block(transfer, place) * self.block_bytes

    def expect(self, transfer: TransferId, place: int, source: int, writer: int) -> Expected:
        return Expected(source, self.signal(transfer, place), writer)

    def expect_all(self, transfer: TransferId) -> list[Expected]:
        """Return the signals of all places, where place r is written by rank r."""
        return [self.expect(transfer, rank, rank, rank) for rank in range(self.num_places)]

    def _block(self, transfer: TransferId, place: int) -> int:
        assert 0 <= place < self.num_places, (self.data.name, place, self.num_places)
        return transfer.set_index * self.num_places + place


class Target(NamedTuple):
    """A place of `slots` on `rank`."""

    rank: int
    slots: RecvSlots
    place: int


class SendBuffer:
    """Sends blocks of records.

    Where plain stores reach the peer, records are written straight into its heap; elsewhere into
    this rank's staging region, and put from there.
    """

    def __init__(self, group: Group, staging: Region) -> None:
        self._group = group
        self._transport = group.transport
        self._staging = staging
        self._used_bytes = 0
        self._peer_blocks: dict[tuple[int, int], Tensor] = {}
        """Views of peers' heaps, made once: that costs more than the writing."""
        self.sent_bytes_R = torch.zeros(group.num_ranks, dtype=torch.int64)
        """Data sent to each rank since the start, signals not counted."""
        self._sent_bytes = self.sent_bytes_R.numpy()  # the same memory

    def begin(self) -> None:
        """Start a phase: the staging region can be used again when all puts are complete."""
        self._transport.quiet()
        self._used_bytes = 0

    def open(self, target: Target, transfer: TransferId) -> Tensor:
        """Return where to write the records for a place, uint8 `[max_records, record_bytes]`."""
        slots, offset = target.slots, target.slots.offset(transfer, target.place)
        kept = self._peer_blocks.get((target.rank, offset))
        if kept is not None:
            return kept
        peer = self._transport.peer_view(target.rank)
        if peer is None:
            return self._stage(slots.block_bytes).view(slots.max_records, slots.record_bytes)
        block = peer[offset : offset + slots.block_bytes]
        made = block.view(slots.max_records, slots.record_bytes)
        self._peer_blocks[target.rank, offset] = made
        return made

    def send(self, target: Target, transfer: TransferId, records: Tensor, count: int) -> None:
        """Send the first `count` records of what `open` returned, then their signal."""
        rank, slots, place = target
        num_bytes = count * slots.record_bytes
        self._sent_bytes[rank] += num_bytes
        if num_bytes and self._transport.peer_view(rank) is None:
            block = records.view(-1)[:num_bytes]
            self._transport.put_nbi(slots.offset(transfer, place), block, rank)
        self._transport.fence(rank)
        value = signal_value(transfer.epoch, count)
        self._transport.signal_op(slots.signal(transfer, place), value, rank)

    def give_up(self, target: Target, transfer: TransferId) -> None:
        """Tell a rank that nothing comes for a transfer, because this rank gave the call up."""
        value = signal_value(transfer.epoch, self._group.abort_count())
        signal = target.slots.signal(transfer, target.place)
        self._transport.signal_op(signal, value, target.rank)

    def _stage(self, num_bytes: int) -> Tensor:
        start = self._used_bytes
        self._used_bytes = align(start + num_bytes, ALIGNMENT_BYTES)
        assert self._used_bytes <= self._staging.num_bytes, (self._used_bytes, self._staging)
        return self._staging.view(self._transport.heap)[start : start + num_bytes]


def staging_bytes(blocks: Sequence[int]) -> int:
    """Return the size of a staging region for blocks of these sizes."""
    return sum(align(size, ALIGNMENT_BYTES) for size in blocks)
