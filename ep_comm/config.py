"""Sizes and formats of one exchange of rows, and its parts of the symmetric heap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import FIRST_ABORT
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.rows import RowDtype, RowFormat
from whalepod.ep_comm.slots import RecvSlots, staging_bytes
from whalepod.ep_comm.transport.interface import Topology

RowLayout = Literal["per_expert", "packed", "per_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """The same on all ranks.

    max_tokens       M, tokens that a rank may dispatch in one call
    chunk_tokens     "per_token": tokens of a rank under way at a time, None: all of a call
    ranks_per_node   "per_token": with several nodes a token travels once to each that it hits, and
                     is passed on there; None: all ranks reach each other alike
    dispatch_dtype   rows on the way to the experts; float8 is cast inside dispatch
    combine_dtype    rows on the way back
    layout           what the experts of a rank get, and with it where sums are made:
                     "per_expert": `[E_l, R * M, H]` and "packed": `[R * M * min(K, E_l), H]` have a
                     row per (token, expert); rows come back one by one, to be weighted and added by
                     the token's rank. "per_token": `[N, H]` has a row per (token, rank), weights go
                     with it, and the experts' rank adds up. Fewer bytes, another order of sums.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    chunk_tokens: int | None = None
    ranks_per_node: int | None = None
    dispatch_dtype: RowDtype = "bfloat16"
    combine_dtype: RowDtype = "bfloat16"
    layout: RowLayout = "per_expert"

    def __post_init__(self) -> None:
        layout.split_experts(self.num_experts, self.num_ranks)
        if self.combine_dtype == "float8":
            raise ValueError("combine_dtype float8 loses too much: use bfloat16 or float32")
        _ = self.topology, self.dispatch_format, self.combine_format
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be in 1..num_experts ({self.num_experts})")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be at least 1")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens ({self.chunk_tokens}) must be at least 1")
        if self.max_returned >= FIRST_ABORT:
            raise ValueError(
                f"{self.max_returned} rows for one rank are more than a signal can count "
                f"({FIRST_ABORT - 1}): lower max_tokens ({self.max_tokens})"
            )
        if self.is_by_expert and (self.max_chunks > 1 or self.topology.num_nodes > 1):
            raise ValueError(
                f"layout {self.layout} takes all tokens of a call at once and sends them directly: "
                f"leave out chunk_tokens ({self.chunk_tokens}) and ranks_per_node "
                f"({self.ranks_per_node}), or choose layout per_token"
            )

    @property
    def topology(self) -> Topology:
        return Topology(self.num_ranks, self.ranks_per_node or self.num_ranks)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def is_by_expert(self) -> bool:
        """Return whether the experts get a row per (token, expert)."""
        return self.layout != "per_token"

    @property
    def max_records(self) -> int:
        """Return the most tokens that one rank sends to another at a time."""
        return min(self.chunk_tokens or self.max_tokens, self.max_tokens)

    @property
    def max_chunks(self) -> int:
        return -(-self.max_tokens // self.max_records)

    @property
    def max_returned(self) -> int:
        """Return the most rows that one rank sends back to another at a time."""
        return self.max_records * (min(self.top_k, self.num_local) if self.is_by_expert else 1)

    @property
    def rows_per_expert(self) -> int:
        """Return rows between experts in the output, 0 if they follow one another."""
        return self.num_ranks * self.max_tokens if self.layout == "per_expert" else 0

    @property
    def num_output_rows(self) -> int:
        """Return the most rows of a dispatch with a row per (token, expert)."""
        of_token = (
            self.num_local if self.layout == "per_expert" else min(self.top_k, self.num_local)
        )
        return self.num_ranks * self.max_tokens * of_token

    @property
    def dispatch_format(self) -> RowFormat:
        return RowFormat(
            hidden=self.hidden,
            dtype=self.dispatch_dtype,
            num_ids=self.top_k,
            num_weights=0 if self.is_by_expert else self.top_k,
        )

    @property
    def combine_format(self) -> RowFormat:
        return RowFormat(hidden=self.hidden, dtype=self.combine_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRegions:
    """An exchange's parts of the heap.

    counts     what each rank sends to each other one; read if a call can have several chunks
    rows       a place per source rank
    forwarded  a place per source node: rows that this rank passes on inside its node
    returned   a place per rank that sends rows or sums back
    reduced    a place per (source node, rank of this node): rows that this rank adds up
    staging    what is sent to ranks that plain stores do not reach
    """

    counts: RecvSlots | None
    rows: RecvSlots
    forwarded: RecvSlots | None
    returned: RecvSlots
    reduced: RecvSlots | None
    staging: Region


def reserve(heap: HeapLayout, config: ExchangeConfig, name: str) -> ExchangeRegions:
    """Reserve what an exchange needs, the same on every rank."""
    ranks, nodes = config.num_ranks, config.topology.num_nodes
    count_bytes = 8 * (ranks + 1)
    dispatched = (config.max_records, config.dispatch_format.num_bytes)
    returned = (config.max_returned, config.combine_format.num_bytes)

    def slots(part: str, num_places: int, block: tuple[int, int]) -> RecvSlots:
        return RecvSlots.reserve(heap, f"{name}.{part}", num_places, *block)

    block_bytes = max(dispatched[0] * dispatched[1], returned[0] * returned[1], count_bytes)
    return ExchangeRegions(
        counts=slots("counts", ranks, (1, count_bytes)) if config.max_chunks > 1 else None,
        rows=slots("rows", ranks, dispatched),
        forwarded=slots("forwarded", nodes, dispatched) if nodes > 1 else None,
        returned=slots("returned", ranks, returned),
        reduced=slots("reduced", ranks, returned) if nodes > 1 else None,
        staging=heap.take(f"{name}.staging", staging_bytes([block_bytes] * ranks)),
    )
