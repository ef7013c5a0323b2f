"""Starts the ranks of a group on this machine, notices those that are lost, and starts them again.

The launcher owns all that ranks share: memfds, events and a private folder. It never computes.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from whalepod.server.choose_transport import can_return, choose_transport
from whalepod.server.cluster.membership_store import FolderStore, change
from whalepod.server.cluster.progress_board import ProgressBoard
from whalepod.server.cluster.rank_assignment import (
    EventFds,
    RankAssignment,
    RankConfig,
    new_event_fds,
)
from whalepod.server.cluster.router import RankRouter
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig
from whalepod.server.engine_launcher import (
    START_TIMEOUT_S,
    STOP_GRACE_S,
    EngineProcess,
    available_cores,
)
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineInfo

RANK_MODULE = "whalepod.server.cluster.rank_process"
MAX_RESTARTS = 5
RESTARTS_COUNT_S = 600.0
"""A rank that was lost so often in so long is not started again."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """A rank's process, and when earlier ones were lost."""

    process: EngineProcess
    lost_at: list[float] = field(default_factory=list)


class RankGroup:
    """All ranks of one model on this machine, for the time of a `with` block.

    Entering waits until the group can serve and raises StartupError, one sentence that names the
    rank, when it cannot. A rank that is lost later is replaced by `replace_rank`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        module: str = RANK_MODULE,
    ) -> None:
        self.num_ranks = config.parallel.expert_parallel_size
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._module = module
        self._cores = share_cores(self.num_ranks)
        config = settle_threads(config, self._cores)
        self._config = config
        self._transport = choose_transport(config, num_launchers=1)
        self._places: list[_Place] = []
        self._is_stopping = False

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="whalepod-"))  # 0700
        self._heaps = tuple([_new_memfd(rank) for rank in range(self.num_ranks)])
        self._event_fds = new_event_fds(self.num_ranks)
        self._events = EventFds(self._event_fds)
        self._store = FolderStore(self._folder)
        self.board = ProgressBoard(self._folder, self.num_ranks)
        try:
            for rank in range(self.num_ranks):
                self._places.append(_Place(self._new_process(rank)))
                self._places[rank].process.start()
            for rank, place in enumerate(self._places):
                self._wait_for(rank, place.process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def info(self) -> EngineInfo:
        """What the group can do; caches and requests of all ranks together."""
        return add_infos(self.infos)

    @property
    def infos(self) -> Sequence[EngineInfo]:
        """What each rank said when it became ready."""
        return [place.process.info for place in self._places]

    def process(self, rank: int) -> EngineProcess:
        """Return the rank's present process."""
        return self._places[rank].process

    def channel(self) -> RankRouter:
        """Return the gateway's end, to be entered once."""
        return RankRouter(self)

    # -- lost ranks -----------------------------------------------------------------------------

    def why_lost(self, rank: int) -> str | None:
        """Say why a rank has to be replaced; None while it belongs to the group."""
        reason = self._places[rank].process.exit_reason()
        if reason is not None:
            return reason
        if rank not in self._store.newest().members:
            return f"the other ranks went on without rank {rank}: {self.where(rank)}"
        return None

    def where(self, rank: int) -> str:
        """Say what a rank did last."""
        progress = self.board.read(rank)
        return "it has not begun" if progress is None else f"it is in {progress}"

    def take_out(self, rank: int, reason: str) -> None:
        """End a lost rank for good and tell the others, so that nobody waits for it."""
        self._places[rank].process.kill()
        self._take_from_members(rank)

    def _take_from_members(self, rank: int) -> None:
        change(
            self._store,
            lambda newest: newest.without(frozenset({rank})) if rank in newest.members else None,
        )
        self._events.set_others()

    def replace_rank(self, rank: int) -> EngineProcess:
        """Start a rank that was taken out again; returns when the group is whole.

        Raises StartupError when it was lost too often, this time included.
        """
        place = self._places[rank]
        if not can_return(self._transport):
            raise StartupError(
                f"over {self._transport} a lost rank cannot come back: start the group again"
            )
        while not self._is_stopping:
            now = time.monotonic()
            place.lost_at = [t for t in place.lost_at if now - t < RESTARTS_COUNT_S] + [now]
            if len(place.lost_at) > MAX_RESTARTS:
                raise StartupError(
                    f"rank {rank} was lost {len(place.lost_at)} times in {RESTARTS_COUNT_S:.0f} s"
                )
            place.process.stop()
            place.process = self._new_process(rank)
            try:
                place.process.start()
                place.process.wait_until_ready(self._why_stop)
            except StartupError as error:
                logger.error("rank %d did not come up again: %s", rank, error)
                self._take_from_members(rank)
            else:
                return place.process
        raise StartupError("the group is stopping")

    def stop_replacing(self) -> None:
        """End a `replace_rank` that runs in another thread, soon."""
        self._is_stopping = True

    def _why_stop(self) -> str | None:
        return "the group is stopping" if self._is_stopping else None

    # -- processes ------------------------------------------------------------------------------

    def _new_process(self, rank: int) -> EngineProcess:
        assignment = RankAssignment(
            rank=rank,
            num_ranks=self.num_ranks,
            transport=self._transport,
            ranks_per_node=self.num_ranks,
            folder=str(self._folder),
            heap_fds=self._heaps,
            event_fds=self._event_fds,
            event_index=rank,
            cores=self._cores[rank],
        )
        return EngineProcess(
            self._config,
            start_timeout_s=self._start_timeout_s,
            stop_grace_s=self._stop_grace_s,
            module=self._module,
            name=f"rank {rank}'s",
            payload=encode_value(RankConfig(assignment=assignment, engine=self._config)),
            pass_fds=(*self._heaps, *self._event_fds),
            shared_folder=self._folder,
        )

    def _wait_for(self, rank: int, process: EngineProcess) -> None:
        """Wait for one rank; if another one ends meanwhile, say so instead of waiting for ever."""
        with naming(rank):
            process.wait_until_ready(lambda: self._exit_but(rank))

    def _exit_but(self, rank: int) -> str | None:
        """Say which other rank has ended, and why."""
        for other, place in enumerate(self._places):
            if other != rank and (reason := place.process.exit_reason()) is not None:
                words = place.process.startup_error()
                return f"rank {other}: {words}" if words else f"{reason} before it was ready"
        return None

    def stop(self) -> None:
        """End all ranks and give back what they shared."""
        for place in self._places:
            place.process.terminate()
        for place in self._places:
            place.process.stop()
        self.board.close()
        for descriptor in (*self._heaps, *self._event_fds):
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)


def _new_memfd(rank: int) -> int:
    return os.memfd_create(f"whalepod-heap-{rank}", os.MFD_CLOEXEC)


@contextmanager
def naming(rank: int) -> Iterator[None]:
    """Let a StartupError say which rank it comes from."""
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


def share_cores(num_ranks: int) -> list[tuple[int, ...]]:
    """Give each rank of a machine cores of its own; none are named where there are too few."""
    if not hasattr(os, "sched_getaffinity") or available_cores() < num_ranks:
        return [()] * num_ranks
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_ranks
    return [tuple(cores[rank * share : (rank + 1) * share]) for rank in range(num_ranks)]


def settle_threads(config: EngineConfig, cores: Sequence[tuple[int, ...]]) -> EngineConfig:
    """Let each rank use as many threads as it has cores, unless told otherwise."""
    if config.device.num_threads:
        return config
    return replace(config, device=replace(config.device, num_threads=max(len(cores[0]), 1)))
