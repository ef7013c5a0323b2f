"""Throughput dispatch and combine against plain loops over all ranks' inputs, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.ep_comm import worked_example as example
from tests.ep_comm.groups import (
    MUTATIONS,
    TIMEOUT_MS,
    Inputs,
    assert_faults_change_nothing,
    make_inputs,
    num_examples,
    run_faulty,
    run_loopback,
)
from tests.equality import assert_same_bits
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.ep_comm.modes.throughput_config import (
    ThroughputConfig,
    ThroughputRegions,
    carve,
)
from whalepod.ep_comm.modes.throughput_rows import Received, expand
from whalepod.ep_comm.rows import quantize_rows, raw, weighted_sum
from whalepod.ep_comm.transport.faulty import FaultyTransport
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import results_of

NUM_EXPERTS, NUM_CHOICES, HIDDEN, MAX_TOKENS = 16, 4, 16, 11

LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 2), (8, 8), (8, 2)]
"""(ranks, ranks per node)"""


def make_config(num_ranks: int, ranks_per_node: int, **changes: object) -> ThroughputConfig:
    fields: dict[str, object] = {
        "num_ranks": num_ranks,
        "ranks_per_node": ranks_per_node,
        "num_experts": NUM_EXPERTS,
        "num_choices": NUM_CHOICES,
        "hidden": HIDDEN,
        "max_tokens": MAX_TOKENS,
        "chunk_tokens": 4,
        "dispatch_dtype": "float32",
        "combine_dtype": "float32",
        "expert_alignment": 4,
    }
    return ThroughputConfig(**(fields | changes))  # type: ignore[arg-type]


def make_heap(config: ThroughputConfig) -> tuple[HeapLayout, ThroughputRegions]:
    heap = HeapLayout(config.num_ranks)
    return heap, carve(heap, config)


def owners(ids: list[int], config: ThroughputConfig) -> set[int]:
    return {e // config.num_local for e in ids if e >= 0}


def is_on_rank(inputs: Inputs, rank: int, config: ThroughputConfig) -> Tensor:
    """Return `[T]` bool: the token has an expert on the rank."""
    hits = [rank in owners(ids, config) for ids in inputs.ids_TK.tolist()]
    return torch.tensor(hits, dtype=torch.bool)


def sent(inputs: Inputs, config: ThroughputConfig) -> Tensor | tuple[Tensor, Tensor]:
    if config.dispatch_dtype == "float8":
        return quantize_rows(inputs.x_TH, round_scale=False)
    return inputs.x_TH


def check_received(
    received: Received, inputs: list[Inputs], config: ThroughputConfig, rank: int
) -> None:
    assert received.status.ok, received.status
    hits = [is_on_rank(given_, rank, config) for given_ in inputs]
    tokens = [hit_T.nonzero().squeeze(1) for hit_T in hits]
    num_rows = sum(map(len, tokens))
    assert received.num_rows == num_rows
    sources = [rank_ for rank_, found in enumerate(tokens) for _ in found]
    assert received.source_rank_N[:num_rows].tolist() == sources
    assert received.source_token_N[:num_rows].tolist() == torch.cat(tokens).tolist()

    pairs = list(zip(inputs, tokens, strict=True))
    ids_NK = torch.cat([given_.ids_TK[t] for given_, t in pairs])
    weights_NK = torch.cat([given_.weights_TK[t] for given_, t in pairs])
    is_local_NK = (ids_NK >= 0) & (ids_NK // config.num_local == rank)
    local_NK = (ids_NK - rank * config.num_local).masked_fill(~is_local_NK, -1)
    assert_same_bits(local_NK, received.ids_NK[:num_rows])
    assert_same_bits(weights_NK.masked_fill(~is_local_NK, 0.0), received.weights_NK[:num_rows])
    counts = [int((local_NK == e).sum()) for e in range(config.num_local)]
    assert received.expert_counts == [-(-count // 4) * 4 for count in counts]
    assert bool((received.ids_NK[num_rows:] == -1).all())
    assert received.rank_prefix_RR[-1, rank] == num_rows

    wire = [sent(given_, config) for given_ in inputs]
    x_NH = torch.cat(
        [raw(w[0] if isinstance(w, tuple) else w)[t] for w, t in zip(wire, tokens, strict=True)]
    )
    assert_same_bits(x_NH, raw(received.x_NH)[:num_rows])
    if received.scales_NG is not None:
        scales = [w[1][t] for w, t in zip(wire, tokens, strict=True) if isinstance(w, tuple)]
        assert_same_bits(torch.cat(scales), received.scales_NG[:num_rows])


def computed(x_TH: Tensor, rank: int, config: ThroughputConfig) -> Tensor:
    """Return what the experts of a rank make of rows: any function of both will do."""
    return (x_TH.float() * (rank + 1) + 4).to(config.combine_format.torch_dtype)


def expert_rows(
    received: Received, inputs: list[Inputs], config: ThroughputConfig, rank: int
) -> Tensor:
    y_NH = torch.full(received.x_NH.shape, torch.nan, dtype=config.combine_format.torch_dtype)
    for source, given_ in enumerate(inputs):
        is_from_N = received.source_rank_N == source
        tokens = received.source_token_N[is_from_N]
        y_NH[is_from_N] = computed(given_.x_TH, rank, config)[tokens]
    return y_NH


def expected_sum(inputs: Inputs, config: ThroughputConfig, bias: list[Tensor]) -> Tensor:
    topology, dtype = config.topology, config.combine_format.torch_dtype
    y_TH = torch.zeros(inputs.x_TH.shape)
    for node in range(topology.num_nodes):
        part_TH = torch.zeros(inputs.x_TH.shape)
        for rank in topology.ranks_of(node):
            rows_TH = computed(inputs.x_TH, rank, config).float()
            part_TH = part_TH + rows_TH * is_on_rank(inputs, rank, config)[:, None]
        y_TH = y_TH + (part_TH.to(dtype).float() if topology.num_nodes > 1 else part_TH)
    for term in bias:
        y_TH = y_TH + term.float()
    return y_TH.to(dtype)


@dataclass(frozen=True)
class Round:
    """Dispatches and combines of all ranks, checked inside each rank's program."""

    config: ThroughputConfig
    regions: ThroughputRegions
    seeds: tuple[int, ...]
    skew: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, seed: int) -> list[Inputs]:
        c = self.config
        sizes = (c.num_ranks, c.num_experts, c.num_choices, c.hidden, c.max_tokens)
        return make_inputs(seed, *sizes, dtype=self.dtype, skew=self.skew)

    def __call__(self, transport: Transport) -> list[Tensor]:
        config, rank = self.config, transport.rank
        mode = Throughput(Group(transport), config, self.regions)
        combined = []
        for number, seed in enumerate(self.seeds):
            inputs = self.inputs(seed)
            mine = inputs[rank]
            received = mode.dispatch(sent(mine, config), mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
            check_received(received, inputs, config, rank)
            y_NH = expert_rows(received, inputs, config, rank)
            bias = [mine.x_TH, mine.x_TH * 2][: number % 3]
            y_TH, weights_TK, status = mode.combine(
                y_NH,
                received.routing,
                TIMEOUT_MS,
                weights_NK=received.weights_NK[: received.num_rows],
                bias=bias,
            )
            assert status.ok, status
            assert weights_TK is not None
            assert_same_bits(expected_sum(mine, config, bias), y_TH)
            assert_same_bits(mine.weights_TK.masked_fill(mine.ids_TK < 0, 0.0), weights_TK)
            combined.append(y_TH)
        return combined


def test_the_worked_example() -> None:
    config = make_config(
        2, 2, num_experts=example.NUM_EXPERTS, num_choices=example.NUM_CHOICES, hidden=8
    )
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        rank = transport.rank
        mode = Throughput(Group(transport), config, regions)
        x_TH = example.inputs_of(rank, config.hidden)
        received = mode.dispatch(x_TH, example.IDS[rank], example.WEIGHTS[rank], TIMEOUT_MS)
        rows = zip(received.source_rank_N.tolist(), received.source_token_N.tolist(), strict=True)
        assert list(rows) == example.THROUGHPUT_ROWS[rank]
        assert received.ids_NK.tolist() == example.THROUGHPUT_IDS[rank]
        torch.testing.assert_close(
            received.weights_NK, torch.tensor(example.THROUGHPUT_WEIGHTS[rank])
        )
        assert received.expert_counts == example.EXPERT_COUNTS_ALIGNED_TO_4[rank]
        assert received.rank_prefix_RR.tolist() == example.RANK_PREFIX

        expanded = expand(received, config.num_local, alignment=4)
        assert expanded.count_E.tolist() == example.EXPERT_COUNTS[rank]
        firsts = example.EXPANDED_FIRST_ROWS_ALIGNED_TO_4[rank]
        assert expanded.first_row_E.tolist() == firsts
        factors = torch.ones(len(expanded.x_SH), 1)
        for e, first in enumerate(firsts):
            factors[first : first + 4] = 1 + e + rank * config.num_local
        y_NH = weighted_sum(expanded.x_SH * factors, expanded.row_of_NK, received.weights_NK)
        y_TH, _, _ = mode.combine(y_NH, received.routing, TIMEOUT_MS)
        expected = x_TH * torch.tensor(example.COMBINED_FACTORS[rank])[:, None]
        torch.testing.assert_close(y_TH, expected, rtol=1e-6, atol=0)

        again = mode.dispatch_again(x_TH, received.routing, TIMEOUT_MS)
        y_TH, _, _ = mode.combine(again.x_NH, again.routing, TIMEOUT_MS)
        assert_same_bits(x_TH * torch.tensor(example.NUM_RANKS_HIT[rank])[:, None], y_TH)

    run_loopback(heap, program)


FORMATS: list[dict[str, object]] = [
    {},
    {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"},
    {"dispatch_dtype": "float8", "hidden": 256, "combine_dtype": "bfloat16"},
    {"chunk_tokens": 11},
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
        mode = Throughput(Group(transport), config, regions)
        mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
        far = [r for r in range(8) if topology.node_of(r) != topology.node_of(rank)]
        expected = sum(
            len({topology.node_of(r) for r in owners(ids, config)} - {topology.node_of(rank)})
            for ids in mine.ids_TK.tolist()
        )
        sent_bytes = int(mode.outbox.sent_bytes_R[far].sum())
        assert sent_bytes == expected * config.dispatch_format.num_bytes

    run_loopback(heap, count, ranks_per_node=ranks_per_node)


def test_repeating_a_dispatch_sends_other_rows_the_same_way() -> None:
    config = make_config(4, 2, max_tokens=8)  # two chunks' worth
    heap, regions = make_heap(config)
    program = Round(config, regions, ())

    def repeat(transport: Transport) -> None:
        inputs = program.inputs(4)
        assert max(len(given_.x_TH) for given_ in inputs) == 8
        mine = inputs[transport.rank]
        mode = Throughput(Group(transport), config, regions)
        first = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
        for factor in (2.0, 4.0, 8.0, 16.0):
            again = mode.dispatch_again(mine.x_TH * factor, first.routing, TIMEOUT_MS)
            assert again.status.ok
            assert_same_bits(first.x_NH * factor, again.x_NH)
            assert_same_bits(first.ids_NK, again.ids_NK)

    run_loopback(heap, repeat, ranks_per_node=2)
    for seed in range(8):
        results_of(run_faulty(heap, repeat, seed=seed, ranks_per_node=2))


def test_static_rows_are_the_same_rows_and_padding_and_too_many_are_refused_everywhere() -> None:
    config = make_config(4, 4)
    heap, regions = make_heap(config)
    program = Round(config, regions, ())

    def static(transport: Transport) -> None:
        inputs = program.inputs(1)
        mine = inputs[transport.rank]
        mode = Throughput(Group(transport), config, regions)
        with pytest.raises(ValueError, match="num_static_rows is 1: raise it on all ranks"):
            mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS, num_static_rows=1)
        received = mode.dispatch(
            mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS, num_static_rows=44
        )
        assert len(received.x_NH) == 44
        check_received(received, inputs, config, transport.rank)

    run_loopback(heap, static)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 15}, "must be a positive multiple of num_ranks"),
        ({"num_ranks": 16, "ranks_per_node": 3}, r"multiple of ranks_per_node \(3\)"),
        ({"combine_dtype": "float8", "hidden": 128}, "use bfloat16 or float32"),
        ({"max_tokens": 4096 * 4}, "4095 chunks of chunk_tokens"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_config(4, 2), **changes)  # type: ignore[arg-type]


def test_input_that_does_not_fit_is_refused() -> None:
    config = make_config(1, 1)
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        mode = Throughput(Group(transport), config, regions)
        ids_TK, weights_TK = torch.zeros(12, 4, dtype=torch.int64), torch.ones(12, 4)
        ids_TK += torch.arange(4)
        with pytest.raises(ValueError, match="at most 11: raise max_tokens"):
            mode.dispatch(torch.zeros(12, HIDDEN), ids_TK, weights_TK, TIMEOUT_MS)
        with pytest.raises(ValueError, match=r"rows must be \[12, 16\]"):
            mode.dispatch(torch.zeros(12, 8), ids_TK, weights_TK, TIMEOUT_MS)

    run_loopback(heap, program)
