"""Dispatch and combine per token against plain loops over all ranks' inputs, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.ep_comm import worked_example as example
from tests.ep_comm.faulty import FaultyTransport
from tests.ep_comm.groups import (
    MUTATIONS,
    TIMEOUT_MS,
    Inputs,
    assert_faults_change_nothing,
    make_heap,
    make_inputs,
    num_examples,
    run_faulty,
    run_loopback,
)
from tests.equality import assert_same_bits
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Dispatched
from whalepod.ep_comm.expert_exchange import ExpertExchange, LiveResultError
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.rows import quantize_rows, raw
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import results_of

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 16, 4, 16, 11

LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 2), (8, 8), (8, 2)]
"""(ranks, ranks per node)"""


def make_config(num_ranks: int, ranks_per_node: int, **changes: object) -> ExchangeConfig:
    fields: dict[str, object] = {
        "num_ranks": num_ranks,
        "ranks_per_node": ranks_per_node,
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden": HIDDEN,
        "max_tokens": MAX_TOKENS,
        "chunk_tokens": 4,
        "dispatch_dtype": "float32",
        "combine_dtype": "float32",
        "layout": "per_token",
    }
    return ExchangeConfig(**(fields | changes))  # type: ignore[arg-type]


def owners(ids: list[int], config: ExchangeConfig) -> set[int]:
    return {e // config.num_local for e in ids if e >= 0}


def is_on_rank(inputs: Inputs, rank: int, config: ExchangeConfig) -> Tensor:
    """Return `[T]` bool: the token has an expert on the rank."""
    hits = [rank in owners(ids, config) for ids in inputs.ids_TK.tolist()]
    return torch.tensor(hits, dtype=torch.bool)


def sent(x_TH: Tensor, config: ExchangeConfig) -> tuple[Tensor, Tensor | None]:
    """Return the values and scales that arrive of `x_TH`."""
    return quantize_rows(x_TH) if config.dispatch_dtype == "float8" else (x_TH, None)


def check_received(
    received: Dispatched, inputs: list[Inputs], config: ExchangeConfig, rank: int
) -> None:
    assert received.status.ok, received.status
    hits = [is_on_rank(given_, rank, config) for given_ in inputs]
    tokens = [hit_T.nonzero().squeeze(1) for hit_T in hits]
    assert len(received.rows) == sum(map(len, tokens))
    assert sources_of(received).tolist() == [r for r, found in enumerate(tokens) for _ in found]
    assert received.info.tolist() == torch.cat(tokens).tolist()
    assert received.ids_NK is not None
    assert received.weights_NK is not None

    pairs = list(zip(inputs, tokens, strict=True))
    ids_NK = torch.cat([given_.ids_TK[t] for given_, t in pairs])
    weights_NK = torch.cat([given_.weights_TK[t] for given_, t in pairs])
    is_local_NK = (ids_NK >= 0) & (ids_NK // config.num_local == rank)
    local_NK = (ids_NK - rank * config.num_local).masked_fill(~is_local_NK, -1)
    assert_same_bits(local_NK, received.ids_NK)
    assert_same_bits(weights_NK.masked_fill(~is_local_NK, 0.0), received.weights_NK)
    counts = [int((local_NK == e).sum()) for e in range(config.num_local)]
    assert received.count_E.tolist() == counts

    wire = [sent(given_.x_TH[t], config) for given_, t in pairs]
    assert_same_bits(torch.cat([raw(values) for values, _ in wire]), raw(received.rows))
    if received.scales is not None:
        scales = [found for _, found in wire if found is not None]
        assert_same_bits(torch.cat(scales), received.scales)


def sources_of(received: Dispatched) -> Tensor:
    """Return the rank that each row comes from, by what its combine will follow."""
    source_N = torch.full((len(received.rows),), -1)
    for chunk in received.handle.received:
        for source, (first, count) in chunk.items():
            source_N[first : first + count] = source
    return source_N


def computed(x_TH: Tensor, rank: int, config: ExchangeConfig) -> Tensor:
    """Return what the experts of a rank make of rows: any function of both will do."""
    return (x_TH.float() * (rank + 1) + 4).to(config.combine_format.torch_dtype)


def expert_rows(
    received: Dispatched, inputs: list[Inputs], config: ExchangeConfig, rank: int
) -> Tensor:
    y_NH = torch.full(received.rows.shape, torch.nan, dtype=config.combine_format.torch_dtype)
    for source, given_ in enumerate(inputs):
        is_from_N = sources_of(received) == source
        tokens = received.info[is_from_N].long()
        y_NH[is_from_N] = computed(given_.x_TH, rank, config)[tokens]
    return y_NH


def expected_sum(inputs: Inputs, config: ExchangeConfig) -> Tensor:
    topology, dtype = config.topology, config.combine_format.torch_dtype
    y_TH = torch.zeros(inputs.x_TH.shape)
    for node in range(topology.num_nodes):
        part_TH = torch.zeros(inputs.x_TH.shape)
        for rank in topology.ranks_of(node):
            rows_TH = computed(inputs.x_TH, rank, config).float()
            part_TH = part_TH + rows_TH * is_on_rank(inputs, rank, config)[:, None]
        y_TH = y_TH + (part_TH.to(dtype).float() if topology.num_nodes > 1 else part_TH)
    return y_TH.to(inputs.x_TH.dtype)


@dataclass(frozen=True)
class Round:
    """Dispatches and combines of all ranks, checked inside each rank's program."""

    config: ExchangeConfig
    regions: ExchangeRegions
    seeds: tuple[int, ...]
    skew: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, seed: int) -> list[Inputs]:
        c = self.config
        sizes = (c.num_ranks, c.num_experts, c.top_k, c.hidden, c.max_tokens)
        return make_inputs(seed, *sizes, dtype=self.dtype, skew=self.skew)

    def __call__(self, transport: Transport) -> list[Tensor]:
        config, rank = self.config, transport.rank
        mode = ExpertExchange(Group(transport), config, self.regions)
        combined = []
        for seed in self.seeds:
            inputs = self.inputs(seed)
            mine = inputs[rank]
            received = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
            check_received(received, inputs, config, rank)
            y_NH = expert_rows(received, inputs, config, rank)
            y_TH, status = mode.combine(y_NH, received.handle, TIMEOUT_MS)
            assert status.ok, status
            assert_same_bits(expected_sum(mine, config), y_TH)
            combined.append(y_TH)
        return combined


