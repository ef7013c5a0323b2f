"""The heap of a serving group: what ranks exchange before steps, and both modes of dispatch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from whalepod.ep_comm import exchange, handshake
from whalepod.ep_comm.exchange import ExchangeRegions
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout, Region
from whalepod.ep_comm.modes import low_latency_config, throughput_config
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.modes.low_latency_config import LowLatencyConfig, LowLatencyRegions
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig, ThroughputRegions
from whalepod.ep_comm.parallel import ExpertMode, ModeName
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import RowKernels
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.transport.loopback import LoopbackGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What goes between the ranks of a group; the same on all of them.

    decode_tokens  M: most tokens of a rank in a low-latency step
    max_tokens     most tokens of a rank in any step
    dtype          of the model's hidden states, as rows travel
    is_exact       results have the bits of one rank: expert rows come back one by one, in f32
    """

    num_ranks: int
    ranks_per_node: int
    num_experts: int
    num_choices: int
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

    def low_latency(self, max_tokens: int) -> LowLatencyConfig:
        """Return the configuration of a low-latency mode for so many tokens of a rank."""
        return LowLatencyConfig(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            num_choices=self.num_choices,
            hidden=self.hidden,
            max_tokens=max_tokens,
            dispatch_dtype=self.dtype,
            combine_dtype="float32" if self.is_exact else self.dtype,
            output="packed",
        )

    def throughput(self) -> ThroughputConfig:
        """Return the configuration of the mode for more tokens, unless `is_exact`."""
        return ThroughputConfig(
            num_ranks=self.num_ranks,
            ranks_per_node=self.ranks_per_node,
            num_experts=self.num_experts,
            num_choices=self.num_choices,
            hidden=self.hidden,
            max_tokens=self.max_tokens,
            dispatch_dtype=self.dtype,
            combine_dtype=self.dtype,
        )


class GroupHeap:
    """The heap's layout, made before there is a transport, and the modes over it.

    record_bytes  of what ranks exchange before each step
    """

    def __init__(self, traffic: Traffic, record_bytes: int) -> None:
        self.traffic = traffic
        self.layout = HeapLayout(traffic.num_ranks)
        self.handshake: ExchangeRegions = handshake.carve(self.layout)
        self.records: ExchangeRegions = exchange.carve(self.layout, record_bytes, "records")
        self.never: Region = self.layout.take_signals("never", 1)
        """A word that nobody sets: to wait for it is to let others run for a while."""
        self._low = traffic.low_latency(traffic.decode_tokens)
        self._low_regions = low_latency_config.carve(self.layout, self._low)
        self._bulk_regions: LowLatencyRegions | ThroughputRegions
        self._bulk: LowLatencyConfig | ThroughputConfig
        if traffic.is_exact:
            self._bulk = bulk = traffic.low_latency(traffic.max_tokens)
            self._bulk_regions = low_latency_config.carve(self.layout, bulk, "exact")
        else:
            self._bulk = spread = traffic.throughput()
            self._bulk_regions = throughput_config.carve(self.layout, spread)

    def modes(
        self,
        group: Group,
        *,
        row_kernels: RowKernels | None = None,
        poison_unused: bool = False,
    ) -> dict[ModeName, ExpertMode]:
        """Return this rank's ends of both modes; see there for the options."""
        return {
            "low_latency": LowLatency(
                group,
                self._low,
                self._low_regions,
                row_kernels=row_kernels,
                poison_unused=poison_unused,
            ),
            "throughput": self._new_bulk(group, row_kernels, poison_unused),
        }

    def _new_bulk(
        self, group: Group, row_kernels: RowKernels | None, poison_unused: bool
    ) -> ExpertMode:
        config, regions = self._bulk, self._bulk_regions
        if isinstance(config, LowLatencyConfig):
            assert isinstance(regions, LowLatencyRegions)
            return LowLatency(
                group, config, regions, row_kernels=row_kernels, poison_unused=poison_unused
            )
        assert isinstance(regions, ThroughputRegions)
        return Throughput(group, config, regions)


def warm_up(traffic: Traffic) -> None:
    """Compile what both modes do to rows, so that no request waits for a compiler.

    Sends one token through each, on a group of one rank: machine code depends on the dtypes, and on
    no size. The low-latency mode does it in one call a phase, and over the transport, as it will
    when a rank is missing.
    """
    alone = replace(traffic, num_ranks=1, ranks_per_node=1, decode_tokens=1, max_tokens=1)
    heap = GroupHeap(alone, record_bytes=8)
    dtype = alone.low_latency(1).dispatch_format.torch_dtype
    x_TH, weights_TK = torch.zeros(1, alone.hidden, dtype=dtype), torch.ones(1, alone.num_choices)
    ids_TK = torch.arange(alone.num_choices)[None]
    for row_kernels in (None, CompiledRows()):
        [transport] = LoopbackGroup(1, heap.layout.num_bytes).transports
        for mode in heap.modes(Group(transport), row_kernels=row_kernels).values():
            if isinstance(mode, LowLatency):
                result = mode.dispatch(x_TH, ids_TK, 1.0)
                mode.combine(result.rows, result.handle, weights_TK, 1.0)
            elif row_kernels is None:
                received = mode.dispatch(x_TH, ids_TK, weights_TK, 1.0)
                mode.combine(received.x_NH, received.routing, 1.0)
