"""Who belongs to the group: memberships numbered by epoch, the next one committed by one rank.

A group that replaces lost ranks keeps every membership under its epoch. To commit is to compare and
set: it succeeds for one of all who want to be next, and the others read what it wrote.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from whalepod.server.errors import GroupLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks that compute together since `epoch`."""

    epoch: int
    members: frozenset[int] = frozenset()


class FolderStore:
    """Memberships as files of a folder that the ranks of one machine share.

    A file is linked to its name, which only one can do: there is no lock that a rank could hold
    when it is stopped or killed.
    """

    can_renew = True
    """Whether `renew` begins another epoch, before the numbers of this one's exchanges end."""

    def __init__(self, folder: Path, known: Membership | None = None) -> None:
        """known: the newest that the caller has heard of; a file that vanished does not undo it."""
        self._folder = folder
        self._known = known or Membership(0)

    def newest(self) -> Membership:
        known = self._known
        while not self.is_newest(known.epoch):
            epoch = known.epoch + 1
            members = json.loads(self._path(epoch).read_text(encoding="ascii"))
            known = Membership(epoch, frozenset(members))
        self._known = known
        return known

    def is_newest(self, epoch: int) -> bool:
        """Return whether no later membership than that of `epoch` exists. Cheap, never waits."""
        return not os.path.exists(self._path(epoch + 1))

    def commit(self, membership: Membership) -> bool:
        """Make it the newest one; False if its epoch is taken, or not the next one.

        Raises GroupLost if the folder is gone.
        """
        if membership.epoch != self.newest().epoch + 1:
            return False
        draft = self._folder / f"draft-{os.getpid()}-{threading.get_ident()}"
        try:
            draft.write_text(json.dumps(sorted(membership.members)), encoding="ascii")
            os.link(draft, self._path(membership.epoch))
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise GroupLost(f"{self._folder} has vanished: ranks meet there") from None
        finally:
            draft.unlink(missing_ok=True)
        self._known = membership
        return True

    def join(self, rank: int) -> None:
        """Add a rank that is ready to step."""
        while True:  # each failed turn means that another's has succeeded, so this ends
            newest = self.newest()
            if self.commit(Membership(newest.epoch + 1, newest.members | {rank})):
                return

    def remove(self, ranks: frozenset[int], *, epoch: int | None = None) -> None:
        """Take ranks out, but only from the membership of `epoch` if one is given.

        Raises GroupLost where the group cannot go on without them.
        """
        while (newest := self.newest()).members & ranks and epoch in (None, newest.epoch):
            if self.commit(Membership(newest.epoch + 1, newest.members - ranks)):
                return

    def renew(self) -> None:
        """Begin another epoch with the same members; that another change comes first will do."""
        newest = self.newest()
        self.commit(Membership(newest.epoch + 1, newest.members))

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}"


class StaticMembership:
    """The one membership of a group that replaces no rank: all ranks, once all are ready.

    They count themselves in torch's store, which is not asked again afterwards.
    """

    can_renew = False
    """No epoch follows, so this one has all numbers to itself."""

    def __init__(self, store: Store, num_ranks: int) -> None:
        self._store = store
        self._all = frozenset(range(num_ranks))
        self._is_complete = False

    def newest(self) -> Membership:
        return Membership(0) if self.is_newest(0) else Membership(1, self._all)

    def is_newest(self, epoch: int) -> bool:
        if not self._is_complete:
            self._is_complete = self._store.add("ready", 0) >= len(self._all)
        return epoch > 0 or not self._is_complete

    def join(self, rank: int) -> None:
        self._store.add("ready", 1)

    def remove(self, ranks: frozenset[int], *, epoch: int | None = None) -> None:
        names = ", ".join(map(str, sorted(ranks)))
        raise GroupLost(f"rank {names} does not come to the exchange of records any more")

    def renew(self) -> None:
        """Do nothing: it is never asked for."""


MembershipStore: TypeAlias = FolderStore | StaticMembership
"""Both are used alike."""
