"""When experts move, and how much at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

ReplicaChoice: TypeAlias = Literal["nearest", "hashed", "least-loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerConfig:
    """The same on all ranks.

    window_steps    steps whose loads a placement is made for
    interval_steps  steps between two placements
    min_gain        by how much the balancedness of a layer must rise for it to change
    step_bytes      the most that a rank stages before a step, sent and received together; a swap
                    copies as much at once, but a whole slot at least
    choice          which replica serves a token, see `dispatch_map.new_table`
    """

    window_steps: int = 1000
    interval_steps: int = 3000
    min_gain: float = 0.05
    step_bytes: int = 8 << 20
    choice: ReplicaChoice = "least-loaded"
