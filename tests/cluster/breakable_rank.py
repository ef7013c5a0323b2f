"""A rank's process that breaks where a file in the group's folder tells it to.

The file `mishap` holds "rank operation action"; the rank named there removes it and acts, once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from whalepod.ep_comm.dispatcher import OnProgress
from whalepod.server.channel import EngineServer
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.cluster.rank_process import exit_at_once, open_rank
from whalepod.server.codec import decode_value
from whalepod.server.engine_process import ServedEngine, main_of


def breakable(note: OnProgress, rank: int, folder: Path) -> OnProgress:
    def act(layer: str, operation: str) -> None:
        note(layer, operation)
        if not operation:
            return
        try:
            wanted, place, action = (folder / "mishap").read_text().split("|")
        except FileNotFoundError:  # none is wanted, or the other rank has taken it
            return
        if int(wanted) == rank and place == operation:
            (folder / "mishap").unlink()
            if action == "raise":
                raise RuntimeError("a bug")
            os.kill(os.getpid(), getattr(signal, action))

    return act


def open_breakable(
    data: bytes, server: EngineServer, should_stop: Callable[[], bool]
) -> ServedEngine:
    assignment = decode_value(RankAssignment, data)
    return open_rank(
        data,
        server,
        should_stop,
        lambda note: breakable(note, assignment.rank, Path(assignment.folder)),
    )


if __name__ == "__main__":
    exit_at_once(main_of(sys.argv[1:], open_breakable, "rank"))
