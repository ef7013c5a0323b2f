"""How a rank's symmetric heap is laid out: the same calls give the same offsets on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import Tensor

ALIGNMENT_BYTES = 128
SIGNAL_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of the heap at the same place on every rank."""

    name: str
    offset: int
    num_bytes: int
    is_signal: bool = False

    def view(self, heap: Tensor) -> Tensor:
        """Return the region's bytes in `heap`, uint8."""
        return heap[self.offset : self.offset + self.num_bytes]

    def signal(self, index: int) -> int:
        """Return the offset of signal `index`."""
        assert self.is_signal, self
        assert 0 <= index < self.num_bytes // SIGNAL_BYTES, (self, index)
        return self.offset + index * SIGNAL_BYTES


class HeapLayout:
    """Hands out aligned regions in the order of the calls. Allocates nothing itself.

    The first region is the transports' own: one barrier signal per rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_bytes = 0
        self._regions: list[Region] = []
        self.take_signals("transport.barrier", num_ranks)

    def take(self, name: str, num_bytes: int) -> Region:
        """Return a region for data."""
        return self._append(name, num_bytes, False)

    def take_signals(self, name: str, num_signals: int) -> Region:
        """Return a region of 64-bit signals; they begin at zero."""
        return self._append(name, num_signals * SIGNAL_BYTES, True)

    def digest(self) -> str:
        """Return a hash of all regions: equal on ranks that reserved alike."""
        lines = [f"{r.name} {r.offset} {r.num_bytes} {r.is_signal}" for r in self._regions]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def poison(self, heap: Tensor) -> None:
        """Fill all data with 0xFF (NaN in every float type), so that a stale read shows."""
        for region in self._regions:
            if not region.is_signal:
                region.view(heap).fill_(0xFF)

    def _append(self, name: str, num_bytes: int, is_signal: bool) -> Region:
        if any(region.name == name for region in self._regions):
            raise ValueError(
                f"the heap already has a region {name!r}: give each exchange its own name"
            )
        region = Region(name=name, offset=self.num_bytes, num_bytes=num_bytes, is_signal=is_signal)
        self._regions.append(region)
        self.num_bytes += align(num_bytes, ALIGNMENT_BYTES)
        return region


def align(num_bytes: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // multiple) * multiple
