"""One rank's process: `python -m whalepod.server.cluster.rank_process` (see `local_ranks.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from whalepod.server.channel import EngineServer
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.codec import decode_value
from whalepod.server.engine_launcher import START_TIMEOUT_S
from whalepod.server.engine_process import ServedEngine, main_of

if TYPE_CHECKING:
    from whalepod.ep_comm.dispatcher import OnProgress


def open_rank(
    data: bytes,
    server: EngineServer,
    should_stop: Callable[[], bool],
    wrap_note: Callable[[OnProgress], OnProgress] = lambda note: note,
) -> ServedEngine:
    """Build the rank that the launcher describes; return when all ranks of its group are ready."""
    assignment = decode_value(RankAssignment, data)
    if assignment.cores:
        os.sched_setaffinity(0, assignment.cores)
    from whalepod.server.cluster.build_rank import build_rank  # brings torch with it

    engine = build_rank(assignment, should_stop, wrap_note)
    engine.join(should_stop, START_TIMEOUT_S)
    server.wake_on(assignment.events.own_descriptor)
    return engine


def exit_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads: some are inside of libraries for good."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_at_once(main_of(sys.argv[1:], open_rank, "rank"))