def test_the_worked_example() -> None:
    config = make_config(2, 2, num_experts=example.NUM_EXPERTS, top_k=example.TOP_K, hidden=8)
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        rank = transport.rank
        mode = ExpertExchange(Group(transport), config, regions)
        x_TH = example.inputs_of(rank, config.hidden)
        received = mode.dispatch(x_TH, example.IDS[rank], example.WEIGHTS[rank], TIMEOUT_MS)
        rows = zip(sources_of(received).tolist(), received.info.tolist(), strict=True)
        assert list(rows) == example.ROWS_PER_TOKEN[rank]
        assert received.ids_NK is not None
        assert received.weights_NK is not None
        assert received.ids_NK.tolist() == example.IDS_PER_TOKEN[rank]
        torch.testing.assert_close(
            received.weights_NK, torch.tensor(example.WEIGHTS_PER_TOKEN[rank])
        )
        assert received.count_E.tolist() == example.EXPERT_COUNTS[rank]

        factors_NK = 1 + received.ids_NK + rank * config.num_local
        y_NH = received.rows * (received.weights_NK * factors_NK).sum(dim=1)[:, None]
        y_TH, _ = mode.combine(y_NH, received.handle, TIMEOUT_MS)
        expected = x_TH * torch.tensor(example.COMBINED_FACTORS[rank])[:, None]
        torch.testing.assert_close(y_TH, expected, rtol=1e-6, atol=0)

        again = mode.dispatch(x_TH, example.IDS[rank], example.WEIGHTS[rank], TIMEOUT_MS)
        y_TH, _ = mode.combine(again.rows, again.handle, TIMEOUT_MS)
        assert_same_bits(x_TH * torch.tensor(example.NUM_RANKS_HIT[rank])[:, None], y_TH)

    run_loopback(heap, program)


