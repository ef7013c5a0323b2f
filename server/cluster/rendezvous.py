"""The machines of a group find each other, compare how they were started, and end together.

Each launcher (`whalepod serve` on machine 0, `whalepod worker` on the others) claims its ranks in
the store. From then on it says that it lives, and looks whether the group has ended: the first
reason that anybody gives is everybody's reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalepod.ep_comm.handshake import differences
from whalepod.server.cluster.group_store import GroupStore
from whalepod.server.cluster.membership_store import Membership
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.store_membership import read_newest
from whalepod.server.cluster.waiting import Waiting
from whalepod.server.errors import StartupError

RETRY_S = 0.2
BEAT_S = 1.0
SILENCE_S = 30.0
"""A launcher that was not heard of for so long is lost, its machine probably too."""
LEADER = 0


@dataclass(frozen=True, slots=True)
class End:
    """Why the group has ended. code: of all its launchers; 0 if somebody asked for it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Where each rank is.

    address    of its machine, by rank
    launchers  who starts it, named after their first ranks, by rank
    """

    address: tuple[str, ...]
    launchers: tuple[int, ...]

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks for people."""
        numbers = ", ".join(map(str, ranks))
        return f"rank{'s' * (len(ranks) > 1)} {numbers} ({self.address[ranks[0]]})"

    def ranks_of(self, launcher: int) -> list[int]:
        return [rank for rank, owner in enumerate(self.launchers) if owner == launcher]


def meet(
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, waiting: Waiting
) -> Roster:
    """Wait until all ranks are claimed. Raises StartupError, on all launchers alike.

    settings  what must be the same everywhere
    model     how this machine calls the model; it may be another path on others
    """
    try:
        return _meet(store, plan, settings, model, waiting)
    except StartupError as error:
        end_group(store, End(1, str(error)))
        raise


def _meet(
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, waiting: Waiting
) -> Roster:
    _raise_if_ended(store)
    described = {"settings": dict(settings), "model": model, "address": store.address}
    if plan.is_leader:
        store.set("leader", json.dumps(described))
    else:
        found = _wait_for(store, "leader", "machine 0", waiting)
        _compare(json.loads(found), described, plan)
    own = json.dumps({"launcher": plan.first_rank, "address": store.address, "id": time.time_ns()})
    for rank in plan.ranks:
        found = store.claim(f"rank/{rank}", own)
        if found != own:
            raise StartupError(
                f"rank {rank} is taken by {json.loads(found)['address']}, and {store.address} was "
                "started as the same one: give each machine a --node-rank of its own"
            )
    return _wait_for_ranks(store, plan, waiting)


def _compare(leader: Mapping[str, Any], own: Mapping[str, Any], plan: NodePlan) -> None:
    """Raise StartupError that names what differs between machine 0 and this one."""
    lines = differences({0: leader["settings"], plan.first_rank: own["settings"]})
    if lines:
        text = "; ".join(lines)
        for side in (leader, own):
            digest = side["settings"].get("model", "")
            text = text.replace(digest, f"{side['model']} ({digest[:8]})") if digest else text
        raise StartupError(
            f"the machines were started differently: {text}: use the same model, version and flags"
        )


def _wait_for_ranks(store: GroupStore, plan: NodePlan, waiting: Waiting) -> Roster:
    found: dict[int, dict[str, Any]] = {}
    while True:
        for rank in set(range(plan.num_ranks)) - found.keys():
            text = store.get(f"rank/{rank}")
            if text is not None:
                found[rank] = json.loads(text)
        missing = [str(rank) for rank in range(plan.num_ranks) if rank not in found]
        if not missing:
            return Roster(
                address=tuple([str(found[rank]["address"]) for rank in range(plan.num_ranks)]),
                launchers=tuple([int(found[rank]["launcher"]) for rank in range(plan.num_ranks)]),
            )
        what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {plan.num_ranks}"
        _raise_if_ended(store)
        if not waiting.goes_on(what):
            raise StartupError(f"{what} did not come within {waiting.timeout_s:g} s")
        time.sleep(RETRY_S)


