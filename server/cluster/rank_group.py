"""All ranks of one model as the gateway's machine knows them: started, watched, replaced, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from whalepod.server.channel import EngineChannel
from whalepod.server.choices import can_return, choose_transport
from whalepod.server.cluster.local_ranks import LAST_WORDS_S, RANK_MODULE, LocalRanks
from whalepod.server.cluster.membership_store import FolderStore
from whalepod.server.cluster.node_plan import NodePlan, plan_of_one
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import EngineConfig
from whalepod.server.engine_launcher import START_TIMEOUT_S, STOP_GRACE_S
from whalepod.server.engine_socket import POLL_MS, EngineSocket
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import EngineInfo

if TYPE_CHECKING:
    from whalepod.server.cluster.join_group import JoinedGroup

logger = logging.getLogger(__name__)
MAX_RESTARTS = 5
RESTARTS_COUNT_S = 600.0
"""A rank that was lost more often in this time is not started again."""


@dataclass(slots=True)
class GroupRank:
    """One rank's end of the wire, on whatever machine its process is."""

    rank: int
    socket: EngineSocket
    exit_reason: Callable[[], str | None]
    address: str
    pid: int = 0
    """0: another launcher has started it."""
    cut_at: float | None = None
    lost_at: list[float] = field(default_factory=list)
    """When earlier processes of this rank were lost."""

    def channel(self) -> EngineChannel:
        """Return the gateway's end, to be entered once."""
        return self.socket.channel(self.exit_reason)

    @property
    def is_cut_for_good(self) -> bool:
        """Return whether the connection is cut, and its machine had the time to tell why."""
        if not self.socket.is_cut:
            return False
        self.cut_at = self.cut_at or time.monotonic()
        return time.monotonic() - self.cut_at > LAST_WORDS_S