FORMATS: list[dict[str, object]] = [
    {},
    {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"},
    {"dispatch_dtype": "float8", "hidden": 256, "combine_dtype": "bfloat16"},
    {"chunk_tokens": 11},
    {"chunk_tokens": None},
]


@pytest.mark.parametrize("skew", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize("changes", FORMATS, ids=lambda c: "-".join(map(str, c.values())) or "f32")
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (4, 4), (8, 2)])
def test_every_format_equals_the_plain_loops(
    num_ranks: int, ranks_per_node: int, changes: dict[str, object], skew: bool
) -> None:
    config = make_config(num_ranks, ranks_per_node, **changes)
    heap, regions = make_heap(config)
    dtype = torch.float32 if config.dispatch_dtype == "float32" else torch.bfloat16
    program = Round(config, regions, (1, 2), skew, dtype)
    run_loopback(heap, program, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
@settings(max_examples=num_examples(quick=2))
@given(seed=st.integers(0, 2**31), skew=st.booleans())
def test_a_transport_that_delays_reorders_and_tears_changes_no_bit(
    num_ranks: int, ranks_per_node: int, seed: int, skew: bool
) -> None:
    config = make_config(num_ranks, ranks_per_node)
    heap, regions = make_heap(config)
    program = Round(config, regions, (seed, seed + 1), skew)
    assert_faults_change_nothing(heap, program, seed, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_faulty_transport_catches_a_forgotten(mutation: type[FaultyTransport]) -> None:
    config = make_config(4, 2)
    heap, regions = make_heap(config)
    program = Round(config, regions, tuple(range(4)))
    results = run_faulty(heap, program, seed=1, wrapper=mutation, ranks_per_node=2)
    assert any(isinstance(result, Exception) for result in results)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_a_token_crosses_once_to_each_node_that_it_hits(ranks_per_node: int) -> None:
    config = make_config(8, ranks_per_node)
    heap, regions = make_heap(config)
    program = Round(config, regions, ())

    def count(transport: Transport) -> None:
        rank, topology = transport.rank, transport.topology
        mine = program.inputs(7)[rank]
        mode = ExpertExchange(Group(transport), config, regions)
        mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
        far = [r for r in range(8) if topology.node_of(r) != topology.node_of(rank)]
        expected = sum(
            len({topology.node_of(r) for r in owners(ids, config)} - {topology.node_of(rank)})
            for ids in mine.ids_TK.tolist()
        )
        sent_bytes = int(mode.send_buffer.sent_bytes_R[far].sum())
        assert sent_bytes == expected * config.dispatch_format.num_bytes

    run_loopback(heap, count, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("max_tokens", [4, 8])
def test_many_calls_of_one_or_two_chunks_overwrite_nothing(max_tokens: int) -> None:
    config = make_config(4, 2, max_tokens=max_tokens)
    heap, regions = make_heap(config)
    program = Round(config, regions, (4, 5, 6, 7, 8))
    assert config.max_chunks == max_tokens // 4
    assert max(len(given_.x_TH) for given_ in program.inputs(4)) == max_tokens
    run_loopback(heap, program, ranks_per_node=2)
    for seed in range(8):
        results_of(run_faulty(heap, program, seed=seed, ranks_per_node=2))


@pytest.mark.parametrize(("chunk_tokens", "num_live"), [(None, 2), (4, 1)])
def test_phases_overlap_as_far_as_there_are_places(chunk_tokens: int | None, num_live: int) -> None:
    config = make_config(4, 2, chunk_tokens=chunk_tokens)
    heap, regions = make_heap(config)
    program = Round(config, regions, ())

    def overlapping(transport: Transport) -> None:
        rank = transport.rank
        mode = ExpertExchange(Group(transport), config, regions)
        inputs = [program.inputs(seed) for seed in range(num_live)]
        mine = [given_[rank] for given_ in inputs]
        flights = [mode.send_dispatch(i.x_TH, i.ids_TK, i.weights_TK) for i in mine]
        with pytest.raises(LiveResultError, match=f"would be live result {num_live + 1}"):
            mode.send_dispatch(mine[0].x_TH, mine[0].ids_TK, mine[0].weights_TK)
        results = [flight.receive(TIMEOUT_MS) for flight in flights]
        back = []
        for result, given_ in zip(results, inputs, strict=True):
            check_received(result, given_, config, rank)
            y_NH = expert_rows(result, given_, config, rank)
            back.append(mode.send_combine(y_NH, result.handle))
        for flight, one in zip(back, mine, strict=True):
            y_TH, status = flight.receive(TIMEOUT_MS)
            assert status.ok
            assert_same_bits(expected_sum(one, config), y_TH)

    run_loopback(heap, overlapping, ranks_per_node=2)
    results_of(run_faulty(heap, overlapping, seed=3, ranks_per_node=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 15}, "must be a positive multiple of num_ranks"),
        ({"num_ranks": 16, "ranks_per_node": 3}, r"multiple of ranks_per_node \(3\)"),
        ({"combine_dtype": "float8", "hidden": 128}, "use bfloat16 or float32"),
        ({"chunk_tokens": 0}, r"chunk_tokens \(0\) must be at least 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_config(4, 2), **changes)  # type: ignore[arg-type]


def test_input_that_does_not_fit_is_refused() -> None:
    config = make_config(1, 1)
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        mode = ExpertExchange(Group(transport), config, regions)
        ids_TK, weights_TK = torch.zeros(12, 4, dtype=torch.int64), torch.ones(12, 4)
        ids_TK += torch.arange(4)
        with pytest.raises(ValueError, match="at most 11 fit: raise max_tokens"):
            mode.dispatch(torch.zeros(12, HIDDEN), ids_TK, weights_TK, TIMEOUT_MS)
        with pytest.raises(ValueError, match=r"rows must be \[T, 16\] .* T = 12"):
            mode.dispatch(torch.zeros(12, 8), ids_TK, weights_TK, TIMEOUT_MS)

    run_loopback(heap, program)
