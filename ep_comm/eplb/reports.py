"""What a rank tells the others of its experts before a step, and what people may see."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from whalepod.ep_comm.eplb.policy import Ints

MAX_PLANS_KEPT = 64


class Phase(IntEnum):
    """What a rank is at."""

    IDLE = 0
    MOVING = 1
    STAGED = 2
    """Its part of the layer that moves is there, and checked."""
    FAILED = 3
    """Its part went wrong: all forget the move."""
    LOADING = 4
    """It reads experts of lost ranks: no step before that is done."""


class Report(NamedTuple):
    """What a rank tells all others before a step.

    digest     of where all experts lie and what moves: equal on all ranks, or nothing moves
    is_asking  it wants experts to be placed now
    """

    phase: int = Phase.IDLE
    digest: int = 0
    is_asking: int = 0


NOTHING_MOVES = Report()


def agree(reports: Iterable[Report]) -> bool:
    """Return whether all ranks know the same of where experts are and go."""
    return len({report.digest for report in reports}) == 1


class Moved(NamedTuple):
    """An expert that has come to a rank, from its replica on another one or the same."""

    layer: int
    expert: int
    source: int
    target: int


class PlanRecord(NamedTuple):
    """One plan: the step, mean balancedness of all layers before and after, slots to change."""

    step: int
    before: float
    after: float
    num_changes: int


@dataclass(slots=True)
class BalancerStats:
    """What is counted since the start; slots and bytes are this rank's alone.

    loads_LE  tokens of each expert of all ranks in the last window that was gathered, `[L, E]`
    plans     the last ones, newest last
    moved     of the last plan; ranks
    """

    num_plans: int = 0
    num_swaps: int = 0
    most_swapped: int = 0
    num_slots_changed: int = 0
    num_failures: int = 0
    num_loaded: int = 0
    bytes_sent: int = 0
    most_step_bytes: int = 0
    stall_ms: float = 0.0
    loads_LE: Ints | None = None
    moved: list[Moved] = field(default_factory=list)
    plans: deque[PlanRecord] = field(default_factory=lambda: deque(maxlen=MAX_PLANS_KEPT))
