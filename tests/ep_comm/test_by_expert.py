"""Dispatch and combine by expert against plain loops over all ranks' inputs, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

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
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.rows import dequantize_rows, quantize_rows
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 16, 4, 16, 6


def make_config(num_ranks: int, **changes: object) -> ExchangeConfig:
    fields: dict[str, object] = {
        "num_ranks": num_ranks,
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden": HIDDEN,
        "max_tokens": MAX_TOKENS,
        "dispatch_dtype": "float32",
        "combine_dtype": "float32",
    }
    return ExchangeConfig(**(fields | changes))  # type: ignore[arg-type]


def make_mode(
    transport: Transport,
    config: ExchangeConfig,
    regions: ExchangeRegions,
    *,
    is_plain: bool = False,
) -> ExpertExchange:
    """is_plain: over the transport even where its heaps are mapped."""
    rows = CompiledRows() if is_plain else None
    return ExpertExchange(Group(transport), config, regions, row_kernels=rows, poison_unused=True)


def scale_by_expert(result: Dispatched, config: ExchangeConfig, rank: int) -> Tensor:
    """Play the experts: expert e multiplies by e + 1. Unused rows stay NaN."""
    assert result.ranges is not None
    rows = result.rows
    if config.dispatch_dtype == "float8":
        assert result.scales is not None
        rows = dequantize_rows(rows, result.scales)
    if config.layout == "per_expert":
        factors = torch.arange(config.num_local) + 1 + rank * config.num_local
        return rows.float() * factors[:, None, None]
    y = torch.full(rows.shape, torch.nan)
    for e, (first, count) in enumerate(
        zip(result.ranges.first_row_E.tolist(), result.count_E.tolist(), strict=True)
    ):
        of_expert = slice(first, first + count)
        y[of_expert] = rows[of_expert].float() * (1 + e + rank * config.num_local)
    return y


def expected_rows(inputs: list[Inputs], expert: int) -> list[tuple[int, int]]:
    """Return the (source, token) rows of an expert, in order."""
    return [
        (source, token)
        for source, given_ in enumerate(inputs)
        for token, ids in enumerate(given_.ids_TK.tolist())
        if expert in ids
    ]


def on_the_wire(x_TH: Tensor, config: ExchangeConfig) -> Tensor:
    """Return the f32 values that arrive of `x_TH`."""
    if config.dispatch_dtype == "float8":
        return dequantize_rows(*quantize_rows(x_TH))
    return x_TH.float()


def expected_sum(inputs: Inputs, config: ExchangeConfig) -> Tensor:
    x_TH = on_the_wire(inputs.x_TH, config)
    back = torch.bfloat16 if config.combine_dtype == "bfloat16" else torch.float32
    y_TH = torch.zeros_like(x_TH)
    for k in range(config.top_k):
        ids_T = inputs.ids_TK[:, k]
        rows_TH = (x_TH * (ids_T + 1)[:, None]).to(back).float()
        y_TH = y_TH + rows_TH * (inputs.weights_TK[:, k] * (ids_T >= 0))[:, None]
    return y_TH.to(inputs.x_TH.dtype)


def check_dispatched(
    result: Dispatched, inputs: list[Inputs], config: ExchangeConfig, rank: int
) -> None:
    assert result.status.ok, result.status
    assert result.ranges is not None
    for e in range(config.num_local):
        rows = expected_rows(inputs, rank * config.num_local + e)
        count = len(rows)
        assert int(result.count_E[e]) == count
        first = int(result.ranges.first_row_E[e])
        if config.layout == "per_expert":
            assert first == e * config.num_ranks * config.max_tokens
        values = result.rows.reshape(-1, config.hidden)[first : first + count]
        info = result.info.reshape(-1)[first : first + count]
        assert info.tolist() == [token for _, token in rows]
        if rows:
            sent = torch.stack([inputs[s].x_TH[t] for s, t in rows])
            if config.dispatch_dtype == "float8":
                assert result.scales is not None
                scales = result.scales
                scales = scales.reshape(-1, scales.shape[-1])[first : first + count]
                quantized, expected_scales = quantize_rows(sent)
                assert_same_bits(expected_scales, scales)
                assert_same_bits(quantized.view(torch.uint8), values.view(torch.uint8))
            else:
                assert_same_bits(sent, values)
        begin = 0
        for source in range(config.num_ranks):
            num = sum(s == source for s, _ in rows)
            assert int(result.ranges.ranges_ER[e, source]) == (begin << 32) | num
            begin += num


def check_rest_is_poison(result: Dispatched, config: ExchangeConfig) -> None:
    assert result.ranges is not None
    used = torch.zeros(config.num_output_rows, dtype=torch.bool)
    for first, count in zip(
        result.ranges.first_row_E.tolist(), result.count_E.tolist(), strict=True
    ):
        used[first : first + count] = True
    rest = result.rows.reshape(-1, config.hidden).float()[~used]
    assert bool(rest.isnan().all())


@dataclass(frozen=True)
class Round:
    """One dispatch and combine of all ranks, checked inside each rank's program."""

    config: ExchangeConfig
    regions: ExchangeRegions
    seeds: tuple[int, ...]
    skew: bool = False
    dtype: torch.dtype = torch.float32
    is_plain: bool = False

    def inputs(self, seed: int) -> list[Inputs]:
        config = self.config
        return make_inputs(
            seed,
            config.num_ranks,
            config.num_experts,
            config.top_k,
            config.hidden,
            config.max_tokens,
            dtype=self.dtype,
            skew=self.skew,
        )

    def __call__(self, transport: Transport) -> list[Tensor]:
        config, rank = self.config, transport.rank
        mode = make_mode(transport, config, self.regions, is_plain=self.is_plain)
        combined = []
        for seed in self.seeds:
            inputs = self.inputs(seed)
            mine = inputs[rank]
            result = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
            check_dispatched(result, inputs, config, rank)
            check_rest_is_poison(result, config)
            y = scale_by_expert(result, config, rank)
            y_TH, status = mode.combine(y, result.handle, TIMEOUT_MS)
            assert status.ok, status
            assert_same_bits(expected_sum(mine, config), y_TH)
            combined.append(y_TH)
        return combined


