"""The launchers of several machines meet, compare how they were started, and end together.

Each launcher (`whalepod serve` on machine 0, `whalepod worker` on the others) claims its ranks in
torch's store. From then on it tells that it lives, and looks whether the group has ended: the first
reason that any of them gives is the reason of all.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import whalepod
from whalepod.ep_comm.handshake import describe
from whalepod.models.packed_files import fingerprint
from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.group_store import GroupStore, open_store
from whalepod.server.cluster.local_ranks import LocalRanks
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.rendezvous import (
    LEADER,
    RETRY_S,
    End,
    RankMap,
    end_group,
    meet,
    read_end,
    wait_for_key,
)
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.engine_launcher import STOP_GRACE_S
from whalepod.server.errors import GroupLost

BEAT_S = 1.0
SILENCE_S = 30.0
"""A launcher that was not heard of for this long is lost, its machine probably too."""
MAY_DIFFER = frozenset(
    ("source.model", "source.revision", "device.num_threads", "device.kv_cache_memory_bytes")
)
"""Settings that machines need not share; a model is compared by its content."""

logger = logging.getLogger(__name__)


@contextmanager
def join_group(
    config: EngineConfig,
    plan: NodePlan,
    transport: TransportName,
    checkpoint: Path,
    why_stop: Callable[[], str | None] = lambda: None,
) -> Iterator[JoinedGroup]:
    """Open the store and wait for the other launchers. Raises StartupError.

    checkpoint  its folder
    why_stop    why to wait no longer; None: wait
    """
    deadline = Deadline(plan.timeout_s, why_stop)
    store = open_store(plan, deadline)
    settings = settings_of(config, plan, transport, checkpoint)
    rank_map = meet(store, plan, settings, config.source.model, deadline)
    try:
        yield JoinedGroup(store, plan, rank_map)
    finally:
        if plan.is_leader:  # it keeps the store while the others read why all end
            with suppress(GroupLost):
                wait_until_left(store, rank_map, STOP_GRACE_S)


class JoinedGroup:
    """This launcher among the others, after all have met.

    It tells that it lives, and finds out whether the group has ended. Machine 0 listens to all
    launchers and the others to machine 0.
    """

    def __init__(
        self,
        store: GroupStore,
        plan: NodePlan,
        rank_map: RankMap,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank_map = rank_map
        self.address = store.address
        """Of this machine, as the others reach it."""
        self.end: End | None = None
        """Why the group has ended; None while it goes on."""
        self.asked_to_stop: str | None = None
        """Why a machine asks for the end; None: none does."""
        self._store = store
        self._plan = plan
        self._local: LocalRanks | None = None
        self._clock = clock
        self._num_beats = 0
        others = set(rank_map.launchers) - {LEADER} if plan.is_leader else {LEADER}
        self._heard: dict[int, tuple[str | None, float]] = {
            launcher: (None, clock()) for launcher in others
        }

    @contextmanager
    def following(self, local: LocalRanks) -> Iterator[None]:
        """Look after the group in a thread. The end of the block ends the group, on all machines:
        with its error, if it has one.

        local  this launcher's ranks
        """
        self._local = local
        thread = threading.Thread(target=self._follow, args=(local,), daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            self.conclude(End(1, str(error)))
            raise
        finally:
            self.conclude(End(0, self.asked_to_stop or self._told_to_stop))
            thread.join()

    def _follow(self, local: LocalRanks) -> None:
        while self.end is None:
            try:
                end, self.asked_to_stop = self.look(), self._store.get("stop")
            except GroupLost as error:
                end = End(1, str(error))
            if end is not None:
                self._take(end)
            elif (reason := local.why_ended()) is not None:
                self.conclude(End(1, reason))
            time.sleep(BEAT_S / 2)
        if not self._plan.is_leader:
            with suppress(GroupLost):
                leave(self._store, self._plan)

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
                name = self.rank_map.name(self.rank_map.ranks_of(launcher))
                return f"the machine of {name} is silent for {SILENCE_S:g} s"
        return None

    def conclude(self, end: End) -> None:
        """End the group with this reason, unless there is one already."""
        if self.end is not None:
            return
        try:
            self._take(end_group(self._store, end))
        except GroupLost as error:
            self._take(End(1, str(error)))

    def _take(self, end: End) -> None:
        if self.end is None and end.code and self._local is not None:
            self._local.report()
        self.end = self.end or end

    def lose(self, rank: int, reason: str) -> None:
        """End the group because of this rank."""
        name = self.rank_map.name([rank])
        self.conclude(End(1, reason if f"rank {rank}" in reason else f"{name}: {reason}"))

    @property
    def _told_to_stop(self) -> str:
        names = self.rank_map.name(list(self._plan.ranks))
        machine = "machine 0" if self._plan.is_leader else f"the machine of {names}"
        return f"{machine} was told to stop"

    def ask_to_stop(self) -> None:
        """Ask machine 0 to finish what runs, and then to end the group: it may have been told, too,
        and needs this machine's ranks while it drains."""
        with suppress(GroupLost):  # the thread that follows the group finds it out, too
            self._store.claim("stop", self._told_to_stop)

    def give_address(self, rank: int, address: str) -> None:
        """Tell where the gateway waits for a rank."""
        self._store.set(f"gateway/{rank}", address)

    def wait_for_address(self, rank: int, deadline: Deadline) -> str:
        """Return where the gateway waits for a rank. Raises StartupError."""
        what = f"machine 0's gateway, for rank {rank}"
        return wait_for_key(self._store, f"gateway/{rank}", what, deadline)


def leave(store: GroupStore, plan: NodePlan) -> None:
    """Tell that this launcher needs the store no longer."""
    store.set(f"left/{plan.first_rank}", "1")


def wait_until_left(store: GroupStore, rank_map: RankMap, timeout_s: float) -> None:
    """Return when all other launchers have left, or too late."""
    deadline = time.monotonic() + timeout_s
    others = set(rank_map.launchers) - {LEADER}
    while others and time.monotonic() < deadline:
        others = {launcher for launcher in others if store.get(f"left/{launcher}") is None}
        time.sleep(RETRY_S)


def settings_of(
    config: EngineConfig, plan: NodePlan, transport: TransportName, checkpoint: Path
) -> dict[str, str]:
    """Return what all machines must have started with alike."""
    described = describe(
        whalepod=whalepod.__version__,
        num_ranks=plan.num_ranks,
        ranks_per_node=plan.ranks_per_node,
        transport=transport,
        model=_content_of(checkpoint, is_dummy=config.source.load_format == "dummy"),
        source=config.source,
        device=config.device,
        scheduler=config.scheduler,
        speculation=config.speculation,
        parallel=config.parallel,
    )
    return {name: value for name, value in described.items() if name not in MAY_DIFFER}


def _content_of(checkpoint: Path, *, is_dummy: bool) -> str:
    if is_dummy:
        config = (checkpoint / "config.json").read_bytes()
        return hashlib.blake2b(config, digest_size=12).hexdigest()
    return fingerprint(checkpoint, "any")
