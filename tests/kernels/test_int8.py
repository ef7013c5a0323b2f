"""int8 weights: against the definition of q8_0 in plain torch, and bits that depend on one row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from whalepod.kernels.cpu import Int8CpuKernels
from whalepod.kernels.reference import ReferenceKernels

KERNELS = Int8CpuKernels(num_threads=2)
REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 32


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x: Tensor, *, is_weight: bool) -> Tensor:
    """Return what q8_0 keeps of `x` in f32; weights have f16 scales, rows f32 ones."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(
        -1, (-1, BLOCK)
    )
    scale = padded.abs().amax(dim=-1, keepdim=True) / 127
    values = torch.where(scale > 0, padded / scale, 0.0).round()
    scale = scale.half().float() if is_weight else scale
    return (values * scale).flatten(-2)[..., : x.shape[-1]]


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
    expected = rounded(x, is_weight=False) @ rounded(weight, is_weight=True).T
    packed = KERNELS.pack_linear(weight)
    # a value halfway between two steps may fall to either side: 1/254 of one product
    assert_close(KERNELS.linear_f32(x, packed), expected, 4e-3)
    assert_close(KERNELS.linear(x, packed), expected, 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_heads(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, 3, 150, dtype=dtype)[..., :100], random(3, 100, 70, dtype=dtype)
    columns = rounded(weight.transpose(1, 2), is_weight=True)
    expected = torch.einsum("tna,nba->tnb", rounded(x, is_weight=False), columns)
    assert_close(KERNELS.heads(x, KERNELS.pack_heads(weight)), expected, 8e-3)


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
    expected = REFERENCE.experts(x.float(), ids, weights, (gate_up.float(), down.float()))
    packed = KERNELS.pack_experts(gate_up, down)
    assert_close(KERNELS.experts(x, ids, weights, packed), expected, 3e-2)
    expected = REFERENCE.gated_mlp(x.float(), (gate_up[0].float(), down[0].float()), x.float())
    packed = KERNELS.pack_gated_mlp(gate_up[0], down[0])
    assert_close(KERNELS.gated_mlp(x, packed, x), expected, 3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x = random(40, 300, dtype=dtype, seed=1)
    linear = KERNELS.pack_linear(random(70, 300, dtype=dtype))
    experts = KERNELS.pack_experts(
        random(5, 2 * 40, 300, dtype=dtype), random(5, 300, 40, dtype=dtype)
    )
    ids = random(40, 5, seed=2).argsort(dim=-1)[:, :2].contiguous()
    weights = random(40, 2, seed=3)

    def compute(rows: slice) -> list[Tensor]:
        return [
            KERNELS.linear(x[rows], linear),
            KERNELS.experts(x[rows], ids[rows], weights[rows], experts),
        ]

    together = compute(slice(0, 40))
    for first, last in ((0, 1), (1, 3), (5, 8), (7, 11), (30, 37), (3, 40)):
        for alone, expected in zip(compute(slice(first, last)), together, strict=True):
            assert torch.equal(alone, expected[first:last])


def test_rows_of_zeros_stay_zeros() -> None:
    packed = KERNELS.pack_linear(torch.zeros(20, 64))
    assert torch.equal(KERNELS.linear(random(3, 64), packed), torch.zeros(3, 20))
    packed = KERNELS.pack_linear(random(20, 64))
    assert torch.equal(KERNELS.linear(torch.zeros(3, 64), packed), torch.zeros(3, 20))
