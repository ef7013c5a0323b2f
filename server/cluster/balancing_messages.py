"""What a rank tells the gateway of its experts, and hears."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from whalepod.ep_comm.eplb.balancer import ExpertBalancer
from whalepod.scheduler.stats import Stats
from whalepod.server.messages import Experts, PlaceExperts

MAX_MOVED = 1000
"""Moves that people are told of at a time."""

logger = logging.getLogger(__name__)


class BalancingMessages:
    """Speaks for a rank's balancer; None: experts do not move, and there is nothing to say."""

    def __init__(self, balancer: ExpertBalancer | None) -> None:
        self._balancer = balancer
        self._told = 0

    def place(self, message: PlaceExperts) -> None:
        """Have experts placed before the next step. A placement that does not fit is logged."""
        if self._balancer is None:
            logger.error("experts do not move: start with --enable-eplb")
            return
        try:
            wanted = np.array(message.slots, np.int64) if message.slots else None
            self._balancer.ask(wanted)
        except ValueError as error:
            logger.error("experts stay where they are: %s", error)

    def add_to(self, stats: Stats) -> Stats:
        """Add what the balancer counts."""
        if self._balancer is None:
            return stats
        own = self._balancer.stats
        balance = own.plans[-1].after if own.plans else 0.0
        return replace(
            stats,
            num_expert_slots_changed=own.num_slots_changed,
            expert_bytes_sent=own.bytes_sent,
            num_expert_plans=own.num_plans,
            num_expert_failures=own.num_failures,
            expert_balance_ppm=round(1e6 * balance),
        )

    def news(self, *, is_speaker: bool) -> Experts | None:
        """Return what has changed since the last call; only one rank of a group speaks."""
        balancer = self._balancer
        if balancer is None or not is_speaker or balancer.version == self._told:
            return None
        self._told = balancer.version
        loads_LE = balancer.stats.loads_LE
        if loads_LE is None:
            loads_LE = np.zeros((len(balancer.layers), balancer.slots.num_experts), np.int64)
        return Experts(
            num_ranks=balancer.slots.num_ranks,
            slots=_rows(balancer.contents_LP),
            tokens=_rows(loads_LE),
            moved=tuple(
                (m.layer, m.expert, m.source, m.target) for m in balancer.stats.moved[:MAX_MOVED]
            ),
            plans=tuple((p.step, p.before, p.after, p.num_changes) for p in balancer.stats.plans),
        )


def _rows(values: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, values.tolist()))
