"""Compiled row kernels have the bits of the plain ones."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.ep_comm import test_by_expert as expert_case
from tests.ep_comm.groups import TIMEOUT_MS, make_inputs, num_examples, run_loopback
from tests.equality import assert_same_bits
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import (
    Experts,
    RowKernels,
    SendRows,
    SpreadRows,
    UnpackedRows,
)
from whalepod.ep_comm.row_kernels.plain import PlainRows
from whalepod.ep_comm.rows import RowFormat, raw
from whalepod.ep_comm.transport.interface import Transport

R, E, K, M = 4, 16, 3, 9
NUM_LOCAL = E // R
KERNELS: tuple[RowKernels, RowKernels] = (PlainRows(), CompiledRows())

FORMATS = [
    RowFormat(hidden=24, dtype="float32", num_ids=K),
    RowFormat(hidden=24, dtype="bfloat16", num_ids=K, num_weights=K),
    RowFormat(hidden=256, dtype="float8", num_ids=K),
    RowFormat(hidden=512, dtype="float8", num_ids=K, num_weights=K),
]
DTYPES = [torch.float32, torch.bfloat16]

seeds = st.integers(0, 2**31)


def same(found: list[Tensor]) -> None:
    """Check that both kernels gave the same bits."""
    expected, actual = found
    assert_same_bits(expected, actual)


def make_tokens(seed: int, row_format: RowFormat, rank: int = 0) -> SendRows:
    inputs = make_inputs(seed, R, E, K, row_format.hidden, M)[rank]
    values_TH, scales_TG = inputs.x_TH.to(row_format.torch_dtype), None
    if row_format.num_scales:
        values_TH, scales_TG = PlainRows().quantize(inputs.x_TH)
    return SendRows(
        values_TH=values_TH,
        scales_TG=scales_TG,
        ids_TK=inputs.ids_TK,
        weights_TK=inputs.weights_TK if row_format.num_weights else None,
    )


def make_records(seed: int, row_format: RowFormat) -> tuple[Tensor, dict[int, int]]:
    """Return what rank 1 received from all ranks but the last, and their counts."""
    records = torch.full((R, M, row_format.num_bytes), 255, dtype=torch.uint8)
    counts = {}
    for rank in range(R - 1):
        tokens = make_tokens(seed, row_format, rank)
        is_in_TR = PlainRows().destinations(tokens.ids_TK, E, R)
        blocks = [None, records[rank], None, None]
        counts[rank] = PlainRows().pack(row_format, tokens, is_in_TR, blocks)[1]
    return records, counts


@pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: f"{f.dtype}-{f.hidden}")
@settings(max_examples=num_examples(quick=10))
@given(seed=seeds, first=st.integers(0, 2))
def test_records_are_written_alike(row_format: RowFormat, seed: int, first: int) -> None:
    tokens = make_tokens(seed, row_format)
    is_in = [kernels.destinations(tokens.ids_TK, E, R) for kernels in KERNELS]
    same(is_in)
    found = []
    for kernels in KERNELS:
        blocks = torch.full((R, M, row_format.num_bytes), 255, dtype=torch.uint8)
        targets = [blocks[0], None, blocks[2], blocks[3]]
        counts = kernels.pack(row_format, tokens, is_in[0][first:], targets, first)
        assert counts[1] == 0
        found.append(torch.cat([blocks.flatten(), torch.tensor(counts, dtype=torch.uint8)]))
    same(found)


@pytest.mark.parametrize("per_expert", [True, False], ids=["per_expert", "packed"])
@pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: f"{f.dtype}-{f.hidden}")
@settings(max_examples=num_examples(quick=5))
@given(seed=seeds)
def test_records_are_spread_over_experts_alike(
    row_format: RowFormat, per_expert: bool, seed: int
) -> None:
    records, counts = make_records(seed, row_format)
    num_rows = R * M * (NUM_LOCAL if per_expert else K)
    outputs = []
    for kernels in KERNELS:
        out = SpreadRows(
            rows_SH=torch.zeros(num_rows, row_format.hidden).to(row_format.torch_dtype),
            info_S=torch.full((num_rows,), -1, dtype=torch.int32),
            scales_SG=torch.zeros(num_rows, row_format.num_scales),
            row_of_NK=torch.full((R * M, K), -7),
            expert_S=torch.full((num_rows,), -7),
            count_E=torch.full((NUM_LOCAL,), -7, dtype=torch.int32),
            first_row_E=torch.full((NUM_LOCAL,), -7),
            ranges_ER=torch.full((NUM_LOCAL, R), -7),
            count_R=torch.full((R,), -7),
            num_rows=torch.full((1,), -7),
        )
        experts = Experts(
            first=NUM_LOCAL,
            num_local=NUM_LOCAL,
            num_ranks=R,
            rows_per_expert=R * M if per_expert else 0,
        )
        kernels.spread(row_format, records, counts, experts, out)
        outputs.append(out)
    for field in fields(SpreadRows):
        same([raw(getattr(out, field.name)) for out in outputs])


@pytest.mark.parametrize(
    "row_format",
    [FORMATS[1], RowFormat(hidden=256, dtype="float8", num_ids=K, num_weights=K)],
    ids=lambda f: f.dtype,
)
@settings(max_examples=num_examples(quick=10))
@given(seed=seeds)
def test_records_are_unpacked_alike(row_format: RowFormat, seed: int) -> None:
    records, counts = make_records(seed, row_format)
    found: list[list[Tensor]] = []
    for kernels in KERNELS:
        num_rows = sum(counts.values()) + 2
        arrived = UnpackedRows(
            x_NH=torch.zeros(num_rows, row_format.hidden, dtype=row_format.torch_dtype),
            scales_NG=torch.zeros(num_rows, row_format.num_scales),
            ids_NK=torch.full((num_rows, K), -1),
            weights_NK=torch.zeros(num_rows, K),
            info_N=torch.full((num_rows,), -1, dtype=torch.int32),
            count_E=torch.zeros(NUM_LOCAL, dtype=torch.int64),
        )
        first = 1
        for rank, count in counts.items():
            kernels.unpack(row_format, records[rank, :count], NUM_LOCAL, arrived, first)
            first += count
        assert int(arrived.count_E.sum()) == int((arrived.ids_NK >= 0).sum())
        assert arrived.info_N[[0, -1]].tolist() == [-1, -1]
        found.append([raw(getattr(arrived, field.name)) for field in fields(arrived)])
    for expected, actual in zip(*found, strict=True):
        assert_same_bits(expected, actual)


def random_rows(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, 40, generator=generator).to(dtype)
    return wide[:, :33]  # rows that are a part of records


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@settings(max_examples=num_examples(quick=5))
@given(seed=seeds)
def test_rows_are_collected_and_summed_alike(
    source: torch.dtype, target: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows_SH = random_rows(seed, 20, source)
    row_of_nK = torch.randint(-1, 20, (6, K), generator=generator)
    collected, added = [], []
    for kernels in KERNELS:
        out_SH = torch.zeros(6 * K, 40, dtype=target)[:, :33]
        count = kernels.collect(rows_SH, row_of_nK, out_SH)
        assert count == int((row_of_nK >= 0).sum())
        collected.append(out_SH)
        sums_TH = torch.ones(25, 33)
        is_for_T = torch.ones(25, dtype=torch.bool)
        is_for_T[::5] = False
        kernels.add_rows(rows_SH, is_for_T, sums_TH)
        added.append(sums_TH)
    same(collected)
    same(added)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@settings(max_examples=num_examples(quick=5))
@given(seed=seeds)
def test_what_comes_back_is_combined_alike(
    source: torch.dtype, target: torch.dtype, seed: int
) -> None:
    inputs = make_inputs(seed, R, E, K, 33, M)[0]
    returned_RSH = random_rows(seed, R * M * K, source).unflatten(0, (R, M * K))
    has_answered_R = torch.tensor([True, False, True, True])
    same(
        [
            kernels.combine(
                returned_RSH, has_answered_R, inputs.ids_TK, NUM_LOCAL, inputs.weights_TK, target
            )
            for kernels in KERNELS
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=num_examples(quick=10))
@given(seed=seeds, exponent=st.integers(-30, 30))
def test_rows_are_cast_to_fp8_alike(dtype: torch.dtype, seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 4, (5, 256), generator=generator).float())
    x_TH = (torch.randn(5, 256, generator=generator) * spread * 2.0**exponent).to(dtype)
    x_TH[1, :128] = 0
    values, scales = zip(*(k.quantize(x_TH) for k in KERNELS), strict=True)
    same([raw(v) for v in values])
    same(list(scales))


def test_every_f32_between_two_codes_is_rounded_as_torch_does() -> None:
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    both = torch.cat([near, -near])
    x_TH = torch.full((1, -(-len(both) // 127) * 128), 448.0)  # an amax of 448: the scale is 1
    x_TH.view(-1, 128)[:, 1:].flatten()
    padded = torch.zeros(x_TH.numel() // 128 * 127)
    padded[: len(both)] = both
    x_TH.view(-1, 128)[:, 1:] = padded.view(-1, 127)
    values_TH, scales_TG = CompiledRows().quantize(x_TH)
    assert bool((scales_TG == 1).all())
    assert_same_bits(x_TH.to(torch.float8_e4m3fn).view(torch.uint8), values_TH.view(torch.uint8))


@pytest.mark.parametrize("ids", [[[0, 1, 16]], [[0, -2, 1]], [[4, 2, 4]]])
def test_bad_choices_are_refused_alike(ids: list[list[int]]) -> None:
    for kernels in KERNELS:
        with pytest.raises(ValueError, match=r"outside -1\.\.15|token 0 selects an expert twice"):
            kernels.destinations(torch.tensor(ids), E, R)


def test_an_exchange_by_expert_runs_on_the_plain_kernels_too() -> None:
    config = expert_case.make_config(2, dispatch_dtype="bfloat16")
    heap, regions = expert_case.make_heap(config)
    program = expert_case.Round(config, regions, ())

    def run(transport: Transport) -> list[Tensor]:
        found = []
        for kernels in KERNELS:
            inputs = program.inputs(3)[transport.rank]
            mode = ExpertExchange(Group(transport), config, regions, row_kernels=kernels)
            mode.resume(1 + 10 * (kernels is KERNELS[1]))
            x_TH = inputs.x_TH.bfloat16()
            result = mode.dispatch(x_TH, inputs.ids_TK, inputs.weights_TK, TIMEOUT_MS)
            y_TH, status = mode.combine(result.rows, result.handle, TIMEOUT_MS)
            assert status.ok
            found.append(y_TH)
        return found

    for found in run_loopback(heap, run):
        same(found)
