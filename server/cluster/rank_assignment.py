"""What the launcher gives to a rank: its place in the group, and the things that they share.

All of it has an owner that outlives the ranks: heaps are memfds and events eventfds of the
launcher, memberships and progress lie in its private folder. So nothing is left when ranks are
killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig, TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """What a rank's process reads on its stdin.

    plan       of its launcher
    transport  what carries rows between the ranks
    folder     of memberships and progress, of this machine
    event_fds  eventfds of the ranks that the launcher has started
    heap_fds   memfds, one per rank, for `shm`; the first rank to come gives them their size
    address    of this machine, as the others reach it; "" if all ranks are on it
    cores      to run on; none: anywhere
    life       how often this rank was started before
    epoch      of the newest membership that the launcher knows, and its members
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
    epoch: int = 0
    members: tuple[int, ...] = ()
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def num_ranks(self) -> int:
        return self.plan.num_ranks

    @property
    def life_suffix(self) -> str:
        """What names the files of this life, so that those of earlier ones are kept."""
        return f".{self.life}" if self.life else ""

    @property
    def events(self) -> EventFds:
        return EventFds(self.event_fds, own=self.rank - self.plan.first_rank)


@dataclass(frozen=True, slots=True)
class EventFds:
    """Wakes ranks that sleep, and tells this one that it was woken.

    An event says only that there is something to look at, so one too many does no harm.

    own  which of them is this rank's; -1: the launcher's view, which is never woken
    """

    descriptors: tuple[int, ...]
    own: int = -1

    @property
    def own_descriptor(self) -> int:
        """Return what becomes readable when this rank is woken."""
        return self.descriptors[self.own]

    def set_others(self) -> None:
        """Wake all other ranks of this launcher."""
        for place, descriptor in enumerate(self.descriptors):
            if place != self.own:
                _set(descriptor)

    def set_own(self) -> None:
        """Wake this rank: another thread of it has heard something."""
        _set(self.own_descriptor)

    def clear(self) -> None:
        """Forget what woke this rank, before looking at what there is."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.own_descriptor)


def _set(descriptor: int) -> None:
    with suppress(BlockingIOError):  # full: it was set more than often enough
        os.eventfd_write(descriptor, 1)
