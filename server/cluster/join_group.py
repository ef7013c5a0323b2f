"""The launchers of several machines meet, compare how they were started, and end together.

Each launcher (`whalepod serve` on machine 0, `whalepod worker` on the others) tells the others in
torch's store what it has. From then on it tells that it lives, and looks whether the group has
ended: the first reason that any of them gives is the reason of all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import whalepod
from whalepod.ep_comm.handshake import describe, differences
from whalepod.models.packed_files import fingerprint
from whalepod.server.choices import choose_transport
from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.group_store import GroupStore, open_store
from whalepod.server.cluster.local_ranks import LocalRanks
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.engine_launcher import STOP_GRACE_S
from whalepod.server.errors import GroupLost, StartupError

LEADER = 0
RETRY_S = 0.2
BEAT_S = 1.0
SILENCE_S = 30.0
"""A launcher that was not heard of for this long is lost, its machine probably too."""
MAY_DIFFER = frozenset(
    ("source.model", "source.revision", "device.num_threads", "device.kv_cache_memory_bytes")
)
"""Settings that machines need not share; a model is compared by its content."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class End:
    """Why the group has ended. code: of all its launchers; 0 if one was asked to stop."""

    code: int
    reason: str


@contextmanager
def join_group(
    config: EngineConfig,
    plan: NodePlan,
    checkpoint: Path,
    local: LocalRanks,
    why_stop: Callable[[], str | None] = lambda: None,
) -> Iterator[JoinedGroup]:
    """Wait for the other launchers, and follow the group in a thread. Raises StartupError.

    checkpoint  its folder
    local       this launcher's ranks
    why_stop    why to wait no longer; None: wait

    The end of the block ends the group, on all machines: with its error, if it has one.
    """
    deadline = Deadline(plan.timeout_s, why_stop)
    store = open_store(plan, deadline)
    settings = settings_of(config, plan, local.transport, checkpoint)
    addresses = meet(store, plan, settings, config.source.model, deadline)
    local.address = store.address
    joined = JoinedGroup(store, plan, addresses, local)
    thread = threading.Thread(target=joined.follow, daemon=True)
    thread.start()
    try:
        yield joined
    except Exception as error:
        joined.conclude(End(1, str(error)))
        raise
    finally:
        joined.conclude(End(0, joined.asked_to_stop or joined.told_to_stop))
        thread.join()
        joined.leave(STOP_GRACE_S)


def run_worker(
    config: EngineConfig, plan: NodePlan, checkpoint: Path, stop: threading.Event
) -> None:
    """Start this machine's ranks and stay until the group ends; `stop` asks for that.

    Returns when a machine was told to stop. Raises StartupError and GroupLost, one sentence.
    """

    def why_stop() -> str | None:
        return "told to stop" if stop.is_set() else None

    transport = choose_transport(config, num_launchers=plan.num_launchers)
    with (
        LocalRanks(config, plan, transport) as local,
        join_group(config, plan, checkpoint, local, why_stop) as joined,
    ):
        deadline = Deadline(plan.timeout_s, why_stop)
        for rank in plan.ranks:
            local.start(rank, joined.wait_for_address(rank, deadline))
        while joined.end is None and not stop.wait(RETRY_S):
            pass
        if joined.end is None:
            joined.ask_to_stop()
        end = joined.wait_for_end()
    if end.code:
        raise GroupLost(end.reason)
    logger.info("%s", end.reason)


