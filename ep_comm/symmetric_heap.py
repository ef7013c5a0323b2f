"""The heap of a serving group: what ranks exchange before steps, and both ways of dispatch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from whalepod.ep_comm import all_gather, config, handshake
from whalepod.ep_comm.all_gather import GatherRegions
from whalepod.ep_comm.config import ExchangeConfig
from whalepod.ep_comm.dispatcher import ModeName
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import RowKernels
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.transport.loopback import LoopbackGroup

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What goes between the ranks of a group; the same on all of them.

    decode_tokens  most tokens of a rank in a low-latency step
    max_tokens     most tokens of a rank in any step
    dtype          of the model's hidden states, as rows travel
    is_exact       results have the bits of one rank: expert rows come back one by one, in f32
    """

    num_ranks: int
    ranks_per_node: int
    num_experts: int
    top_k: int
    hidden: int
    decode_tokens: int
    max_tokens: int
    dtype: RowDtype
    is_exact: bool

    def __post_init__(self) -> None:
        if not 1 <= self.decode_tokens <= self.max_tokens:
            raise ValueError(
                f"decode_tokens ({self.decode_tokens}) must be in 1..max_tokens ({self.max_tokens})"
            )

    def exchanges(self) -> dict[ModeName, ExchangeConfig]:
        """Return the configurations of both modes: rows by expert for decode and where results are
        exact, a row per token and rank for more tokens."""
        by_expert = ExchangeConfig(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.decode_tokens,
            dispatch_dtype=self.dtype,
            combine_dtype="float32" if self.is_exact else self.dtype,
            layout="packed",
        )
        bulk = replace(by_expert, max_tokens=self.max_tokens)
        if not self.is_exact:
            bulk = replace(
                bulk,
                layout="per_token",
                chunk_tokens=CHUNK_TOKENS,
                ranks_per_node=self.ranks_per_node,
            )
        return {"low_latency": by_expert, "throughput": bulk}


class SymmetricHeap:
    """The heap's layout, made before there is a transport, and the exchanges over it.

    record_bytes  of what ranks exchange before each step
    """

    def __init__(self, group_config: GroupConfig, record_bytes: int) -> None:
        self.config = group_config
        self.layout = HeapLayout(group_config.num_ranks)
        self.handshake: GatherRegions = handshake.reserve(self.layout)
        self.records: GatherRegions = all_gather.reserve(self.layout, record_bytes, "records")
        self.never: Region = self.layout.take_signals("never", 1)
        """A signal that no rank sets: to wait for it is to let others run for a while."""
        self._parts = {
            mode: (one, config.reserve(self.layout, one, mode))
            for mode, one in group_config.exchanges().items()
        }

    def exchanges(
        self,
        group: Group,
        *,
        row_kernels: RowKernels | None = None,
        poison_unused: bool = False,
    ) -> dict[ModeName, ExpertExchange]:
        """Return this rank's ends of both; see `ExpertExchange` for the options."""
        return {
            mode: ExpertExchange(
                group, one, regions, row_kernels=row_kernels, poison_unused=poison_unused
            )
            for mode, (one, regions) in self._parts.items()
        }


def warm_up(group_config: GroupConfig) -> None:
    """Compile what both exchanges do to rows, so that no request waits for a compiler.

    Sends one token through each, on a group of one rank: machine code depends on the dtypes, and on
    no size. By expert it does so in one call a phase, and over the transport, as it will when a
    rank is missing.
    """
    alone = replace(group_config, num_ranks=1, ranks_per_node=1, decode_tokens=1, max_tokens=1)
    heap = SymmetricHeap(alone, record_bytes=8)
    dtype = alone.exchanges()["low_latency"].dispatch_format.torch_dtype
    x_TH, weights_TK = torch.zeros(1, alone.hidden, dtype=dtype), torch.ones(1, alone.top_k)
    ids_TK = torch.arange(alone.top_k)[None]
    for row_kernels in (None, CompiledRows()):
        [transport] = LoopbackGroup(1, heap.layout.num_bytes).transports
        for exchange in heap.exchanges(Group(transport), row_kernels=row_kernels).values():
            result = exchange.dispatch(x_TH, ids_TK, weights_TK, 1.0)
            exchange.combine(result.rows, result.handle, 1.0)
