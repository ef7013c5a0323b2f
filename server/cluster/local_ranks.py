"""The ranks that one of several launchers starts on its machine, and what they share there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.progress_board import ProgressBoard
from whalepod.server.cluster.rank_assignment import (
    RankAssignment,
    RankConfig,
    RendezvousInfo,
    new_event_fds,
)
from whalepod.server.cluster.rank_group import (
    RANK_MODULE,
    settle_threads,
    share_cores,
)
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.engine_launcher import STOP_GRACE_S, describe_exit, end, spawn

LAST_WORDS_S = 3.0
"""What a rank says about its own end reaches all machines within this time."""


class LocalRanks:
    """Processes of this launcher's ranks, for the time of a `with` block."""

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan,
        transport: TransportName,
        address: str,
        *,
        module: str = RANK_MODULE,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        """address: of this machine, as the others reach it."""
        self._plan = plan
        self._transport = transport
        self._address = address
        self._module = module
        self._stop_grace_s = stop_grace_s
        self._cores = share_cores(plan.ranks_per_node)
        self._config = settle_threads(config, self._cores)
        self._ended_at: float | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="whalepod-"))  # 0700
        self._events = new_event_fds(self._plan.num_local)
        self._board = ProgressBoard(self.folder, self._plan.num_ranks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            end(process, self._stop_grace_s)
        self._board.close()
        for descriptor in self._events:
            os.close(descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, addresses: Mapping[int, str]) -> None:
        """Start all ranks; each connects to the gateway's address for it."""
        for rank in self._plan.ranks:
            payload = RankConfig(assignment=self._new_assignment(rank), engine=self._config)
            self._processes[rank] = spawn(
                self._module,
                addresses[rank],
                encode_value(payload),
                num_threads=self._config.device.num_threads,
                pass_fds=self._events,
                shared_folder=self.folder,
            )

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def why_ended(self) -> str | None:
        """Say which rank has ended; None while all live.

        One that ends by itself has told the gateway why, and its word is to come before this one.
        """
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        for rank, code in codes.items():
            if code is None:
                continue
            self._ended_at = self._ended_at or time.monotonic()
            if code < 0 or time.monotonic() - self._ended_at > LAST_WORDS_S:
                return f"rank {rank}'s process on {self._address} {describe_exit(code)}"
        return None

    def where(self, rank: int) -> str:
        """Say what a rank did last."""
        progress = self._board.read(rank)
        return "it has not begun" if progress is None else f"it is in {progress}"

    def _new_assignment(self, rank: int) -> RankAssignment:
        plan = self._plan
        return RankAssignment(
            rank=rank,
            num_ranks=plan.num_ranks,
            transport=self._transport,
            ranks_per_node=plan.ranks_per_node,
            folder=str(self.folder),
            event_fds=self._events,
            event_index=rank - plan.first_rank,
            rendezvous=RendezvousInfo(
                host=plan.address,
                port=plan.port,
                attempt=plan.attempt,
                address=self._address,
                timeout_s=plan.timeout_s,
            ),
            cores=self._cores[rank % plan.ranks_per_node],
        )
