"""The ranks that one launcher starts on its machine, and what they share there."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Self

from whalepod.server.cluster.membership_store import Membership
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.progress_board import ProgressBoard
from whalepod.server.cluster.rank_assignment import EventFds, RankAssignment
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.engine_launcher import (
    STOP_GRACE_S,
    assign,
    available_cores,
    describe_exit,
    end_all,
    private_folder,
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

    address  of this machine, as others reach it; "" if all ranks are started here
    """

    address = ""

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan,
        transport: TransportName,
        *,
        module: str = RANK_MODULE,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._plan = plan
        self.transport: TransportName = transport
        self._module = module
        self._stop_grace_s = stop_grace_s
        self._cores = share_cores(plan.ranks_per_node)
        self._config = settle_threads(config, self._cores)
        self._num_lives: Counter[int] = Counter()
        self._ended_at: float | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._spare: subprocess.Popen[bytes] | None = None
        self._spare_lock = threading.Lock()

    def __enter__(self) -> Self:
        plan = self._plan
        with ExitStack() as stack:
            self.folder = stack.enter_context(private_folder())
            num_heaps = plan.num_ranks if self.transport == "shm" else 0
            self._heap_fds = tuple([_new_memfd(rank, stack) for rank in range(num_heaps)])
            self._event_fds = tuple([_new_event_fd(stack) for _ in plan.ranks])
            self._board = ProgressBoard(self.folder, plan.num_ranks)
            stack.callback(self._board.close)
            stack.callback(self._stop_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, rank: int, address: str, known: Membership | None = None) -> None:
        """Start a rank, which connects to the gateway's address for it.

        known  the newest membership, as far as the launcher knows
        """
        plan = self._plan
        assignment = RankAssignment(
            rank=rank,
            plan=plan,
            transport=self.transport,
            folder=str(self.folder),
            heap_fds=self._heap_fds,
            event_fds=self._event_fds,
            address=self.address,
            cores=self._cores[rank % plan.ranks_per_node],
            life=self._num_lives[rank],
            epoch=known.epoch if known else 0,
            members=tuple(sorted(known.members)) if known else (),
            engine=self._config,
        )
        self._num_lives[rank] += 1
        self._processes[rank] = process = self._take_spare() or self._spawn()
        assign(process, address, encode_value(assignment))

    def prepare_spare(self) -> None:
        """Start a process that imports what a rank needs and waits: a rank that is lost is replaced
        in the time that its weights take."""
        with self._spare_lock, suppress(OSError):  # there is no memory: ranks start without it
            if self._spare is None:
                self._spare = self._spawn(preload="whalepod.server.cluster.build_rank")

    def _take_spare(self) -> subprocess.Popen[bytes] | None:
        with self._spare_lock:
            spare, self._spare = self._spare, None
        if spare is None or spare.poll() is None:
            return spare
        end_all([spare], 0.0)
        return None

    def _spawn(self, preload: str = "") -> subprocess.Popen[bytes]:
        return spawn(
            self._module,
            self.folder,
            num_threads=self._config.device.num_threads,
            pass_fds=(*self._heap_fds, *self._event_fds),
            preload=preload,
        )

    def stop(self, rank: int) -> None:
        """End a rank: SIGTERM, after a grace SIGKILL."""
        end_all([self._processes[rank]], self._stop_grace_s)

    def kill(self, rank: int) -> None:
        """End a rank at once, whatever it does; does not wait until its memory is freed."""
        self._processes[rank].kill()

    def wake(self) -> None:
        """Wake all ranks that sleep."""
        EventFds(self._event_fds).set_others()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def num_lives(self, rank: int) -> int:
        """Return how often a rank was started."""
        return self._num_lives[rank]

    def exit_reason(self, rank: int) -> str | None:
        """Return how a rank's process has ended; None while it lives, or before it was started."""
        process = self._processes.get(rank)
        if process is None or (code := process.poll()) is None:
            return None
        place = f" on {self.address}" if self.address else ""
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
        return self._board.where(rank)

    def report(self) -> None:
        """Log what each rank did last."""
        for rank in self._plan.ranks:
            logger.error("rank %d: %s", rank, self.where(rank))

    def _stop_all(self) -> None:
        spares = [] if self._spare is None else [self._spare]
        end_all([*self._processes.values(), *spares], self._stop_grace_s)


def _new_memfd(rank: int, stack: ExitStack) -> int:
    """Make a heap, which `stack` closes; ranks that inherit it see the same memory."""
    descriptor = os.memfd_create(f"whalepod-heap-{rank}", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _new_event_fd(stack: ExitStack) -> int:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


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