def _wait_for(store: GroupStore, key: str, what: str, waiting: Waiting) -> str:
    while (found := store.get(key)) is None:
        _raise_if_ended(store)
        if not waiting.goes_on(what):
            raise StartupError(f"{what} did not come within {waiting.timeout_s:g} s")
        time.sleep(RETRY_S)
    return found


def _raise_if_ended(store: GroupStore) -> None:
    end = read_end(store)
    if end is not None:
        raise StartupError(end.reason)


def give_address(store: GroupStore, rank: int, address: str) -> None:
    """Say where the gateway waits for a rank."""
    store.set(f"gateway/{rank}", address)


def wait_for_address(store: GroupStore, rank: int, waiting: Waiting) -> str:
    """Return where the gateway waits for a rank. Raises StartupError."""
    return _wait_for(store, f"gateway/{rank}", f"machine 0's gateway, for rank {rank}", waiting)


# -- the end ------------------------------------------------------------------------------------


def end_group(store: GroupStore, end: End) -> End:
    """End the group, unless somebody has; return the reason that holds."""
    text = store.claim("end", json.dumps([end.code, end.reason]))
    return End(*json.loads(text))


def read_end(store: GroupStore) -> End | None:
    text = store.get("end")
    return None if text is None else End(*json.loads(text))


def ask_to_stop(store: GroupStore, reason: str) -> None:
    """Ask machine 0 to finish what runs, and then to end the group."""
    store.claim("stop", reason)


def leave(store: GroupStore, plan: NodePlan) -> None:
    """Say that this launcher needs the store no longer."""
    store.set(f"left/{plan.first_rank}", "1")


def wait_until_left(store: GroupStore, roster: Roster, timeout_s: float) -> None:
    """Keep the store until all other launchers have read why the group ended, or too late."""
    deadline = time.monotonic() + timeout_s
    others = set(roster.launchers) - {LEADER}
    while others and time.monotonic() < deadline:
        others = {launcher for launcher in others if store.get(f"left/{launcher}") is None}
        time.sleep(RETRY_S)


class NodeWatch:
    """Says that this launcher lives, and finds out whether the group has ended.

    Machine 0 listens to all launchers and the others to machine 0.
    """

    def __init__(
        self,
        store: GroupStore,
        plan: NodePlan,
        roster: Roster,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._roster = roster
        self._own = plan.first_rank
        self._clock = clock
        self._num_beats = 0
        self._membership = Membership(0)
        self._seen: frozenset[int] = frozenset()
        others = set(roster.launchers) - {LEADER} if plan.is_leader else {LEADER}
        self._heard: dict[int, tuple[str | None, float]] = {
            launcher: (None, clock()) for launcher in others
        }

    def look(self) -> End | None:
        """Return why the group has ended; None while it goes on. Raises StoreLost."""
        self._num_beats += 1
        self._store.set(f"beat/{self._own}", str(self._num_beats))
        end = read_end(self._store)
        if end is not None:
            return end
        reason = self._silent() or self._removed()
        return None if reason is None else end_group(self._store, End(1, reason))

    def why_stop(self) -> str | None:
        """Say why a machine has asked for the end; None: nobody has."""
        return self._store.get("stop")

    def _silent(self) -> str | None:
        """Say which launcher is not heard of any more."""
        now = self._clock()
        for launcher, (last, since) in self._heard.items():
            beat = self._store.get(f"beat/{launcher}")
            if beat != last:
                self._heard[launcher] = beat, now
            elif now - since > SILENCE_S:
                ranks = self._roster.ranks_of(launcher)
                return f"the machine of {self._roster.name(ranks)} is silent for {SILENCE_S:g} s"
        return None

    def _removed(self) -> str | None:
        """Say which rank the others went on without."""
        self._membership = read_newest(self._store, self._membership)
        gone = sorted(self._seen - self._membership.members)
        self._seen |= self._membership.members
        return f"the other ranks went on without {self._roster.name(gone)}" if gone else None
