"""The group as machine 0 sees it: its own ranks, and those of other machines over TCP.

Nobody is replaced here. When a rank or a machine is lost the whole group ends, on all machines, and
who started it (torchrun, a LeaderWorkerSet) starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from whalepod.server.channel import EngineChannel
from whalepod.server.cluster.launcher import met
from whalepod.server.cluster.local_ranks import LAST_WORDS_S, LocalRanks
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.rank_group import RANK_MODULE, add_infos, naming
from whalepod.server.cluster.rendezvous import (
    BEAT_S,
    End,
    NodeWatch,
    end_group,
    give_address,
    wait_until_left,
)
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import EngineConfig
from whalepod.server.engine_launcher import START_TIMEOUT_S, STOP_GRACE_S
from whalepod.server.engine_socket import POLL_MS, EngineSocket
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import EngineInfo

logger = logging.getLogger(__name__)


class LeaderRank:
    """One rank's end of the wire, on whatever machine its process is."""

    def __init__(self, rank: int, socket: EngineSocket, leader: Leader) -> None:
        self.rank = rank
        self.socket = socket
        self._leader = leader
        self._cut_at: float | None = None

    @property
    def info(self) -> EngineInfo:
        return self.socket.info

    @property
    def is_cut_for_good(self) -> bool:
        """Say whether the connection is cut, and its machine had the time to say why."""
        if not self.socket.is_cut:
            return False
        self._cut_at = self._cut_at or time.monotonic()
        return time.monotonic() - self._cut_at > LAST_WORDS_S

    def channel(self) -> EngineChannel:
        """Return the gateway's end, to be entered once."""
        return self.socket.channel(lambda: self._leader.why_lost(self.rank))


class Leader:
    """All ranks of one model on several machines, for the time of a `with` block.

    Entering waits until the group can serve and raises StartupError, one sentence, when it cannot.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan,
        folder: Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        module: str = RANK_MODULE,
    ) -> None:
        """folder: of the checkpoint."""
        self.num_ranks = plan.num_ranks
        self._config = config
        self._plan = plan
        self._checkpoint = folder
        self._start_timeout_s = start_timeout_s
        self._module = module
        self._ranks: list[LeaderRank] = []
        self._stack = ExitStack()
        self._closing = threading.Event()
        self._end: End | None = None
        self._asked: str | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._party = party = stack.enter_context(
                met(self._config, self._plan, self._checkpoint)
            )
            self._local = LocalRanks(
                self._config, self._plan, party.transport, party.store.address, module=self._module
            )
            stack.callback(self._wait_for_others)
            thread = threading.Thread(target=self._watch, name="watch-nodes", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._closing.set)
            stack.enter_context(self._local)
            stack.callback(self._stop)
            try:
                self._start(stack)
            except StartupError as error:
                self._conclude(End(1, str(error)))
                raise
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        """Start our ranks, tell the others where the gateway is, and wait for all."""
        addresses = {}
        for rank in range(self.num_ranks):
            socket = EngineSocket(f"rank {rank}")
            stack.callback(socket.close)
            addresses[rank] = self._bind(socket, rank)
            self._ranks.append(LeaderRank(rank, socket, self))
        self._local.start(addresses)
        for rank, address in addresses.items():
            if rank not in self._plan.ranks:
                give_address(self._party.store, rank, address)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Hear from all ranks, in whatever order they come."""
        deadline = time.monotonic() + self._start_timeout_s
        pending = list(self._ranks)
        while pending:
            end, heard = self._end, []  # whoever ended may have said why a moment ago
            for one in pending:
                with naming(one.rank):
                    if one.socket.take_info(POLL_MS // len(pending)) is not None:
                        one.socket.watch_connection()
                        heard.append(one)
            pending = [one for one in pending if one not in heard]
            if end is not None or self._asked is not None:
                raise StartupError(end.reason if end else str(self._asked))
            if time.monotonic() > deadline:
                names = ", ".join(str(one.rank) for one in pending)
                raise StartupError(f"ranks {names} not ready after {self._start_timeout_s:.0f} s")

    def _bind(self, socket: EngineSocket, rank: int) -> str:
        if rank in self._plan.ranks:
            return socket.bind(f"ipc://{self._local.folder}/rank{rank}")
        address = self._party.store.address
        return socket.bind(f"tcp://{f'[{address}]' if ':' in address else address}:*")

    # -- the group ------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the group can do; caches and requests of all ranks together."""
        return add_infos(self.infos)

    @property
    def infos(self) -> Sequence[EngineInfo]:
        """What each rank said when it became ready."""
        return [one.info for one in self._ranks]

    @property
    def end(self) -> End | None:
        """Why the group has ended; None while it serves."""
        return self._end

    @property
    def is_told_to_stop(self) -> bool:
        """Say whether to take no more requests: a machine asks for the end, or it has come."""
        return self._end is not None or self._asked is not None

    def process(self, rank: int) -> LeaderRank:
        return self._ranks[rank]

    def channel(self) -> RankRouter:
        """Return the gateway's end, to be entered once."""
        return RankRouter(self)

    def why_lost(self, rank: int) -> str | None:
        """Say why a rank serves no longer; None while it does."""
        if self._end is not None:
            return self._end.reason
        if self._ranks[rank].is_cut_for_good:
            return f"the connection to {self._party.roster.name([rank])} is cut"
        return None

    def where(self, rank: int) -> str:
        """Say what a rank did last, or who can say so."""
        if rank in self._plan.ranks:
            return self._local.where(rank)
        return f"it is on {self._party.roster.address[rank]}, whose log says where"

    def take_out(self, rank: int, reason: str) -> None:
        """Let the group end because of this rank."""
        name = self._party.roster.name([rank])
        self._conclude(End(1, reason if f"rank {rank}" in reason else f"{name}: {reason}"))

    def replace_rank(self, rank: int) -> LeaderRank:
        """Raise StartupError: nobody is replaced."""
        assert self._end is not None, "a rank is taken out first"
        raise StartupError(self._end.reason)

    def stop_replacing(self) -> None:
        """Do nothing: nobody is replaced."""

    # -- the end --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look after the group until it ends, in a thread of its own."""
        watch = NodeWatch(self._party.store, self._plan, self._party.roster)
        while self._end is None and not self._closing.wait(BEAT_S / 2):
            try:
                end, self._asked = watch.look(), watch.why_stop()
            except GroupLost as error:
                end = End(1, str(error))
            if end is not None:
                self._end = end
            elif (reason := self._local.why_ended()) is not None:
                self._conclude(End(1, reason))

    def _stop(self) -> None:
        self._conclude(End(0, self._asked or "machine 0 was told to stop"))

    def _conclude(self, end: End) -> None:
        """End the group with this reason, unless there is one already."""
        if self._end is not None:
            return
        try:
            self._end = end_group(self._party.store, end)
        except GroupLost as error:
            self._end = End(1, str(error))
        if self._end.code:
            for rank in self._plan.ranks:
                logger.error("rank %d: %s", rank, self._local.where(rank))

    def _wait_for_others(self) -> None:
        """Keep the store while the others read why the group ended."""
        with suppress(GroupLost):  # then they know
            wait_until_left(self._party.store, self._party.roster, STOP_GRACE_S)
