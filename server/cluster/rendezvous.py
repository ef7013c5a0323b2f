"""What launchers tell each other in the store: who has which ranks, how started, why all end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalepod.ep_comm.handshake import differences
from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.group_store import GroupStore
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.errors import StartupError

RETRY_S = 0.2
LEADER = 0


@dataclass(frozen=True, slots=True)
class End:
    """Why the group has ended. code: of all its launchers; 0 if one was asked to stop."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
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
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, deadline: Deadline
) -> RankMap:
    """Wait until all ranks are claimed. Raises StartupError, on all launchers alike.

    settings  what must be the same everywhere
    model     how this machine calls the model; it may be another path on others
    """
    try:
        return _meet(store, plan, settings, model, deadline)
    except StartupError as error:
        end_group(store, End(1, str(error)))
        raise


def _meet(
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, deadline: Deadline
) -> RankMap:
    _raise_if_ended(store)
    described = {"settings": dict(settings), "model": model, "address": store.address}
    if plan.is_leader:
        store.set("leader", json.dumps(described))
    else:
        found = wait_for_key(store, "leader", "machine 0", deadline)
        _compare(json.loads(found), described, plan)
    own = json.dumps({"launcher": plan.first_rank, "address": store.address, "id": time.time_ns()})
    for rank in plan.ranks:
        found = store.claim(f"rank/{rank}", own)
        if found != own:
            raise StartupError(
                f"rank {rank} is taken by {json.loads(found)['address']}, and {store.address} was "
                "started as the same one: give each machine a --node-rank of its own"
            )
    return _wait_for_ranks(store, plan, deadline)


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


def _wait_for_ranks(store: GroupStore, plan: NodePlan, deadline: Deadline) -> RankMap:
    found: dict[int, dict[str, Any]] = {}
    while True:
        for rank in set(range(plan.num_ranks)) - found.keys():
            text = store.get(f"rank/{rank}")
            if text is not None:
                found[rank] = json.loads(text)
        missing = [str(rank) for rank in range(plan.num_ranks) if rank not in found]
        if not missing:
            return RankMap(
                address=tuple([str(found[rank]["address"]) for rank in range(plan.num_ranks)]),
                launchers=tuple([int(found[rank]["launcher"]) for rank in range(plan.num_ranks)]),
            )
        what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {plan.num_ranks}"
        _wait_a_moment(store, what, deadline)


def wait_for_key(store: GroupStore, key: str, what: str, deadline: Deadline) -> str:
    """Return the value, once it is set; `what` names it for people. Raises StartupError."""
    while (found := store.get(key)) is None:
        _wait_a_moment(store, what, deadline)
    return found


def _wait_a_moment(store: GroupStore, what: str, deadline: Deadline) -> None:
    _raise_if_ended(store)
    if not deadline.allows(what):
        raise StartupError(f"{what} did not come within {deadline.timeout_s:g} s")
    time.sleep(RETRY_S)


def _raise_if_ended(store: GroupStore) -> None:
    end = read_end(store)
    if end is not None:
        raise StartupError(end.reason)


def end_group(store: GroupStore, end: End) -> End:
    """End the group, unless another launcher has; return the reason that holds."""
    text = store.claim("end", json.dumps([end.code, end.reason]))
    return End(*json.loads(text))


def read_end(store: GroupStore) -> End | None:
    text = store.get("end")
    return None if text is None else End(*json.loads(text))
