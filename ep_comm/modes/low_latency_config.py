"""Sizes of the low-latency mode, and its parts of the heap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whalepod.ep_comm import layout
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.rows import RowDtype, RowFormat, staging_bytes

NUM_SETS = 2
"""Sets of buffers, used in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyConfig:
    """Sizes and formats; the same on all ranks.

    max_tokens       M, tokens that a rank may dispatch in one call
    dispatch_dtype   rows on the way to the experts; float8 is cast inside dispatch
    combine_dtype    rows on the way back
    round_scale      fp8 scales are powers of two
    ue8m0            fp8 scales are exponent bytes, four to an int32 (needs `round_scale`)
    column_major     the storage of the scales runs along the rows, as DeepGEMM wants it
    output           "per_expert": `[E_l, R * M, H]`. "packed": `[R * M * min(K, E_l), H]`, experts
                     one behind the other; smaller where a rank has many experts
    pre_reduce       an expert's rank adds up its rows of a token, weighted, and sends one. Fewer
                     bytes, other rounding; the weights then go with the dispatch
    """

    num_ranks: int
    num_experts: int
    num_choices: int
    hidden: int
    max_tokens: int
    dispatch_dtype: RowDtype = "bfloat16"
    combine_dtype: RowDtype = "bfloat16"
    round_scale: bool = False
    ue8m0: bool = False
    column_major: bool = False
    output: Literal["per_expert", "packed"] = "per_expert"
    pre_reduce: bool = False

    def __post_init__(self) -> None:
        layout.split_experts(self.num_experts, self.num_ranks)
        if not 1 <= self.num_choices <= self.num_experts:
            raise ValueError(
                f"num_choices ({self.num_choices}) must be in 1..num_experts ({self.num_experts})"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be at least 1")
        if self.combine_dtype == "float8":
            raise ValueError("combine_dtype float8 loses too much: use bfloat16 or float32")
        if self.ue8m0 and not (self.round_scale and self.dispatch_dtype == "float8"):
            raise ValueError("ue8m0 needs dispatch_dtype float8 and round_scale")
        _ = self.dispatch_format, self.combine_format

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def max_choices_per_rank(self) -> int:
        """Return how many experts of one rank a token can choose."""
        return min(self.num_choices, self.num_local)

    @property
    def rows_per_expert(self) -> int:
        """Return rows between experts in the output, 0 if they follow one another."""
        return self.num_ranks * self.max_tokens if self.output == "per_expert" else 0

    @property
    def num_output_rows(self) -> int:
        per_token = self.num_local if self.output == "per_expert" else self.max_choices_per_rank
        return self.num_ranks * self.max_tokens * per_token

    @property
    def combine_rows(self) -> int:
        """Return the most rows that one rank sends back to another."""
        return self.max_tokens * (1 if self.pre_reduce else self.max_choices_per_rank)

    @property
    def dispatch_format(self) -> RowFormat:
        return RowFormat(
            hidden=self.hidden,
            dtype=self.dispatch_dtype,
            num_ids=self.num_choices,
            num_weights=self.num_choices if self.pre_reduce else 0,
            ue8m0=self.ue8m0,
        )

    @property
    def combine_format(self) -> RowFormat:
        return RowFormat(hidden=self.hidden, dtype=self.combine_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyRegions:
    """The mode's parts of the heap. Every region has one writer per (set, rank)."""

    dispatch_words: Region
    combine_words: Region
    dispatch_rows: Region
    combine_rows: Region
    staging: Region


def carve(
    heap: HeapLayout, config: LowLatencyConfig, name: str = "low_latency"
) -> LowLatencyRegions:
    """Reserve what the mode needs, the same on every rank."""
    ranks, sets = config.num_ranks, NUM_SETS * config.num_ranks
    dispatch_bytes = config.max_tokens * config.dispatch_format.num_bytes
    combine_bytes = config.combine_rows * config.combine_format.num_bytes
    return LowLatencyRegions(
        dispatch_words=heap.take_signals(f"{name}.dispatch_words", sets),
        combine_words=heap.take_signals(f"{name}.combine_words", sets),
        dispatch_rows=heap.take(f"{name}.dispatch_rows", sets * dispatch_bytes),
        combine_rows=heap.take(f"{name}.combine_rows", sets * combine_bytes),
        staging=heap.take(
            f"{name}.staging", staging_bytes([max(dispatch_bytes, combine_bytes)] * ranks)
        ),
    )
