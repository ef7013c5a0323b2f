"""The ranks that one launcher starts on its machine, and what they share there."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.progress_board import ProgressBoard
from whalepod.server.cluster.rank_assignment import (
    EventFds,
    RankAssignment,
    RankConfig,
    new_event_fds,
)
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.engine_launcher import (
    STOP_GRACE_S,
    available_cores,
    describe_exit,
    end,
    spawn,
)

RANK_MODULE = "whalepod.server.cluster.rank_process"
LAST_WORDS_S = 3.0
"""What a rank says about its own end reaches all machines within this time."""

logger = logging.getLogger(__name__)


class LocalRanks:
    """Processes of this launcher's ranks, for the time of a `with` block.

    The launcher owns all that they share: heaps (memfds), eventfds and the private `folder` of
    memberships, progress and sockets. It never computes.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan,
        transport: TransportName,
        *,
        address: str = "",
        module: str = RANK_MODULE,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        """address: of this machine, as others reach it; "" if all ranks are started here."""
        self._plan = plan
        self._transport = transport
        self._address = address
        self._module = module
        self._stop_grace_s = stop_grace_s
        self._cores = share_cores(plan.ranks_per_node)
        self._config = settle_threads(config, self._cores)
        self._num_lives: Counter[int] = Counter()
        self._ended_at: float | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        plan = self._plan
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="whalepod-"))  # 0700
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._lock_folder(stack)
            self._heap_fds: tuple[int, ...] = ()
            if self._transport == "shm":
                self._heap_fds = tuple([_new_memfd(rank) for rank in range(plan.num_ranks)])
            self._event_fds = new_event_fds(plan.num_local)
            for descriptor in (*self._heap_fds, *self._event_fds):
                stack.callback(os.close, descriptor)
            self.board = ProgressBoard(self.folder, plan.num_ranks)
            stack.callback(self.board.close)
            stack.callback(self._stop_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _lock_folder(self, stack: ExitStack) -> None:
        """Hold a lock that cleaners of /tmp respect: they would remove old memberships."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def start(self, rank: int, address: str) -> None:
        """Start a rank, which connects to the gateway's address for it."""
        payload = RankConfig(assignment=self._new_assignment(rank), engine=self._config)
        self._num_lives[rank] += 1
        self._processes[rank] = spawn(
            self._module,
            address,
            encode_value(payload),
            num_threads=self._config.device.num_threads,
            pass_fds=(*self._heap_fds, *self._event_fds),
            shared_folder=self.folder,
        )

    def stop(self, rank: int) -> None:
        """End a rank: SIGTERM, after a grace SIGKILL."""
        end(self._processes[rank], self._stop_grace_s)

    def kill(self, rank: int) -> None:
        """End a rank at once, whatever it does, and wait until it is gone."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def wake(self) -> None:
        """Wake all ranks that sleep."""
        EventFds(self._event_fds).set_others()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def num_lives(self, rank: int) -> int:
        """Return how often a rank was started."""
        return self._num_lives[rank]

    def exit_reason(self, rank: int) -> str | None:
        """Return how a rank's process has ended; None while it lives."""
        code = self._processes[rank].poll()
        if code is None:
            return None
        place = f" on {self._address}" if self._address else ""
        return f"rank {rank}'s process{place} {describe_exit(code)}"

    def why_ended(self) -> str | None:
        """Return which rank has ended, and how; None while all live.

        A rank that ends by itself has told the gateway why, and its message is to come first.
        """
        for rank, process in list(self._processes.items()):
            if (reason := self.exit_reason(rank)) is not None:
                self._ended_at = self._ended_at or time.monotonic()
                if process.returncode < 0 or time.monotonic() - self._ended_at > LAST_WORDS_S:
                    return reason
        return None

    def where(self, rank: int) -> str:
        """Return what a rank did last, for people."""
        progress = self.board.read(rank)
        return "it has not begun" if progress is None else f"it is in {progress}"

    def report(self) -> None:
        """Log what each rank did last."""
        for rank in self._plan.ranks:
            logger.error("rank %d: %s", rank, self.where(rank))

    def _new_assignment(self, rank: int) -> RankAssignment:
        plan = self._plan
        return RankAssignment(
            rank=rank,
            plan=plan,
            transport=self._transport,
            folder=str(self.folder),
            heap_fds=self._heap_fds,
            event_fds=self._event_fds,
            address=self._address,
            cores=self._cores[rank % plan.ranks_per_node],
            life=self._num_lives[rank],
        )

    def _stop_all(self) -> None:
        """End all ranks within one grace."""
        deadline = time.monotonic() + self._stop_grace_s
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            end(process, max(deadline - time.monotonic(), 0.0))


def _new_memfd(rank: int) -> int:
    return os.memfd_create(f"whalepod-heap-{rank}", os.MFD_CLOEXEC)


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
