"""Who belongs to the group: memberships numbered by epoch, the next one committed by one rank.

A store keeps every membership under its epoch. To commit is to compare and set: it succeeds for one
of all who want to be next, and the others read what it wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks that compute together since `epoch`."""

    epoch: int
    members: frozenset[int] = frozenset()

    def without(self, ranks: frozenset[int]) -> Membership:
        return Membership(self.epoch + 1, self.members - ranks)

    def joined_by(self, rank: int) -> Membership:
        return Membership(self.epoch + 1, self.members | {rank})


class MembershipStore(Protocol):
    """Keeps the memberships where all ranks, and whoever starts them, reach them."""

    def newest(self, since: int = 0) -> Membership:
        """Return the newest membership; `since` is an epoch that is known to exist."""
        ...

    def is_newest(self, epoch: int) -> bool:
        """Say whether no later membership than that of `epoch` exists. Cheap, never waits."""
        ...

    def commit(self, membership: Membership) -> bool:
        """Make it the newest one; False if its epoch is taken, or not the next one."""
        ...


class FolderStore:
    """Memberships as files of a folder that the ranks of one machine share.

    A file is linked to its name, which only one can do: there is no lock that a rank could hold
    when it is stopped or killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self, since: int = 0) -> Membership:
        epoch = since
        while not self.is_newest(epoch):
            epoch += 1
        if not epoch:
            return Membership(0)
        members = json.loads(self._path(epoch).read_text(encoding="ascii"))
        return Membership(epoch, frozenset(members))

    def is_newest(self, epoch: int) -> bool:
        return not os.path.exists(self._path(epoch + 1))

    def commit(self, membership: Membership) -> bool:
        if membership.epoch > 1 and not self._path(membership.epoch - 1).exists():
            return False
        draft = self._folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(sorted(membership.members)), encoding="ascii")
        try:
            os.link(draft, self._path(membership.epoch))
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}"


class MemoryStore:
    """Memberships of ranks that share a process."""

    def __init__(self) -> None:
        self._memberships = [Membership(0)]

    def newest(self, since: int = 0) -> Membership:
        return self._memberships[-1]

    def is_newest(self, epoch: int) -> bool:
        return self._memberships[-1].epoch <= epoch

    def commit(self, membership: Membership) -> bool:
        if membership.epoch != len(self._memberships):
            return False
        self._memberships.append(membership)
        return True


def change(store: MembershipStore, new: Callable[[Membership], Membership | None]) -> Membership:
    """Commit what `new` makes of the newest membership, however many others commit meanwhile.

    `new` returns None when nothing is to be changed any more. Returns the newest membership. Each
    failed turn means that another's has succeeded, so this ends.
    """
    while True:
        newest = store.newest()
        wanted = new(newest)
        if wanted is None:
            return newest
        if store.commit(wanted):
            return wanted
