"""A model whose experts are spread over ranks computes what one rank computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.ep_comm.groups import TIMEOUT_MS, run_faulty, run_loopback
from tests.equality import assert_same_bits
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions, reserve
from whalepod.ep_comm.dispatcher import Dispatcher, Timeouts
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import CallFailed, Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig, parse_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.presets import preset_config
from whalepod.models.weights import DummyWeights

MAX_TOKENS = 40

CHUNKS = [[24, 1, 1], [0, 7, 2], [3, 0, 1], [40, 11, 0]]
"""Tokens that each rank computes in three steps of its own text."""


@cache
def nano() -> ModelConfig:
    return parse_config(preset_config("v3-nano"))


def make_model(
    placement: ExpertPlacement | None = None, dtype: torch.dtype = torch.float32
) -> DeepseekV3:
    config = nano()
    return DeepseekV3(
        config,
        DummyWeights(config, dtype=dtype, seed=0),
        CpuKernels(is_invariant=True),
        max_positions=128,
        absorbed_max_query_tokens=MAX_TOKENS,
        placement=placement,
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


def exact_config(num_ranks: int, dtype: RowDtype = "float32") -> ExchangeConfig:
    gate = nano().gate
    assert gate is not None
    return ExchangeConfig(
        num_ranks=num_ranks,
        num_experts=gate.num_experts,
        top_k=gate.num_experts_per_token,
        hidden=nano().hidden_size,
        max_tokens=MAX_TOKENS,
        dispatch_dtype=dtype,
        combine_dtype="float32",
        layout="packed",
    )


def placed(transport: Transport, config: ExchangeConfig, regions: ExchangeRegions) -> Dispatcher:
    """Return a placement whose steps go over one exchange, whatever their mode."""
    group = Group(transport)
    exchange = ExpertExchange(group, config, regions, poison_unused=True)
    dispatcher = Dispatcher(
        group,
        CpuKernels(is_invariant=True),
        {"low_latency": exchange, "throughput": exchange},
        timeouts=Timeouts(TIMEOUT_MS),
    )
    dispatcher.enter("low_latency")
    return dispatcher


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_faulty", [False, True], ids=["loopback", "faulty"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_have_the_bits_of_one_rank(
    num_ranks: int, is_faulty: bool, dtype: torch.dtype
) -> None:
    """In bf16, too: expert rows come back in f32 and are rounded once, after the sum."""
    config = exact_config(num_ranks, "float32" if dtype == torch.float32 else "bfloat16")
    heap = HeapLayout(num_ranks)
    regions = reserve(heap, config, "exchange")

    def program(transport: Transport) -> Tensor:
        model = make_model(placed(transport, config, regions), dtype)
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
    config = replace(
        exact_config(num_ranks), layout="per_token", ranks_per_node=ranks_per_node, chunk_tokens=16
    )
    heap = HeapLayout(num_ranks)
    regions = reserve(heap, config, "exchange")

    def program(transport: Transport) -> Tensor:
        model = make_model(placed(transport, config, regions))
        return run_text(model, transport.rank)

    alone = make_model()
    spread = run_loopback(heap, program, ranks_per_node=ranks_per_node)
    for rank, hidden_TH in enumerate(spread):
        torch.testing.assert_close(hidden_TH, run_text(alone, rank), rtol=1e-4, atol=1e-4)


def test_a_missing_rank_ends_the_layer_with_an_error_that_names_it() -> None:
    config = exact_config(2)
    heap = HeapLayout(2)
    regions = reserve(heap, config, "exchange")

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            raise RuntimeError("this rank's step failed")
        dispatcher = placed(transport, config, regions)
        dispatcher.timeouts.dispatch_ms = 50.0
        experts = dispatcher.routed(None, "model.layers.3.mlp", lambda expert: None)
        ids_TK, weights_TK = torch.tensor([[0, 1]]), torch.ones(1, 2)
        with pytest.raises(CallFailed, match=r"mlp: dispatch of epoch 1: late: ranks \[1\]"):
            experts(torch.zeros(1, config.hidden), ids_TK, weights_TK)

    results = LoopbackGroup(2, heap.num_bytes).run(program)
    assert results[0] is None, results[0]
