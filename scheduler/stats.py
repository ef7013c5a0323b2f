"""Counters of one engine, from the scheduler that counts to the gateway that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(slots=True, kw_only=True)
class Stats:
    """Gauges of this moment and counters since the start.

    The scheduler counts in one of its own. Everyone else has a copy (`replace`), to which the
    engine adds what it alone knows.
    """

    num_running: int = 0
    num_waiting: int = 0
    """Sequences that wait for a slot; of an engine, also requests that wait for a grammar."""
    num_compiling: int = 0
    """Those of `num_waiting` whose grammars are being compiled."""
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_owned_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries_tokens: int = 0
    prefix_cache_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_time_us: int = 0
    num_step_tokens: int = 0
    num_drafts: int = 0
    """Rows that had drafts to verify."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    """How often the first, second, ... draft of a row was right and all before it were."""
    num_speculative_tokens: int = 0
    """Drafts that each row of the last step was asked for."""
    waited_ms: tuple[int, ...] = ()
    """For each rank of the group, how long this one has waited for it."""

    num_expert_slots_changed: int = 0
    """Slots of this rank that another expert moved into."""
    expert_bytes_sent: int = 0
    """Of experts, to other ranks."""
    num_expert_plans: int = 0
    num_expert_failures: int = 0
    """Moves that were given up."""
    expert_balance_ppm: int = 0
    """Mean over maximum load of the ranks under the last placement, in millionths."""

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one row, the first `num_accepted` of which were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        counts = [*self.num_accepted_by_position]
        counts += [0] * (num_drafts - len(counts))
        for position in range(num_accepted):
            counts[position] += 1
        self.num_accepted_by_position = tuple(counts)

    def copy(self) -> Stats:
        return replace(self)


def add_stats(stats: Sequence[Stats]) -> Stats:
    """Add counters and gauges of ranks up; times and depths are those of the largest."""
    totals: dict[str, Any] = {
        f.name: sum(getattr(one, f.name) for one in stats)
        for f in fields(Stats)
        if f.name not in _NOT_ADDED
    }
    by_position = [one.num_accepted_by_position for one in stats]
    depth = max(map(len, by_position), default=0)
    totals["num_accepted_by_position"] = tuple(
        [sum(counts[i] for counts in by_position if i < len(counts)) for i in range(depth)]
    )
    for name in _LARGEST:
        totals[name] = max([getattr(one, name) for one in stats], default=0)
    return Stats(**totals)


_LARGEST = (
    "step_time_us", "num_speculative_tokens", "num_expert_plans", "num_expert_failures",
    "expert_balance_ppm",
)  # fmt: skip
_NOT_ADDED = ("num_accepted_by_position", "waited_ms", *_LARGEST)
