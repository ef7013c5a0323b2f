"""`whalepod worker`: the ranks of a machine that does not serve HTTP itself."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from whalepod.server.choices import choose_transport
from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.join_group import join_group
from whalepod.server.cluster.local_ranks import LocalRanks
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig
from whalepod.server.errors import GroupLost

POLL_S = 0.1
logger = logging.getLogger(__name__)


def run_worker(
    config: EngineConfig, plan: NodePlan, checkpoint: Path, stop: threading.Event
) -> None:
    """Start this machine's ranks and stay until the group ends; `stop` asks for that.

    Returns when a machine was told to stop. Raises StartupError and GroupLost, one sentence.
    """

    def why_stop() -> str | None:
        return "told to stop" if stop.is_set() else None

    transport = choose_transport(config, num_launchers=plan.num_launchers)
    with (
        join_group(config, plan, transport, checkpoint, why_stop) as joined,
        LocalRanks(config, plan, transport, address=joined.address) as local,
        joined.following(local),
    ):
        deadline = Deadline(plan.timeout_s, why_stop)
        for rank in plan.ranks:
            local.start(rank, joined.wait_for_address(rank, deadline))
        has_asked = False
        while (end := joined.end) is None:
            if stop.is_set() and not has_asked:
                joined.ask_to_stop()
                has_asked = True
            time.sleep(POLL_S)
    if end.code:
        raise GroupLost(end.reason)
    logger.info("%s", end.reason)