def test_the_worked_example() -> None:
    config = ExchangeConfig(
        num_ranks=example.NUM_RANKS,
        num_experts=example.NUM_EXPERTS,
        top_k=example.TOP_K,
        hidden=8,
        max_tokens=example.MAX_TOKENS,
        dispatch_dtype="float32",
        combine_dtype="float32",
    )
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        rank = transport.rank
        mode = make_mode(transport, config, regions)
        x_TH = example.inputs_of(rank, config.hidden)
        result = mode.dispatch(x_TH, example.IDS[rank], example.WEIGHTS[rank], TIMEOUT_MS)
        assert result.count_E.tolist() == example.EXPERT_COUNTS[rank]
        assert result.ranges is not None
        for e, tokens in enumerate(example.SOURCE_INFO[rank]):
            assert result.info[e, : len(tokens)].tolist() == tokens
            pairs = [(int(r) >> 32, int(r) & 0xFFFFFFFF) for r in result.ranges.ranges_ER[e]]
            assert pairs == example.RANGES[rank][e]
        y = scale_by_expert(result, config, rank)
        y_TH, _ = mode.combine(y, result.handle, TIMEOUT_MS)
        expected = x_TH * torch.tensor(example.COMBINED_FACTORS[rank])[:, None]
        torch.testing.assert_close(y_TH, expected, rtol=1e-6, atol=0)

    run_loopback(heap, program)


