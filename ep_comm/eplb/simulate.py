"""What a placement policy would have done to loads that were recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whalepod.ep_comm.eplb.placement import Slots, balancedness
from whalepod.ep_comm.eplb.plan import plan_placement
from whalepod.ep_comm.eplb.policy import Floats, Ints, rebalance_experts
from whalepod.ep_comm.eplb.trace import TraceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """When and how experts are placed again.

    window           records whose loads a plan looks at
    interval         records between two plans; 0: the first placement stays
    min_gain         see `plan_placement`
    keeps_slots      False: the published placement as it is, whatever it moves
    """

    window: int = 1
    interval: int = 1
    min_gain: float = 0.0
    keeps_slots: bool = True

    def __post_init__(self) -> None:
        if self.window < 1 or self.interval < 0:
            raise ValueError(
                f"window ({self.window}) must be at least 1, interval ({self.interval}) 0 or more"
            )


class SimulatedRecord(NamedTuple):
    """One record under the placement that was there when its tokens came.

    balancedness_L  `[L]`
    num_moved       slots that changed content before it, of all layers
    phy2log_LP      the placement
    """

    step: int
    balancedness_L: Floats
    num_moved: int
    phy2log_LP: Ints


def simulate(
    records: Iterable[TraceRecord], slots: Slots, config: SimulationConfig
) -> Iterator[SimulatedRecord]:
    """Replay loads: each record is judged by a placement made from records before it only."""
    current_LP: Ints | None = None
    recent: deque[Ints] = deque(maxlen=config.window)
    for number, record in enumerate(records):
        if current_LP is None:
            current_LP = np.tile(slots.first(), (len(record.loads_LE), 1))
        num_moved = 0
        if recent and config.interval and number % config.interval == 0:
            planned_LP = _plan(current_LP, np.sum(recent, axis=0), slots, config)
            num_moved = int((planned_LP != current_LP).sum())
            current_LP = planned_LP
        balance_L = balancedness(current_LP, record.loads_LE, slots.num_ranks)
        yield SimulatedRecord(record.step, balance_L, num_moved, current_LP)
        recent.append(record.loads_LE)


def _plan(current_LP: Ints, load_LE: Ints, slots: Slots, config: SimulationConfig) -> Ints:
    if config.keeps_slots:
        return plan_placement(current_LP, load_LE, slots, min_gain=config.min_gain)
    sizes = slots.num_physical, slots.num_groups, slots.num_nodes, slots.num_ranks
    return rebalance_experts(load_LE, *sizes).phy2log_LP
