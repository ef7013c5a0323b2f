"""One direction of traffic: for each sender a block of records and a signal word, in two sets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whalepod.ep_comm.group import Expected, Group, signal_value
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.rows import Outbox

NUM_SETS = 2
_CHUNK_BITS = 12
MAX_CHUNKS = (1 << _CHUNK_BITS) - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """Which transfer this is: chunk `chunk` of call `call` (from 1).

    Calls have an odd number of chunks, so sets alternate across calls too.
    """

    call: int
    chunk: int

    @property
    def epoch(self) -> int:
        return (self.call << _CHUNK_BITS) | self.chunk

    @property
    def set_index(self) -> int:
        return (self.call + self.chunk) % NUM_SETS

    def next(self) -> Turn:
        return Turn(self.call, self.chunk + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`num_places` senders; each place of each set has one writer.

    Records of `record_bytes`, at most `max_records` in a block.
    """

    num_places: int
    max_records: int
    record_bytes: int
    words: Region
    data: Region

    @staticmethod
    def carve(
        heap: HeapLayout, name: str, *, num_places: int, max_records: int, record_bytes: int
    ) -> Lane:
        """Reserve a lane, the same on every rank."""
        blocks = NUM_SETS * num_places
        return Lane(
            num_places=num_places,
            max_records=max_records,
            record_bytes=record_bytes,
            words=heap.take_signals(f"{name}.words", blocks),
            data=heap.take(f"{name}.data", blocks * max_records * record_bytes),
        )

    def received(self, heap: Tensor, turn: Turn, place: int, count: int) -> Tensor:
        """Return the records that arrived in a place, uint8 `[count, record_bytes]`."""
        assert count <= self.max_records, (self.data.name, place, count, self.max_records)
        start = self._block(turn, place) * self.max_records * self.record_bytes
        data = self.data.view(heap)[start : start + count * self.record_bytes]
        return data.view(count, self.record_bytes)

    def open(self, outbox: Outbox, rank: int, turn: Turn, place: int, count: int) -> Tensor:
        """Return where to write `count` records for a place on `rank`."""
        block = outbox.open(rank, self._offset(turn, place), count * self.record_bytes)
        return block.view(count, self.record_bytes)

    def send(self, outbox: Outbox, rank: int, turn: Turn, place: int, records: Tensor) -> None:
        """Send records that `open` returned."""
        word, count = self.word(turn, place), len(records)
        num_bytes = count * self.record_bytes
        outbox.send(rank, self._offset(turn, place), records, num_bytes, word, turn.epoch, count)

    def give_up(self, group: Group, rank: int, turn: Turn, place: int) -> None:
        """Tell `rank` that this rank sends nothing for a turn, because it gave the call up."""
        value = signal_value(turn.epoch, group.abort_count())
        group.transport.signal_op(self.word(turn, place), value, rank)

    def word(self, turn: Turn, place: int) -> int:
        return self.words.word(self._block(turn, place))

    def expect(self, turn: Turn, place: int, source: int, writer: int) -> Expected:
        return Expected(source, self.word(turn, place), writer)

    def _block(self, turn: Turn, place: int) -> int:
        assert 0 <= place < self.num_places, (self.data.name, place, self.num_places)
        return turn.set_index * self.num_places + place

    def _offset(self, turn: Turn, place: int) -> int:
        return self.data.offset + self._block(turn, place) * self.max_records * self.record_bytes
