"""`whalepod worker`: the ranks of a machine that does not serve HTTP itself."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from whalepod.server.cluster.launcher import Party, met
from whalepod.server.cluster.local_ranks import LocalRanks
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.rendezvous import (
    BEAT_S,
    End,
    NodeWatch,
    ask_to_stop,
    end_group,
    leave,
    wait_for_address,
)
from whalepod.server.cluster.waiting import Waiting
from whalepod.server.config import EngineConfig
from whalepod.server.errors import GroupLost

logger = logging.getLogger(__name__)


def run_worker(config: EngineConfig, plan: NodePlan, folder: Path, stop: threading.Event) -> None:
    """Start this machine's ranks and stay until the group ends; `stop` asks for that.

    Returns when somebody asked for the end. Raises StartupError and GroupLost, one sentence.
    """

    def why_stop() -> str | None:
        return "told to stop" if stop.is_set() else None

    with met(config, plan, folder, why_stop) as party:
        local = LocalRanks(config, plan, party.transport, party.store.address)
        watch = NodeWatch(party.store, plan, party.roster)
        with local:
            waiting = Waiting(plan.timeout_s, why_stop)
            local.start({r: wait_for_address(party.store, r, waiting) for r in plan.ranks})
            end = _stay(party, local, watch, stop)
            if end.code:
                for rank in plan.ranks:
                    logger.error("rank %d: %s", rank, local.where(rank))
    if end.code:
        raise GroupLost(end.reason)
    logger.info("%s", end.reason)


def _stay(party: Party, local: LocalRanks, watch: NodeWatch, stop: threading.Event) -> End:
    """Return how the group ended."""
    has_asked = False
    names = party.roster.name(list(party.plan.ranks))
    while True:
        end = watch.look()
        if end is not None:
            leave(party.store, party.plan)
            return end
        if stop.is_set() and not has_asked:
            # machine 0 may have been told, too, and needs these ranks while it drains
            ask_to_stop(party.store, f"the machine of {names} was told to stop")
            has_asked = True
        if (reason := local.why_ended()) is not None:
            end_group(party.store, End(1, reason))
        time.sleep(BEAT_S / 2)
