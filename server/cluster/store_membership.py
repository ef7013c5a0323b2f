"""Memberships in the store that the machines of a group share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from whalepod.server.cluster.group_store import GroupStore
from whalepod.server.cluster.membership_store import Membership
from whalepod.server.errors import GroupLost

POLL_S = 0.2
"""How soon a rank hears of a new membership, or that the store is gone."""


def read_newest(store: GroupStore, since: Membership) -> Membership:
    """Return the newest membership, looked for from one that is known to exist."""
    newest = since
    while (text := store.get(_key(newest.epoch + 1))) is not None:
        newest = Membership(newest.epoch + 1, frozenset(json.loads(text)))
    return newest


class StoreMembership:
    """A `MembershipStore` over the network, followed by a thread: `is_newest` never waits.

    on_change  called from that thread when there is a newer membership, or when the store is gone

    Every method raises GroupLost once the store is gone.
    """

    def __init__(self, store: GroupStore, on_change: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_change = on_change
        self._known = Membership(0)
        self._lost: GroupLost | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="membership", daemon=True)
        self._thread.start()

    def newest(self, since: int = 0) -> Membership:
        self._learn(read_newest(self._store, self._known))
        return self._known

    def is_newest(self, epoch: int) -> bool:
        if self._lost is not None:
            raise self._lost
        return self._known.epoch <= epoch

    def commit(self, membership: Membership) -> bool:
        epoch = membership.epoch
        if epoch > 1 and self._store.get(_key(epoch - 1)) is None:
            return False
        text = json.dumps(sorted(membership.members))
        if self._store.claim(_key(epoch), text) != text:
            return False
        self._learn(membership)
        return True

    def close(self) -> None:
        """Follow no longer."""
        self._is_closed.set()
        self._thread.join()

    def _learn(self, membership: Membership) -> None:
        with self._lock:
            if membership.epoch > self._known.epoch:
                self._known = membership

    def _follow(self) -> None:
        while not self._is_closed.wait(POLL_S):
            before = self._known
            try:
                self._learn(read_newest(self._store, before))
            except GroupLost as error:
                self._lost = error
            if self._known.epoch != before.epoch or self._lost is not None:
                self._on_change()
            if self._lost is not None:
                return


def _key(epoch: int) -> str:
    return f"epoch/{epoch}"
