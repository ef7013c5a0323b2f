"""Numbers that others may read."""

from __future__ import annotations

from dataclasses import dataclass


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
