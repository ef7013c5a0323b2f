"""Numbers that others may read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges of this moment and counters since the start."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_owned_blocks: int
    num_quarantined_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    prompt_tokens: int
    generation_tokens: int
    num_step_tokens: int
    step_time_us: int
    num_drafts: int
    """Rows that had guesses to verify."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_by_position: tuple[int, ...]
    """How often the first, second, ... guess of a row was right and all before it were."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """What the scheduler counts from its start, and the size and time of its last step."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries_tokens: int = 0
    prefix_cache_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_step_tokens: int = 0
    step_time_us: int = 0
    clock_us: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the guesses of one row, the first `num_accepted` of which were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        by_position = self.num_accepted_by_position
        by_position += [0] * (num_drafts - len(by_position))
        for position in range(num_accepted):
            by_position[position] += 1
