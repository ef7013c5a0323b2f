"""Limits of one engine's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: Annotated[int, "sequences that run at once"] = 64
    max_num_batched_tokens: Annotated[int, "prompt and decode tokens of one step together"] = 512
    max_model_len: Annotated[
        int, "tokens of prompt and answer together; 0: as long as the model allows"
    ] = 0
    max_num_queued_reqs: Annotated[int, "requests that wait; one more is refused with a 429"] = 1024
    enable_prefix_caching: Annotated[bool, "share the blocks of equal prefixes"] = True
    reserve_output_tokens: Annotated[
        int,
        "tokens of each answer that admission keeps room for, so that few requests are preempted",
    ] = 0
    max_admission_skips: Annotated[
        int, "times that a waiting request may be overtaken by one with a longer cached prefix"
    ] = 16

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 0),
            ("reserve_output_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must give one token to "
                f"each of max_num_seqs ({self.max_num_seqs}); raise one or lower the other"
            )
