"""What the launcher gives to a rank: its place in the group, and the things that they share.

All of it has an owner that outlives the ranks: heaps are memfds and bells eventfds of the launcher,
memberships and progress lie in its private folder. So nothing is left behind when ranks are killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from whalepod.server.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a group on this machine.

    folder            of memberships and progress
    heap_descriptors  memfds, one per rank; the first rank to come gives them their size
    bell_descriptors  eventfds, one per rank
    cores             to run on; none: anywhere
    """

    rank: int
    num_ranks: int
    folder: str
    heap_descriptors: tuple[int, ...]
    bell_descriptors: tuple[int, ...]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank's process reads on its stdin."""

    seat: Seat
    engine: EngineConfig = field(default_factory=EngineConfig)


class Bells:
    """Wakes ranks that sleep, and tells this one that it was woken.

    A bell says only that there is something to look at, so one ring too many does no harm.
    """

    def __init__(self, descriptors: tuple[int, ...], rank: int | None = None) -> None:
        """rank: whose bell `descriptor` is; None: a launcher's, who is never woken."""
        self._descriptors = descriptors
        self._rank = rank

    @property
    def descriptor(self) -> int:
        """Return what becomes readable when this rank is woken."""
        assert self._rank is not None, "a launcher has no bell"
        return self._descriptors[self._rank]

    def ring(self) -> None:
        """Wake all other ranks."""
        for rank, descriptor in enumerate(self._descriptors):
            if rank != self._rank:
                with suppress(BlockingIOError):  # full: it has been rung more than often enough
                    os.eventfd_write(descriptor, 1)

    def clear(self) -> None:
        """Be quiet again, before looking at what there is."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


def prepare_heaps(seat: Seat, heap_bytes: int) -> None:
    """Give the heaps their size, whichever rank comes first. ValueError if it was another one."""
    for descriptor in seat.heap_descriptors:
        found = os.fstat(descriptor).st_size
        if found not in (0, heap_bytes):
            raise ValueError(
                f"rank {seat.rank} needs heaps of {heap_bytes} bytes, another rank has made them "
                f"{found}: start all ranks with the same version and flags"
            )
        os.ftruncate(descriptor, heap_bytes)