FORMATS: list[dict[str, object]] = [
    {},
    {"layout": "packed"},
    {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"},
    {"dispatch_dtype": "bfloat16", "layout": "packed"},
    {"dispatch_dtype": "float8", "hidden": 256, "combine_dtype": "bfloat16"},
    {"dispatch_dtype": "float8", "hidden": 128, "layout": "packed"},
]


@pytest.mark.parametrize("skew", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize("changes", FORMATS, ids=lambda c: "-".join(map(str, c.values())) or "f32")
@pytest.mark.parametrize("is_plain", [False, True], ids=["one_call", "by_transport"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_every_format_equals_the_plain_loops(
    num_ranks: int, is_plain: bool, changes: dict[str, object], skew: bool
) -> None:
    config = make_config(num_ranks, **changes)
    heap, regions = make_heap(config)
    dtype = torch.float32 if config.dispatch_dtype == "float32" else torch.bfloat16
    run_loopback(heap, Round(config, regions, (1, 2, 3), skew, dtype, is_plain))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@settings(max_examples=num_examples(quick=5))
@given(seed=st.integers(0, 2**31), skew=st.booleans())
def test_a_transport_that_delays_reorders_and_tears_changes_no_bit(
    num_ranks: int, seed: int, skew: bool
) -> None:
    config = make_config(num_ranks)
    heap, regions = make_heap(config)
    program = Round(config, regions, (seed, seed + 1, seed + 2), skew)
    assert_faults_change_nothing(heap, program, seed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_faulty_transport_catches_a_forgotten(mutation: type[FaultyTransport]) -> None:
    config = make_config(4)
    heap, regions = make_heap(config)
    results = run_faulty(heap, Round(config, regions, tuple(range(8))), seed=1, wrapper=mutation)
    assert any(isinstance(result, AssertionError) for result in results)


def test_phases_of_two_calls_overlap() -> None:
    config = make_config(4)
    heap, regions = make_heap(config)
    program = Round(config, regions, ())

    def overlapping(transport: Transport) -> None:
        rank = transport.rank
        mode = make_mode(transport, config, regions)
        inputs = [program.inputs(seed) for seed in (5, 6)]
        sent = [
            mode.send_dispatch(i[rank].x_TH, i[rank].ids_TK, i[rank].weights_TK) for i in inputs
        ]
        results = [flight.receive(TIMEOUT_MS) for flight in sent]
        back = [
            mode.send_combine(scale_by_expert(result, config, rank), result.handle)
            for result in reversed(results)
        ]
        for flight, given_ in zip(back, reversed(inputs), strict=True):
            y_TH, status = flight.receive(TIMEOUT_MS)
            assert status.ok
            assert_same_bits(expected_sum(given_[rank], config), y_TH)

    run_loopback(heap, overlapping)
    results_of(run_faulty(heap, overlapping, seed=3))


def test_a_third_live_result_is_refused_and_a_combine_makes_room() -> None:
    config = make_config(2)
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        mode = make_mode(transport, config, regions)
        x_TH, ids_TK = torch.ones(1, HIDDEN), torch.tensor([[0, 5, 9, -1]])
        weights_TK = torch.ones(1, TOP_K)
        results = [mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS) for _ in range(2)]
        with pytest.raises(LiveResultError, match="combine that of call 1 first"):
            mode.send_dispatch(x_TH, ids_TK, weights_TK)
        mode.combine(results[0].rows, results[0].handle, TIMEOUT_MS)
        third = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
        with pytest.raises(LiveResultError, match="call 1 was combined"):
            mode.send_combine(results[0].rows, results[0].handle)
        for result in (results[1], third):
            mode.combine(result.rows, result.handle, TIMEOUT_MS)

    run_loopback(heap, program)


@pytest.mark.parametrize(
    ("x_shape", "ids", "message"),
    [
        ((7, HIDDEN), [[0, 1, 2, 3]] * 7, "7 tokens .* at most 6 fit: raise max_tokens"),
        ((1, 8), [[0, 1, 2, 3]], r"rows must be \[T, 16\]"),
        ((2, HIDDEN), [[0, 1, 2, 3]], "T = 1"),
        ((1, HIDDEN), [[0, 1, 2, 16]], "outside -1..15"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    x_shape: tuple[int, int], ids: list[list[int]], message: str
) -> None:
    config = make_config(1)
    heap, regions = make_heap(config)
    [transport] = LoopbackGroup(1, heap.num_bytes).transports
    mode = make_mode(transport, config, regions)
    with pytest.raises(ValueError, match=message):
        mode.send_dispatch(torch.zeros(x_shape), torch.tensor(ids), torch.ones(len(ids), TOP_K))
    no_ids, no_weights = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4)
    fine = mode.dispatch(torch.zeros(0, HIDDEN), no_ids, no_weights, 1.0)
    assert fine.status.ok
    assert fine.status.epoch == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 15}, "must be a positive multiple of num_ranks"),
        ({"dispatch_dtype": "float8"}, r"hidden \(16\) must be a multiple of 128"),
        ({"chunk_tokens": 2}, r"leave out chunk_tokens \(2\)"),
        ({"layout": "packed", "ranks_per_node": 1}, r"or choose layout per_token"),
        ({"combine_dtype": "float8"}, "use bfloat16 or float32"),
        ({"max_tokens": 0}, r"max_tokens \(0\)"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(2, **changes)


def test_a_token_travels_once_to_each_rank_that_it_hits() -> None:
    config = make_config(4)
    heap, regions = make_heap(config)

    def program(transport: Transport) -> None:
        mode = make_mode(transport, config, regions)
        ids_TK = torch.tensor([[0, 1, 2, 3], [0, 4, 8, 9], [-1, -1, -1, -1]])
        mode.send_dispatch(torch.zeros(3, HIDDEN), ids_TK, torch.ones(3, 4)).receive(TIMEOUT_MS)
        copies = mode.send_buffer.sent_bytes_R // config.dispatch_format.num_bytes
        assert copies.tolist() == [2, 1, 1, 0]

    run_loopback(heap, program)
