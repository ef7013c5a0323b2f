"""All ranks of one model as the gateway's machine knows them: started, watched, replaced, ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from whalepod.server.channel import EngineChannel
from whalepod.server.choices import can_return, choose_transport
from whalepod.server.cluster.local_ranks import LAST_WORDS_S, RANK_MODULE, LocalRanks
from whalepod.server.cluster.membership_store import FolderStore
from whalepod.server.cluster.node_plan import NodePlan, plan_of_one
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import EngineConfig
from whalepod.server.engine_launcher import START_TIMEOUT_S, STOP_GRACE_S, Losses
from whalepod.server.engine_socket import EngineSocket, wait_until_ready
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import EngineInfo

if TYPE_CHECKING:
    from whalepod.server.cluster.join_group import JoinedGroup

logger = logging.getLogger(__name__)


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
        self._transport = choose_transport(config, num_launchers=self._plan.num_launchers)
        self._local = LocalRanks(
            config, self._plan, self._transport, module=module, stop_grace_s=stop_grace_s
        )
        self._sockets: list[EngineSocket] = []
        self._losses = [Losses(f"rank {rank}") for rank in range(self.num_ranks)]
        self._joined: JoinedGroup | None = None
        self._is_stopping = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._close_sockets)
            stack.enter_context(self._local)
            self._memberships = FolderStore(self.folder)
            if self._plan.is_spread:
                from whalepod.server.cluster.join_group import join_group  # brings torch with it

                assert self._checkpoint is not None, "several machines compare their checkpoints"
                self._joined = stack.enter_context(
                    join_group(self._config, self._plan, self._checkpoint, self._local)
                )
            for rank in range(self.num_ranks):
                self._sockets.append(self._listen(rank))
                self._start(rank)
            wait_until_ready(self._sockets, self._start_timeout_s, lambda: self._why_stop)
            self._prepare_spare()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _listen(self, rank: int) -> EngineSocket:
        """Listen for a rank: at a socket file, or at a port if it is on another machine."""
        if rank in self._plan.ranks:
            address = f"ipc://{self.folder}/rank{rank}.{self._local.num_lives(rank)}"
        else:
            host = self._local.address
            address = f"tcp://{f'[{host}]' if ':' in host else host}:*"
        return EngineSocket(
            f"rank {rank}", address, lambda: self._exit_reason(rank), prefix=f"rank {rank}: "
        )

    def _start(self, rank: int) -> None:
        """Start a rank, or tell its machine where the gateway listens for it."""
        address = self._sockets[rank].address
        if rank in self._plan.ranks:
            self._local.start(rank, address, self._memberships.newest())
        elif self._joined is not None:
            self._joined.give_address(rank, address)

    def _prepare_spare(self) -> None:
        if can_return(self._transport):
            self._local.prepare_spare()

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
        return [socket.info for socket in self._sockets]

    @property
    def is_told_to_stop(self) -> bool:
        """Return whether to take no more requests: a machine asks for it, or the group ended."""
        return self._joined is not None and self._why_stop is not None

    @property
    def failure(self) -> str | None:
        """Return why the group has ended, unless it was asked to; None while it goes on."""
        end = self._joined.end if self._joined is not None else None
        return end.reason if end is not None and end.code else None

    def pid(self, rank: int) -> int:
        """Return the process id of a rank of this machine."""
        return self._local.pid(rank)

    def channel(self) -> RankRouter:
        """Return the gateway's end, to be entered once."""
        return RankRouter(self)

    restarting_channel = channel

    def rank_channel(self, rank: int) -> EngineChannel:
        """Return the gateway's end of one rank's wire, to be entered once."""
        return self._sockets[rank].channel()

    def where(self, rank: int) -> str:
        """Return what a rank did last, or where that is logged."""
        if rank in self._plan.ranks or self._joined is None:
            return self._local.where(rank)
        return f"the log of {self._joined.describe(rank)} says where"

    # -- lost ranks -----------------------------------------------------------------------------

    def _exit_reason(self, rank: int) -> str | None:
        """Return how a rank has ended; None while it lives. Opens no file."""
        if self._joined is None:
            return self._local.exit_reason(rank)
        if self._joined.end is not None:
            return self._joined.end.reason
        if self._sockets[rank].cut_for_s() > LAST_WORDS_S:
            return f"the connection to {self._joined.describe(rank)} is cut"
        return None

    def why_lost(self, rank: int) -> str | None:
        """Return why a rank belongs to the group no longer; None while it does."""
        reason = self._exit_reason(rank)
        if reason is not None or self._joined is not None:
            return reason
        if rank not in self._memberships.newest().members:
            return f"the other ranks went on without rank {rank}: {self.where(rank)}"
        return None

    def remove(self, rank: int, reason: str) -> None:
        """End a lost rank's process and tell the others; or end a group to which none returns."""
        if self._joined is not None:
            self._joined.lose(rank, reason)
            return
        self._local.kill(rank)
        self._remove_member(rank)

    def _remove_member(self, rank: int) -> None:
        self._memberships.remove(frozenset({rank}))
        self._local.wake()

    def replace_rank(self, rank: int) -> None:
        """Start a rank that was removed again; returns when the group is whole.

        Raises GroupLost, one sentence, when the rank cannot come back; any other error may be gone
        at the next try.
        """
        if self.failure is not None:
            raise GroupLost(self.failure)
        if not can_return(self._transport):
            raise GroupLost(
                f"rank {rank} cannot be replaced: over {self._transport} a lost rank cannot come "
                "back: start the group again"
            )
        self._losses[rank].count()
        self._local.stop(rank)
        self._sockets[rank].close()
        self._sockets[rank] = self._listen(rank)
        self._start(rank)
        try:
            wait_until_ready([self._sockets[rank]], self._start_timeout_s, lambda: self._why_stop)
        except StartupError:
            self._remove_member(rank)  # it may have joined
            raise
        self._prepare_spare()

    def stop_replacing(self) -> None:
        """End a `replace_rank` that runs in another thread, soon."""
        self._is_stopping = True

    @property
    def _why_stop(self) -> str | None:
        """Return why to wait for no rank any more; None: wait."""
        if self._joined is not None:
            return self._joined.end.reason if self._joined.end else self._joined.asked_to_stop
        return "the group is stopping" if self._is_stopping else None


def add_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return what all ranks can do together."""
    return replace(
        infos[0],
        num_blocks=sum(info.num_blocks for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
        num_ranks=len(infos),
    )
