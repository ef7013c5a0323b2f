"""Sizes of the throughput mode, and its parts of the heap."""

from __future__ import annotations

from dataclasses import dataclass

from whalepod.ep_comm import exchange, layout
from whalepod.ep_comm.exchange import ExchangeRegions
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.lane import MAX_CHUNKS, Lane
from whalepod.ep_comm.rows import RowDtype, RowFormat, staging_bytes
from whalepod.ep_comm.transport.interface import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Sizes and formats; the same on all ranks.

    chunk_tokens      tokens of a rank that are under way at a time; a call may have many chunks
    max_tokens        tokens that a rank may dispatch in one call
    dispatch_dtype    rows on the way to the experts; float8 is quantised by the caller
    combine_dtype     rows on the way back, and of the result
    expert_alignment  the reported counts per expert are rounded up to a multiple of it
    """

    num_ranks: int
    ranks_per_node: int
    num_experts: int
    num_choices: int
    hidden: int
    max_tokens: int
    chunk_tokens: int = 256
    dispatch_dtype: RowDtype = "bfloat16"
    combine_dtype: RowDtype = "bfloat16"
    expert_alignment: int = 1

    def __post_init__(self) -> None:
        layout.split_experts(self.num_experts, self.num_ranks)
        _ = self.topology, self.dispatch_format, self.combine_format
        if self.combine_dtype == "float8":
            raise ValueError("combine_dtype float8 loses too much: use bfloat16 or float32")
        if self.chunk_tokens < 1 or self.expert_alignment < 1:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) and expert_alignment "
                f"({self.expert_alignment}) must be at least 1"
            )
        if not 1 <= self.max_tokens <= MAX_CHUNKS * self.chunk_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must be in 1..{MAX_CHUNKS * self.chunk_tokens}, "
                f"{MAX_CHUNKS} chunks of chunk_tokens ({self.chunk_tokens})"
            )

    @property
    def topology(self) -> Topology:
        return Topology(self.num_ranks, self.ranks_per_node)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def dispatch_format(self) -> RowFormat:
        return RowFormat(
            hidden=self.hidden,
            dtype=self.dispatch_dtype,
            num_ids=self.num_choices,
            num_weights=self.num_choices,
        )

    @property
    def combine_format(self) -> RowFormat:
        return RowFormat(hidden=self.hidden, dtype=self.combine_dtype, num_weights=self.num_choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRegions:
    """The mode's parts of the heap.

    counts           what each rank sends to each other one
    rows             a place per source rank
    forwarded        a place per source node: rows that this rank passes on inside its node
    returned         a place per rank that sends sums back
    reduced          a place per (source node, rank of this node): rows that this rank adds up
    """

    counts: ExchangeRegions
    rows: Lane
    forwarded: Lane
    returned: Lane
    reduced: Lane
    staging: Region


def carve(
    heap: HeapLayout, config: ThroughputConfig, name: str = "throughput"
) -> ThroughputRegions:
    """Reserve what the mode needs, the same on every rank."""
    ranks, nodes = config.num_ranks, config.topology.num_nodes
    there, back = config.dispatch_format.num_bytes, config.combine_format.num_bytes

    def lane(part: str, num_places: int, record_bytes: int) -> Lane:
        return Lane.carve(
            heap,
            f"{name}.{part}",
            num_places=num_places,
            max_records=config.chunk_tokens,
            record_bytes=record_bytes,
        )

    block_bytes = config.chunk_tokens * max(there, back)
    return ThroughputRegions(
        counts=exchange.carve(heap, 8 * (ranks + 1), f"{name}.counts"),
        rows=lane("rows", ranks, there),
        forwarded=lane("forwarded", nodes, there),
        returned=lane("returned", ranks, back),
        reduced=lane("reduced", ranks, back),
        staging=heap.take(f"{name}.staging", staging_bytes([block_bytes] * ranks)),
    )