class JoinedGroup:
    """This launcher among the others, after all have met.

    It tells that it lives, and finds out whether the group has ended. Machine 0 listens to all
    launchers and the others to machine 0.

    addresses  of all launchers' machines, by first rank
    """

    def __init__(
        self,
        store: GroupStore,
        plan: NodePlan,
        addresses: Mapping[int, str],
        local: LocalRanks | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.end: End | None = None
        """Why the group has ended; None while it goes on."""
        self.asked_to_stop: str | None = None
        """Why a machine asks for the end; None: none does."""
        self._has_ended = threading.Event()
        self._store = store
        self._plan = plan
        self._addresses = addresses
        self._local = local
        self._clock = clock
        self._num_beats = 0
        others = set(addresses) - {LEADER} if plan.is_leader else {LEADER}
        self._heard: dict[int, tuple[str | None, float]] = {
            launcher: (None, clock()) for launcher in others
        }

    # -- the group's end ------------------------------------------------------------------------

    def follow(self) -> None:
        """Look after the group until it has ended."""
        while self.end is None:
            try:
                end, self.asked_to_stop = self.look(), self._store.get("stop")
            except GroupLost as error:
                end = End(1, str(error))
            if end is not None:
                self._take(end)
            elif self._local is not None and (reason := self._local.why_ended()) is not None:
                self.conclude(End(1, reason))
            self._has_ended.wait(BEAT_S / 2)

    def look(self) -> End | None:
        """Return why the group has ended; None while it goes on. Raises StoreLost."""
        self._num_beats += 1
        self._store.set(f"beat/{self._plan.first_rank}", str(self._num_beats))
        end = read_end(self._store)
        if end is not None:
            return end
        reason = self._silent()
        return None if reason is None else end_group(self._store, End(1, reason))

    def _silent(self) -> str | None:
        """Return the launcher whose beats have stopped."""
        now = self._clock()
        for launcher, (last, since) in self._heard.items():
            beat = self._store.get(f"beat/{launcher}")
            if beat != last:
                self._heard[launcher] = beat, now
            elif now - since > SILENCE_S:
                return f"{self._machine(launcher)} is silent for {SILENCE_S:g} s"
        return None

    def conclude(self, end: End) -> None:
        """End the group with this reason, unless there is one already."""
        if self.end is None:
            try:
                self._take(end_group(self._store, end))
            except GroupLost as error:
                self._take(End(1, str(error)))

    def lose(self, rank: int, reason: str) -> None:
        """End the group because of this rank."""
        named = reason if f"rank {rank}" in reason else f"{self.describe(rank)}: {reason}"
        self.conclude(End(1, named))

    def _take(self, end: End) -> None:
        if self.end is None and end.code and self._local is not None:
            self._local.report()
        self.end = self.end or end
        self._has_ended.set()

    def wait_for_end(self) -> End:
        """Return why the group has ended, when it has."""
        self._has_ended.wait()
        assert self.end is not None
        return self.end

    @property
    def told_to_stop(self) -> str:
        """Return what the others hear when this machine is told to stop."""
        own = self._plan.first_rank
        return f"{self._machine(own) if own else 'machine 0'} was told to stop"

    def ask_to_stop(self) -> None:
        """Ask machine 0 to finish what runs, and then to end the group: it may have been told, too,
        and needs this machine's ranks while it drains."""
        with suppress(GroupLost):  # the thread that follows the group finds it out, too
            self._store.claim("stop", self.told_to_stop)

    def leave(self, timeout_s: float) -> None:
        """Need the store no longer. Machine 0 waits for the others, which read why all end."""
        with suppress(GroupLost):
            self._store.set(f"left/{self._plan.first_rank}", "1")
            deadline = self._clock() + timeout_s
            remaining = set(self._addresses) if self._plan.is_leader else set()
            while remaining and self._clock() < deadline:
                remaining = {one for one in remaining if self._store.get(f"left/{one}") is None}
                time.sleep(RETRY_S)

    # -- the other machines' ranks --------------------------------------------------------------

    def describe(self, rank: int) -> str:
        """Name a rank and its machine, for people."""
        return f"{_name([rank])} ({self._addresses[self._plan.launcher_of(rank)]})"

    def _machine(self, launcher: int) -> str:
        ranks = range(launcher, launcher + self._plan.num_local)
        return f"the machine of {_name(ranks)} ({self._addresses[launcher]})"

    def give_address(self, rank: int, address: str) -> None:
        """Tell where the gateway waits for a rank."""
        self._store.set(f"gateway/{rank}", address)

    def wait_for_address(self, rank: int, deadline: Deadline) -> str:
        """Return where the gateway waits for a rank. Raises StartupError."""
        while (found := self._store.get(f"gateway/{rank}")) is None:
            _wait_a_moment(self._store, f"machine 0's gateway, for rank {rank}", deadline)
        return found


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# -- the start ----------------------------------------------------------------------------------


def meet(
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, deadline: Deadline
) -> dict[int, str]:
    """Wait for all launchers; return their machines' addresses, by first rank.

    settings  what must be the same everywhere
    model     how this machine calls the model; it may be another path on others

    Raises StartupError, on all launchers alike.
    """
    try:
        return _meet(store, plan, settings, model, deadline)
    except StartupError as error:
        raise StartupError(end_group(store, End(1, str(error))).reason) from error


def _meet(
    store: GroupStore, plan: NodePlan, settings: Mapping[str, str], model: str, deadline: Deadline
) -> dict[int, str]:
    _raise_if_ended(store)
    own = {"settings": settings, "model": model, "address": store.address, "id": time.time_ns()}
    claimed = json.loads(store.claim(f"launcher/{plan.first_rank}", json.dumps(own)))
    if claimed != own:
        raise StartupError(
            f"rank {plan.first_rank} is taken by {claimed['address']}, and {store.address} was "
            "started as the same one: give each machine a --node-rank of its own"
        )
    found: dict[int, str] = {}
    while True:
        for launcher in {plan.launcher_of(rank) for rank in range(plan.num_ranks)} - found.keys():
            if (text := store.get(f"launcher/{launcher}")) is not None:
                other = json.loads(text)
                _compare({plan.first_rank: own, launcher: other})
                found[launcher] = other["address"]
        missing = [r for r in range(plan.num_ranks) if plan.launcher_of(r) not in found]
        if not missing:
            return found
        _wait_a_moment(store, f"{_name(missing)} of {plan.num_ranks}", deadline)


def _compare(described: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise StartupError that names what differs between launchers."""
    lines = differences({launcher: one["settings"] for launcher, one in described.items()})
    if lines:
        text = "; ".join(lines)
        for one in described.values():
            digest = one["settings"].get("model", "")
            text = text.replace(digest, f"{one['model']} ({digest[:8]})") if digest else text
        raise StartupError(
            f"the machines were started differently: {text}: use the same model, version and flags"
        )


def _wait_a_moment(store: GroupStore, what: str, deadline: Deadline) -> None:
    _raise_if_ended(store)
    if not deadline.allows(what):
        raise StartupError(f"{what} did not come within {deadline.timeout_s:g} s")
    time.sleep(RETRY_S)


def _raise_if_ended(store: GroupStore) -> None:
    if (end := read_end(store)) is not None:
        raise StartupError(end.reason)


def end_group(store: GroupStore, end: End) -> End:
    """End the group, unless another launcher has; return the reason that holds."""
    return End(*json.loads(store.claim("end", json.dumps([end.code, end.reason]))))


def read_end(store: GroupStore) -> End | None:
    text = store.get("end")
    return None if text is None else End(*json.loads(text))


def settings_of(
    config: EngineConfig, plan: NodePlan, transport: TransportName, checkpoint: Path
) -> dict[str, str]:
    """Return what all machines must have started with alike."""
    if config.source.load_format == "dummy":
        data = (checkpoint / "config.json").read_bytes()
        model = hashlib.blake2b(data, digest_size=12).hexdigest()
    else:
        model = fingerprint(checkpoint, "any")
    described = describe(
        whalepod=whalepod.__version__,
        num_ranks=plan.num_ranks,
        ranks_per_node=plan.ranks_per_node,
        transport=transport,
        model=model,
        source=config.source,
        device=config.device,
        scheduler=config.scheduler,
        speculation=config.speculation,
        parallel=config.parallel,
    )
    return {name: value for name, value in described.items() if name not in MAY_DIFFER}