class RankGroup:
    """All ranks of one model, for the time of a `with` block.

    Entering waits until the group can serve and raises StartupError, one sentence that names the
    rank, when it cannot. On one machine a rank that is lost later is replaced by `replace_rank`.
    Across machines no rank is: the whole group ends, on all machines with one reason, and what
    started it (torchrun, a LeaderWorkerSet) starts it again.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan | None = None,
        checkpoint: Path | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        module: str = RANK_MODULE,
    ) -> None:
        """plan: this machine's part, and the folder of the checkpoint; None: it is the only one."""
        self.num_ranks = config.parallel.expert_parallel_size
        self._config = config
        self._plan = plan or plan_of_one(self.num_ranks)
        self._checkpoint = checkpoint
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._module = module
        self._transport = choose_transport(config, num_launchers=self._plan.num_launchers)
        self._ranks: list[GroupRank] = []
        self._joined: JoinedGroup | None = None
        self._is_stopping = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._plan.is_spread:
                from whalepod.server.cluster.join_group import join_group  # brings torch with it

                assert self._checkpoint is not None, "several machines compare their checkpoints"
                self._joined = stack.enter_context(
                    join_group(self._config, self._plan, self._transport, self._checkpoint)
                )
            stack.callback(self._close_sockets)
            self._local = stack.enter_context(
                LocalRanks(
                    self._config,
                    self._plan,
                    self._transport,
                    address=self._joined.address if self._joined else "",
                    module=self._module,
                    stop_grace_s=self._stop_grace_s,
                )
            )
            self._memberships = FolderStore(self._local.folder)
            if self._joined is not None:
                stack.enter_context(self._joined.following(self._local))
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- the start ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start this machine's ranks, tell the others where the gateway is, and wait for all."""
        for rank in range(self.num_ranks):
            self._ranks.append(self._open(rank))
        for one in self._ranks:
            if one.rank in self._plan.ranks:
                self._start_process(one)
            elif self._joined is not None:
                self._joined.give_address(one.rank, one.address)
        self._wait_until_ready()

    def _open(self, rank: int) -> GroupRank:
        """Listen for a rank: at a socket file, or at a port if it is on another machine."""
        if rank in self._plan.ranks:
            name = f"rank{rank}.{self._local.num_lives(rank)}"
            address = f"ipc://{self._local.folder}/{name}"
        else:
            assert self._joined is not None, f"rank {rank} is on no machine"
            host = self._joined.address
            address = f"tcp://{f'[{host}]' if ':' in host else host}:*"
        socket = EngineSocket(f"rank {rank}")
        return GroupRank(rank, socket, lambda: self._exit_reason(rank), socket.bind(address))

    def _start_process(self, one: GroupRank) -> None:
        self._local.start(one.rank, one.address)
        one.pid = self._local.pid(one.rank)

    def _wait_until_ready(self) -> None:
        """Hear from all ranks, in the order in which they come."""
        deadline = time.monotonic() + self._start_timeout_s
        pending = list(self._ranks)
        while pending:
            reason = self._why_hopeless()  # asked first: what has ended may have told why just now
            for one in list(pending):
                with naming(one.rank):
                    if one.socket.take_info(max(POLL_MS // len(pending), 1)) is not None:
                        if self._joined is not None:  # else its process is ours to ask
                            one.socket.watch_connection()
                        pending.remove(one)
            if reason is not None:
                raise StartupError(reason)
            if time.monotonic() > deadline:
                names = ", ".join(str(one.rank) for one in pending)
                raise StartupError(f"ranks {names} not ready after {self._start_timeout_s:.0f} s")

    def _why_hopeless(self) -> str | None:
        if self._joined is not None:
            return self._joined.end.reason if self._joined.end else self._joined.asked_to_stop
        reasons = (self._local.exit_reason(one.rank) for one in self._ranks)
        return next((f"{reason} before it was ready" for reason in reasons if reason), None)

    # -- the group ------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Return what this machine's ranks and their launcher share; nothing else reads it."""
        return self._local.folder

    @property
    def info(self) -> EngineInfo:
        """What the group can do; caches and requests of all ranks together."""
        return add_infos(self.infos)

    @property
    def infos(self) -> Sequence[EngineInfo]:
        """What each rank said when it became ready."""
        return [one.socket.info for one in self._ranks]

    @property
    def is_told_to_stop(self) -> bool:
        """Return whether to take no more requests: a machine asks for it, or the group ended."""
        joined = self._joined
        return joined is not None and (joined.end or joined.asked_to_stop) is not None

    @property
    def failure(self) -> str | None:
        """Return why the group has ended, unless it was asked to; None while it goes on."""
        end = self._joined.end if self._joined is not None else None
        return end.reason if end is not None and end.code else None

    def process(self, rank: int) -> GroupRank:
        """Return the rank as it is at present."""
        return self._ranks[rank]

    def channel(self) -> RankRouter:
        """Return the gateway's end, to be entered once."""
        return RankRouter(self)

    def where(self, rank: int) -> str:
        """Return what a rank did last, or where that is logged."""
        if rank in self._plan.ranks or self._joined is None:
            return self._local.where(rank)
        return f"it is on {self._joined.rank_map.address[rank]}, whose log says where"

    # -- lost ranks -----------------------------------------------------------------------------

    def _exit_reason(self, rank: int) -> str | None:
        """Return how a rank has ended; None while it lives. Opens no file."""
        if self._joined is None:
            return self._local.exit_reason(rank)
        if self._joined.end is not None:
            return self._joined.end.reason
        if self._ranks[rank].is_cut_for_good:
            return f"the connection to {self._joined.rank_map.name([rank])} is cut"
        return None

    def why_lost(self, rank: int) -> str | None:
        """Return why a rank belongs to the group no longer; None while it does."""
        reason = self._exit_reason(rank)
        if reason is not None or self._joined is not None:
            return reason
        if rank not in self._memberships.newest().members:
            return f"the other ranks went on without rank {rank}: {self.where(rank)}"
        return None

    def take_out(self, rank: int, reason: str) -> None:
        """End a lost rank's process and tell the others; or end a group to which none returns."""
        if self._joined is not None:
            self._joined.lose(rank, reason)
            return
        self._local.kill(rank)
        self._remove(rank)

    def _remove(self, rank: int) -> None:
        self._memberships.remove(frozenset({rank}))
        self._local.wake()

    def replace_rank(self, rank: int) -> None:
        """Start a rank that was taken out again; returns when the group is whole.

        Raises GroupLost, one sentence, when the rank cannot come back.
        """
        if self.failure is not None:
            raise GroupLost(self.failure)
        if not can_return(self._transport):
            raise GroupLost(
                f"rank {rank} cannot be replaced: over {self._transport} a lost rank cannot come "
                "back: start the group again"
            )
        while not self._is_stopping:
            self._count_loss(rank)
            self._local.stop(rank)
            lost = self._ranks[rank]
            lost.socket.close()
            one = self._ranks[rank] = replace(self._open(rank), lost_at=lost.lost_at)
            self._start_process(one)
            try:
                one.socket.wait_for_info(
                    self._start_timeout_s, one.exit_reason, lambda: self._why_stop
                )
                return
            except StartupError as error:
                logger.error("rank %d did not come up again: %s", rank, error)
                self._remove(rank)
        raise GroupLost("the group is stopping")

    def _count_loss(self, rank: int) -> None:
        """Note that a rank was lost. Raises GroupLost if that came too often."""
        one, now = self._ranks[rank], time.monotonic()
        one.lost_at = [t for t in one.lost_at if now - t < RESTARTS_COUNT_S] + [now]
        if len(one.lost_at) > MAX_RESTARTS:
            raise GroupLost(
                f"rank {rank} cannot be replaced: it was lost {len(one.lost_at)} times in "
                f"{RESTARTS_COUNT_S:.0f} s"
            )

    def stop_replacing(self) -> None:
        """End a `replace_rank` that runs in another thread, soon."""
        self._is_stopping = True

    @property
    def _why_stop(self) -> str | None:
        return "the group is stopping" if self._is_stopping else None

    def _close_sockets(self) -> None:
        for one in self._ranks:
            one.socket.close()


@contextmanager
def naming(rank: int) -> Iterator[None]:
    """Let a StartupError name the rank it comes from."""
    try:
        yield
    except StartupError as error:
        is_named = str(error).startswith("rank ")
        raise StartupError(str(error) if is_named else f"rank {rank}: {error}") from error


def add_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return what all ranks can do together."""
    return replace(
        infos[0],
        num_blocks=sum(info.num_blocks for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
        num_ranks=len(infos),
    )
