"""How experts change slots while steps run: what is copied when, staging, checksums, the swap.

A layer moves at a time. Its new content is copied into staging slots of the ranks' heaps, a few
bytes before each step, from slots that stay as they are meanwhile. When every rank has all of its
part and has checked it, all ranks copy staging over the slots before the same step, in place. Until
then nothing has changed, so giving up is forgetting.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.policy import Ints
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import ALIGNMENT_BYTES, HeapLayout, Region, align

_HEADER_INTS = 4
"""Of a staged slot: number of the migration, layer, expert, CRC-32 of its bytes."""


class MigrationError(RuntimeError):
    """What was staged is not what was planned."""


class Copy(NamedTuple):
    """A slot's new content: the expert in the slot `source`, which may be on the same rank."""

    source: int
    target: int


class LayerPlan(NamedTuple):
    """What a layer's slots hold, and what they shall hold.

    number  of the migration: staged bytes of another one are not taken for this one's
    """

    number: int
    layer: int
    old_P: Ints
    new_P: Ints


class Chunk(NamedTuple):
    """Bytes [begin, end) of a copy."""

    copy: Copy
    begin: int
    end: int


def plan_copies(old_P: Ints, new_P: Ints, slots: Slots) -> list[Copy]:
    """Return the copies that a layer needs: from the same rank, else its node, else the rank that
    has the least to send. Raises MigrationError if an expert is in no slot."""
    per_node = slots.ranks_per_node
    num_sent = [0] * slots.num_ranks
    copies = []
    for target in np.flatnonzero((old_P != new_P) & (new_P >= 0)).tolist():
        rank = target // slots.per_rank

        def cost(source: int, rank: int = rank) -> tuple[bool, bool, int, int]:
            other = source // slots.per_rank
            return other != rank, other // per_node != rank // per_node, num_sent[other], source

        sources = np.flatnonzero(old_P == new_P[target]).tolist()
        if not sources:
            raise MigrationError(f"expert {new_P[target]} is in no slot")
        source = min(sources, key=cost)
        num_sent[source // slots.per_rank] += source // slots.per_rank != rank
        copies.append(Copy(source, target))
    return copies


def schedule(
    copies: Sequence[Copy], slots: Slots, slot_bytes: int, budget_bytes: int
) -> list[list[Chunk]]:
    """Return what is copied before each step, the same on every rank.

    No rank sends or receives more than `budget_bytes` before a step, copies on the rank itself
    included, and each rank has at most one other to deal with at a time.
    """
    left = dict.fromkeys(copies, slot_bytes)
    steps = []
    while left:
        room = [budget_bytes] * slots.num_ranks
        peer: dict[int, int] = {}
        step = []
        for copy in list(left):
            a, b = copy.source // slots.per_rank, copy.target // slots.per_rank
            num_bytes = min(left[copy], room[a], room[b])
            if not num_bytes or peer.get(a, b) != b or peer.get(b, a) != a:
                continue
            if a != b:
                peer[a], peer[b] = b, a
            begin = slot_bytes - left[copy]
            step.append(Chunk(copy, begin, begin + num_bytes))
            for rank in {a, b}:
                room[rank] -= num_bytes
            left[copy] -= num_bytes
            if not left[copy]:
                del left[copy]
        steps.append(step)
    return steps


class SlotBytes:
    """The bytes of one layer's slots of this rank: a part per tensor, `[S, ...]` each."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        assert len({len(part) for part in parts}) == 1, [part.shape for part in parts]
        assert all(part.is_contiguous() for part in parts), "slots are written in place"
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self.num_bytes = sum(part.shape[1] for part in self._parts)

    def pieces(self, slot: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield bytes [begin, end) of a slot as (place among them, view)."""
        offset = 0
        for part in self._parts:
            first, last = max(begin - offset, 0), min(end - offset, part.shape[1])
            if first < last:
                yield offset + first - begin, part[slot, first:last]
            offset += part.shape[1]

    def write(self, slot: int, data: Tensor) -> None:
        """Replace a slot's bytes."""
        for place, piece in self.pieces(slot, 0, self.num_bytes):
            piece.copy_(data[place : place + len(piece)])

    def read(self, slot: int) -> Tensor:
        """Return a copy of a slot's bytes."""
        return torch.cat([piece for _, piece in self.pieces(slot, 0, self.num_bytes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingRegions:
    """The parts of the heap that moves need: a staging slot for each slot of a rank, a header for
    each, and where a header is sent from."""

    slot_bytes: int
    data: Region
    headers: Region
    outgoing: Region


def reserve(heap: HeapLayout, slots: Slots, slot_bytes: int) -> StagingRegions:
    """Reserve them, the same on every rank."""
    header_bytes = 8 * _HEADER_INTS * slots.per_rank
    size = align(slot_bytes, ALIGNMENT_BYTES) * slots.per_rank
    return StagingRegions(
        slot_bytes=slot_bytes,
        data=heap.take("eplb.staging", size),
        headers=heap.take("eplb.headers", header_bytes),
        outgoing=heap.take("eplb.outgoing", 8 * _HEADER_INTS * slots.num_physical),
    )


class LayerMove:
    """One rank's part in moving one layer. All ranks make it alike, and call `run` before the same
    steps; between two of these all ranks have heard of each other.
    """

    def __init__(
        self,
        group: Group,
        regions: StagingRegions,
        slots: Slots,
        content: SlotBytes,
        plan: LayerPlan,
        budget_bytes: int,
    ) -> None:
        assert content.num_bytes == regions.slot_bytes, (content.num_bytes, regions.slot_bytes)
        self.plan = plan
        self._group, self._regions, self._slots, self._content = group, regions, slots, content
        self._mine = slots.of_rank(group.rank)
        self.copies = plan_copies(plan.old_P, plan.new_P, slots)
        self._steps = schedule(self.copies, slots, regions.slot_bytes, budget_bytes)
        self._incoming = [copy for copy in self.copies if self._is_mine(copy.target)]
        self._place = 0
        self._sums_sent: dict[Copy, int] = {}
        self._sums_found: dict[Copy, int] = {}
        self.step_bytes = self.sent_bytes = 0
        """Bytes that this rank sent or received before the last step; sent to others in all."""

    @property
    def is_staged(self) -> bool:
        """Return whether this rank has all of its part, checked."""
        return self._place > len(self._steps)

    def run(self) -> None:
        """Check what came before the last step, then send what is due before this one.

        Raises MigrationError if what came is not what was planned.
        """
        if self.is_staged:
            return
        if self._place:
            self._check(self._steps[self._place - 1])
        self.step_bytes = 0
        if self._place < len(self._steps):
            for chunk in self._steps[self._place]:
                self._send(chunk)
            self._group.transport.quiet()  # before the next record says that it is there
        self._place += 1

    def commit(self) -> None:
        """Copy what is staged over the slots, in place."""
        assert self.is_staged, "commit follows the word of all ranks that they have their parts"
        for copy in self._incoming:
            data = self._staged(copy)[: self._content.num_bytes]
            self._content.write(copy.target - self._mine.start, data)

    def _send(self, chunk: Chunk) -> None:
        (source, target), begin, end = chunk
        sends, receives = self._is_mine(source), self._is_mine(target)
        if sends or receives:
            self.step_bytes += end - begin
        if not sends:
            return
        rank, transport = target // self._slots.per_rank, self._group.transport
        offset = self._regions.data.offset + self._staging_offset(target) + begin
        checksum = self._sums_sent.get(chunk.copy, 0)
        for place, piece in self._content.pieces(source - self._mine.start, begin, end):
            checksum = zlib.crc32(piece.numpy().data, checksum)
            transport.put_nbi(offset + place, piece, rank)
        self._sums_sent[chunk.copy] = checksum
        self.sent_bytes += (end - begin) * (not receives)
        if end == self._content.num_bytes:
            self._send_header(chunk.copy, checksum)

    def _send_header(self, copy: Copy, checksum: int) -> None:
        header = self.plan.number, self.plan.layer, int(self.plan.new_P[copy.target]), checksum
        outgoing = self._regions.outgoing.view(self._group.transport.heap)
        data = outgoing.view(-1, 8 * _HEADER_INTS)[copy.target]
        data.view(torch.int64).copy_(torch.tensor(header))
        place = copy.target % self._slots.per_rank * 8 * _HEADER_INTS
        rank = copy.target // self._slots.per_rank
        self._group.transport.put_nbi(self._regions.headers.offset + place, data, rank)

    def _check(self, chunks: Sequence[Chunk]) -> None:
        for copy, begin, end in chunks:
            if not self._is_mine(copy.target):
                continue
            piece = self._staged(copy)[begin:end]
            checksum = zlib.crc32(piece.numpy().data, self._sums_found.get(copy, 0))
            self._sums_found[copy] = checksum
            if end < self._content.num_bytes:
                continue
            wanted = self.plan.number, self.plan.layer, int(self.plan.new_P[copy.target]), checksum
            headers = self._regions.headers.view(self._group.transport.heap).view(torch.int64)
            found = headers.view(-1, _HEADER_INTS)[copy.target % self._slots.per_rank].tolist()
            if tuple(found) != wanted:
                raise MigrationError(
                    f"slot {copy.target}: migration, layer, expert and checksum should be "
                    f"{wanted}, slot {copy.source} sent {tuple(found)}"
                )

    def _is_mine(self, slot: int) -> bool:
        return slot // self._slots.per_rank == self._group.rank

    def _staging_offset(self, target: int) -> int:
        return target % self._slots.per_rank * align(self._regions.slot_bytes, ALIGNMENT_BYTES)

    def _staged(self, copy: Copy) -> Tensor:
        data = self._regions.data.view(self._group.transport.heap)
        return data[self._staging_offset(copy.target) :]
