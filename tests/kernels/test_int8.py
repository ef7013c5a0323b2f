"""int8 weights: against its plain twin, and bits that depend on one row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from whalepod import Engine, SamplingParams
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.reference import ReferenceKernels
from whalepod.kernels.reference_int8 import (
    Int8ReferenceKernels,
    blocks_of,
    join_blocks,
    round_blocks,
    round_weight,
)

KERNELS = CpuKernels(num_threads=2, is_int8=True)
TWIN, EXACT = Int8ReferenceKernels(), ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unpacked(panels: Tensor, num_columns: int, length: int) -> Tensor:
    """Return the weight `[L, N, K]` that packed bytes stand for, in f32; see `int8.py`."""
    steps = panels.view(*panels.shape[:3], -1)
    values = steps[..., :1024].unflatten(-1, (2, 8, 16, 4)).float() - 128
    scales = steps[..., 1024:].contiguous().view(torch.float16).float().unflatten(-1, (2, 16))
    blocks = values.permute(0, 1, 5, 2, 3, 4, 6).flatten(-2)  # [L, groups, 16, steps, 2, 32]
    weight = blocks * scales.permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return weight.flatten(3).flatten(1, 2)[:, :num_columns, :length]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    if expected.numel():
        difference = float((actual.float() - expected.float()).abs().max())
        assert difference <= tolerance * float(expected.float().abs().max())


@pytest.mark.parametrize(
    ("dtype", "num_rows"), list(itertools.product(DTYPES, [0, 1, 2, 3, 5, 16, 33])), ids=str
)
@pytest.mark.parametrize(("num_columns", "length"), [(1, 1), (67, 100), (64, 1024), (130, 257)])
def test_linear(dtype: torch.dtype, num_rows: int, num_columns: int, length: int) -> None:
    x, weight = random(num_rows, length, dtype=dtype), random(num_columns, length, dtype=dtype)
    packed, twin = KERNELS.pack_linear(weight), TWIN.pack_linear(weight)
    # where two scales are equally good to f32, another one may have been taken
    assert_close(KERNELS.linear_f32(x, packed), TWIN.linear_f32(x, twin), 4e-3)
    assert_close(KERNELS.linear(x, packed), TWIN.linear(x, twin), 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sensitive_weights_and_their_rows_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = random(9, 288, dtype=dtype), random(128, 288, dtype=dtype)
    for kernels in (KERNELS, TWIN):
        packed = kernels.pack_linear(weight, is_sensitive=True)
        assert_close(kernels.linear_f32(x, packed), x.float() @ weight.float().T, 1e-5)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 11, 16, 40])
@pytest.mark.parametrize("length", [30, 64, 200, 1024])
def test_tiles_give_the_bits_of_vectors(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, length: int
) -> None:
    x, packed = random(num_rows, length), KERNELS.pack_linear(random(200, length, seed=1))
    found = []
    for tile_rows in (1, 1 << 62):
        monkeypatch.setattr(packed.format, "tile_rows", tile_rows)
        found.append(KERNELS.linear_f32(x, packed))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_batched_linear(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, 3, 150, dtype=dtype)[..., :100], random(3, 100, 70, dtype=dtype)
    expected = TWIN.batched_linear(x, TWIN.pack_batched_linear(weight))
    assert_close(KERNELS.batched_linear(x, KERNELS.pack_batched_linear(weight)), expected, 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
@pytest.mark.parametrize("inner", [32, 40, 96])
def test_gated_mlps(dtype: torch.dtype, num_rows: int, inner: int) -> None:
    num_experts, hidden, top_k = 6, 72, 3
    gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype, seed=1) / 8
    down = random(num_experts, hidden, inner, dtype=dtype, seed=2) / 8
    x, weights = random(num_rows, hidden, dtype=dtype), random(num_rows, top_k).sigmoid()
    ids = random(num_rows, num_experts, seed=3).argsort(dim=-1)[:, :top_k].contiguous()
    ids[random(num_rows, top_k, seed=4) > 1] = -1
    actual = KERNELS.experts(x, ids, weights, KERNELS.pack_experts(gate_up, down))
    exact = EXACT.experts(x.float(), ids, weights, (gate_up.float(), down.float()))
    assert_close(actual, exact, 3e-2)
    assert_close(actual, TWIN.experts(x, ids, weights, TWIN.pack_experts(gate_up, down)), 1e-2)
    gate_up, down = gate_up[0], down[0]
    actual = KERNELS.gated_mlp(x, KERNELS.pack_gated_mlp(gate_up, down), x)
    exact = EXACT.gated_mlp(x.float(), (gate_up.float(), down.float()), x.float())
    assert_close(actual, exact, 3e-2)
    assert_close(actual, TWIN.gated_mlp(x, TWIN.pack_gated_mlp(gate_up, down), x), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x = random(40, 300, dtype=dtype, seed=1)
    linear = KERNELS.pack_linear(random(70, 300, dtype=dtype))
    exact = KERNELS.pack_linear(random(128, 288, dtype=dtype), is_sensitive=True)
    experts = KERNELS.pack_experts(
        random(5, 2 * 40, 300, dtype=dtype), random(5, 300, 40, dtype=dtype)
    )
    ids = random(40, 5, seed=2).argsort(dim=-1)[:, :2].contiguous()
    weights = random(40, 2, seed=3)

    def compute(rows: slice) -> list[Tensor]:
        return [
            KERNELS.linear(x[rows], linear),
            KERNELS.linear(x[rows, :288].contiguous(), exact),
            KERNELS.experts(x[rows], ids[rows], weights[rows], experts),
        ]

    together = compute(slice(0, 40))
    for first, last in ((0, 1), (1, 3), (5, 8), (7, 11), (30, 37), (3, 40)):
        for alone, expected in zip(compute(slice(first, last)), together, strict=True):
            assert torch.equal(alone, expected[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_rounded_with_the_best_of_many_scales(dtype: torch.dtype) -> None:
    weight = random(3, 37, 200, dtype=dtype)
    weight[0, 5, 32:64] = 0
    weight[1, 3, :32] *= torch.where(torch.arange(32) == 7, 100.0, 1e-3)
    packed = KERNELS.pack_batched_linear(weight.transpose(1, 2))
    actual, expected = unpacked(packed.tensor, 37, 200), round_weight(weight)
    plain = join_blocks(torch.mul(*round_blocks(blocks_of(weight), q8_0_scale(weight))), 200)

    def squared_error(rounded: Tensor) -> Tensor:
        return blocks_of(rounded - weight.float()).square().sum(dim=-1)

    least, allowed = squared_error(expected), squared_error(plain)
    # where two scales are equally good to f32, another one may have been taken
    assert torch.allclose(squared_error(actual), least, rtol=1e-4, atol=1e-12)
    assert (squared_error(actual) <= allowed * (1 + 1e-5)).all()
    assert float(squared_error(actual).sum() / allowed.sum()) < 0.8
    assert torch.equal(actual[0, 5, 32:64], torch.zeros(32))


def q8_0_scale(weight: Tensor) -> Tensor:
    return blocks_of(weight).abs().amax(dim=-1, keepdim=True) / 127


def test_a_row_of_a_weight_is_rounded_by_itself() -> None:
    weight = random(50, 100)
    together = unpacked(KERNELS.pack_linear(weight).tensor, 50, 100)[0]
    for first, last in ((0, 1), (17, 20), (33, 50)):
        alone = KERNELS.pack_linear(weight[first:last].contiguous())
        assert torch.equal(unpacked(alone.tensor, last - first, 100)[0], together[first:last])


def test_rows_of_zeros_stay_zeros() -> None:
    packed = KERNELS.pack_linear(torch.zeros(20, 64))
    assert torch.equal(KERNELS.linear(random(3, 64), packed), torch.zeros(3, 20))
    packed = KERNELS.pack_linear(random(20, 64))
    assert torch.equal(KERNELS.linear(torch.zeros(3, 64), packed), torch.zeros(3, 20))


def test_a_model_on_the_twin_answers_as_on_the_kernels() -> None:
    answers = []
    for kernels in ("auto", "reference"):
        with Engine("tiny", max_model_len=256, kernels=kernels, quantization="int8") as engine:
            params = SamplingParams(temperature=0, max_tokens=12)
            [answer] = engine.generate("The capital of France is", params)
            answers.append(answer.text)
    assert answers[0] == answers[1]
