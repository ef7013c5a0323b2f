"""What the launcher gives to a rank: its place in the group, and the things that they share.

All of it has an owner that outlives the ranks: heaps are memfds and events eventfds of the
launcher, memberships and progress lie in its private folder. So nothing is left
behind when ranks are killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig, TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """One rank of a group.

    plan       of its launcher
    transport  what carries rows between the ranks
    folder     of memberships and progress, of this machine
    event_fds  eventfds of the ranks that the launcher has started
    heap_fds   memfds, one per rank, for `shm`; the first rank to come gives them their size
    address    of this machine, as the others reach it; "" if all ranks are on it
    cores      to run on; none: anywhere
    life       how often this rank was started before
    """

    rank: int
    plan: NodePlan
    transport: TransportName
    folder: str
    event_fds: tuple[int, ...]
    heap_fds: tuple[int, ...] = ()
    address: str = ""
    cores: tuple[int, ...] = ()
    life: int = 0

    @property
    def num_ranks(self) -> int:
        return self.plan.num_ranks

    @property
    def ranks_per_node(self) -> int:
        return self.plan.ranks_per_node

    @property
    def event_index(self) -> int:
        """Return which of the eventfds is this rank's."""
        return self.rank - self.plan.first_rank

    @property
    def own_event_fd(self) -> int:
        """Return what becomes readable when this rank is woken."""
        return self.event_fds[self.event_index]

    @property
    def local_index(self) -> int:
        """Return this rank's place on its machine."""
        return self.rank % self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank's process reads on its stdin."""

    assignment: RankAssignment
    engine: EngineConfig = field(default_factory=EngineConfig)


class EventFds:
    """Wakes ranks that sleep, and tells this one that it was woken.

    An event says only that there is something to look at, so one too many does no harm.
    """

    def __init__(self, descriptors: tuple[int, ...], own: int | None = None) -> None:
        """own: which of them is this rank's; None: the launcher's, which is never woken."""
        self._descriptors = descriptors
        self._own = own

    def set_others(self) -> None:
        """Wake all other ranks of this launcher."""
        for place, descriptor in enumerate(self._descriptors):
            if place != self._own:
                _set(descriptor)

    def set_own(self) -> None:
        """Wake this rank: another thread of it has heard something."""
        assert self._own is not None, "a launcher has no event of its own"
        _set(self._descriptors[self._own])

    def clear(self) -> None:
        """Forget what woke this rank, before looking at what there is."""
        assert self._own is not None, "a launcher has no event of its own"
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptors[self._own])


def new_event_fds(count: int) -> tuple[int, ...]:
    """Make eventfds; their owner closes them."""
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    return tuple([os.eventfd(0, flags) for _ in range(count)])


def _set(descriptor: int) -> None:
    with suppress(BlockingIOError):  # full: it was set more than often enough
        os.eventfd_write(descriptor, 1)


def prepare_heaps(assignment: RankAssignment, heap_bytes: int) -> None:
    """Give the heaps their size, whichever rank comes first. ValueError if it was another one."""
    for descriptor in assignment.heap_fds:
        found = os.fstat(descriptor).st_size
        if found not in (0, heap_bytes):
            raise ValueError(
                f"rank {assignment.rank} needs heaps of {heap_bytes} bytes, another rank has made "
                f"them {found}: start all ranks with the same version and flags"
            )
        os.ftruncate(descriptor, heap_bytes)
