"""A model whose experts are spread over ranks computes what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.ep_comm.groups import TIMEOUT_MS, run_faulty, run_loopback
from tests.equality import assert_same_bits
from whalepod.ep_comm.group import CallFailed, Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.interface import RoutedExperts
from whalepod.ep_comm.modes import low_latency_config, throughput_config
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.ep_comm.parallel import LowLatencyExperts, Patience, ThroughputExperts
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import BLOCK_TOKENS, Packed
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig, parse_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.presets import preset_config
from whalepod.models.weights import DummyWeights

MakeExperts = Callable[[Packed], RoutedExperts]
MAX_TOKENS = 40

CHUNKS = [[24, 1, 1], [0, 7, 2], [3, 0, 1], [40, 11, 0]]
"""Tokens that each rank computes in three steps of its own text."""


@cache
def nano() -> ModelConfig:
    return parse_config(preset_config("v3-nano"))


@dataclass(frozen=True)
class MadeBy:
    """A placement around a function."""

    owned: range
    make: MakeExperts

    def routed(self, packed: Packed, layer: str) -> RoutedExperts:
        return self.make(packed)


def make_model(
    experts: range | None = None,
    make: MakeExperts | None = None,
    dtype: torch.dtype = torch.float32,
) -> DeepseekV3:
    config = nano()
    return DeepseekV3(
        config,
        DummyWeights(config, dtype=dtype, seed=0),
        CpuKernels(is_invariant=True),
        max_positions=128,
        absorbed_max_query_tokens=MAX_TOKENS,
        placement=MadeBy(experts, make) if experts is not None and make is not None else None,
    )


def step(model: DeepseekV3, latents: LatentCache, start: int, ids: list[int]) -> Tensor:
    positions = torch.arange(start, start + len(ids))
    batch = ForwardBatch(
        token_ids_T=torch.tensor(ids, dtype=torch.int64),
        positions_T=positions,
        slots_T=positions,
        query_start_B1=torch.tensor([0, len(ids)], dtype=torch.int32),
        context_lens_B=torch.tensor([start + len(ids)], dtype=torch.int32),
        block_tables_BM=torch.zeros(1, 1, dtype=torch.int32),
        max_query_tokens=len(ids),
    )
    return model.forward(batch, latents)


def run_text(model: DeepseekV3, rank: int) -> Tensor:
    """Return the hidden states of a rank's text, computed in its chunks."""
    config = nano()
    latents = LatentCache(
        num_layers=config.num_layers,
        num_blocks=1,
        row_width=config.cache_row_width,
        dtype=model.dtype,
        device="cpu",
    )
    random = torch.Generator().manual_seed(rank)
    text = torch.randint(config.vocab_size, (BLOCK_TOKENS,), generator=random).tolist()
    hidden, start = [], 0
    for length in CHUNKS[rank]:
        hidden.append(step(model, latents, start, text[start : start + length]))
        start += length
    return torch.cat(hidden)


def exact_config(
    num_ranks: int, dtype: RowDtype = "float32"
) -> low_latency_config.LowLatencyConfig:
    gate = nano().gate
    assert gate is not None
    return low_latency_config.LowLatencyConfig(
        num_ranks=num_ranks,
        num_experts=gate.num_experts,
        num_choices=gate.num_experts_per_token,
        hidden=nano().hidden_size,
        max_tokens=MAX_TOKENS,
        dispatch_dtype=dtype,
        combine_dtype="float32",
        output="packed",
    )


def owned(rank: int, num_ranks: int) -> range:
    per_rank = exact_config(num_ranks).num_local
    return range(rank * per_rank, (rank + 1) * per_rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_faulty", [False, True], ids=["loopback", "faulty"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_have_the_bits_of_one_rank(
    num_ranks: int, is_faulty: bool, dtype: torch.dtype
) -> None:
    """In bf16, too: expert rows come back in f32 and are rounded once, after the sum."""
    config = exact_config(num_ranks, "float32" if dtype == torch.float32 else "bfloat16")
    heap = HeapLayout(num_ranks)
    regions = low_latency_config.carve(heap, config)

    def program(transport: Transport) -> Tensor:
        mode = LowLatency(Group(transport), config, regions, poison_unused=True)
        model = make_model(
            owned(transport.rank, num_ranks),
            lambda packed: LowLatencyExperts(
                mode, CpuKernels(is_invariant=True), packed, patience=Patience(TIMEOUT_MS)
            ),
            dtype,
        )
        return run_text(model, transport.rank)

    if is_faulty:
        spread = results_of(run_faulty(heap, program, seed=1))
    else:
        spread = run_loopback(heap, program)
    alone = make_model(dtype=dtype)
    for rank, hidden_TH in enumerate(spread):
        assert_same_bits(run_text(alone, rank), hidden_TH, f"rank {rank}")


def test_sums_per_rank_agree_with_one_rank_up_to_rounding() -> None:
    num_ranks, ranks_per_node = 4, 2
    exact = exact_config(num_ranks)
    config = throughput_config.ThroughputConfig(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_experts=exact.num_experts,
        num_choices=exact.num_choices,
        hidden=exact.hidden,
        max_tokens=MAX_TOKENS,
        chunk_tokens=16,
        dispatch_dtype="float32",
        combine_dtype="float32",
    )
    heap = HeapLayout(num_ranks)
    regions = throughput_config.carve(heap, config)

    def program(transport: Transport) -> Tensor:
        mode = Throughput(Group(transport), config, regions)
        model = make_model(
            owned(transport.rank, num_ranks),
            lambda packed: ThroughputExperts(
                mode, CpuKernels(is_invariant=True), packed, patience=Patience(TIMEOUT_MS)
            ),
        )
        return run_text(model, transport.rank)

    alone = make_model()
    spread = run_loopback(heap, program, ranks_per_node=ranks_per_node)
    for rank, hidden_TH in enumerate(spread):
        torch.testing.assert_close(hidden_TH, run_text(alone, rank), rtol=1e-4, atol=1e-4)


def test_a_missing_rank_ends_the_layer_with_an_error_that_names_it() -> None:
    config = exact_config(2)
    heap = HeapLayout(2)
    regions = low_latency_config.carve(heap, config)

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            raise RuntimeError("this rank's step failed")
        mode = LowLatency(Group(transport), config, regions)
        experts = LowLatencyExperts(
            mode, CpuKernels(is_invariant=True), None, patience=Patience(50.0)
        )
        ids_TK, weights_TK = torch.tensor([[0, 1]]), torch.ones(1, 2)
        with pytest.raises(CallFailed, match=r"dispatch of epoch 1: late: ranks \[1\]"):
            experts(torch.zeros(1, config.hidden), ids_TK, weights_TK)

    results = LoopbackGroup(2, heap.num_bytes).run(program)
    assert results[0] is None, results[0]
