"""The CPU kernels against the reference: every operation, both dtypes, few and many rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from whalepod.ep_comm.rows import weighted_sum
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import BLOCK_TOKENS, GateConfig
from whalepod.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = [0, 1, 2, 3, 4, 5, 8, 16, 33]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}

CPU = CpuKernels(num_threads=1)
REFERENCE = ReferenceKernels()

cases = pytest.mark.parametrize(
    ("dtype", "num_rows"), list(itertools.product(DTYPES, NUM_ROWS)), ids=str
)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare relative to the largest expected value; infinities must match."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if not expected.numel():
        return
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite])
    scale = float(expected[finite].abs().max()) if finite.any() else 0.0
    difference = float((actual[finite] - expected[finite]).abs().max()) if finite.any() else 0.0
    assert difference <= tolerance * max(scale, 1e-30), (difference, scale)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cases
@pytest.mark.parametrize(("num_columns", "length"), [(1, 1), (67, 100), (64, 1024), (130, 257)])
def test_linear(dtype: torch.dtype, num_rows: int, num_columns: int, length: int) -> None:
    x, weight = random(num_rows, length, dtype=dtype), random(num_columns, length, dtype=dtype)
    expected = x.double() @ weight.double().T
    packed = CPU.pack_linear(weight)
    assert_close(CPU.linear(x, packed), expected.to(dtype), TOLERANCE[dtype])
    assert_close(CPU.linear_f32(x, packed), expected.float(), 3e-6)


@cases
def test_norms(dtype: torch.dtype, num_rows: int) -> None:
    x, residual = (random(num_rows, 130, dtype=dtype, seed=seed) for seed in range(2))
    weight = random(130, dtype=dtype, seed=2)
    assert_close(
        CPU.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), TOLERANCE[dtype]
    )
    actual = CPU.add_rms_norm(x, residual, weight, 1e-5)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(actual[0], expected[0], TOLERANCE[dtype])
    assert torch.equal(actual[1], expected[1])


def test_the_gate_of_an_mlp_saturates() -> None:
    x = torch.tensor([[1000.0, -1000.0, 90.0, -90.0, 2.0, 2.0, 2.0, 2.0]])
    packed = CPU.pack_gated_mlp(torch.eye(8), torch.eye(8, 4))
    assert_close(CPU.gated_mlp(x, packed)[:, :4], torch.tensor([[2000.0, 0.0, 180.0, 0.0]]), 1e-6)


def make_angles(width: int) -> Tensor:
    angles = random(50, width // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@cases
def test_rope_of_strided_queries(dtype: torch.dtype, num_rows: int) -> None:
    x = random(num_rows, 3, 40, dtype=dtype)[..., 24:]
    positions = torch.arange(num_rows).flip(0)
    angles = make_angles(16)
    assert_close(
        CPU.rope(x, positions, angles), REFERENCE.rope(x, positions, angles), TOLERANCE[dtype]
    )


@cases
def test_write_latent(dtype: torch.dtype, num_rows: int) -> None:
    kv, weight = random(num_rows, 40, dtype=dtype), random(24, dtype=dtype)
    positions, angles = torch.arange(num_rows), make_angles(16)
    slots = torch.randperm(2 * BLOCK_TOKENS)[:num_rows]
    caches = [torch.full((2, BLOCK_TOKENS, 40), torch.nan, dtype=dtype) for _ in range(2)]
    for kernels, cache in zip((CPU, REFERENCE), caches, strict=True):
        kernels.write_latent(kv, weight, 1e-6, positions, angles, slots, cache)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_close(caches[0].nan_to_num(), caches[1].nan_to_num(), TOLERANCE[dtype])


@cases
@pytest.mark.parametrize("is_transposed", [False, True])
def test_batched_linear(dtype: torch.dtype, num_rows: int, is_transposed: bool) -> None:
    x = random(num_rows, 3, 150, dtype=dtype)[..., :100]
    weight = random(3, 70, 100, dtype=dtype).transpose(1, 2)
    weight = weight if is_transposed else weight.contiguous()
    expected = torch.einsum("tna,nab->tnb", x.double(), weight.double()).to(dtype)
    assert_close(CPU.batched_linear(x, CPU.pack_batched_linear(weight)), expected, TOLERANCE[dtype])


@cases
def test_experts(dtype: torch.dtype, num_rows: int) -> None:
    num_experts, inner, hidden, top_k = 6, 40, 72, 3
    gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype, seed=1)
    down = random(num_experts, hidden, inner, dtype=dtype, seed=2)
    x, weights = random(num_rows, hidden, dtype=dtype) / 8, random(num_rows, top_k).sigmoid()
    ids = random(num_rows, num_experts, seed=3).argsort(dim=-1)[:, :top_k].contiguous()
    ids[random(num_rows, top_k, seed=4) > 1] = -1
    actual = CPU.experts(x, ids, weights, CPU.pack_experts(gate_up, down))
    expected = REFERENCE.experts(x, ids, weights, (gate_up, down))
    assert_close(actual, expected, 3 * TOLERANCE[dtype])


@cases
@pytest.mark.parametrize("inner", [16, 40, 100])
def test_gated_mlp(dtype: torch.dtype, num_rows: int, inner: int) -> None:
    gate_up, down = random(2 * inner, 72, dtype=dtype) / 8, random(72, inner, dtype=dtype) / 8
    x, added = random(num_rows, 72, dtype=dtype, seed=1), random(num_rows, 72, dtype=dtype, seed=2)
    packed = CPU.pack_gated_mlp(gate_up, down)
    expected = REFERENCE.gated_mlp(x, (gate_up, down))
    assert_close(CPU.gated_mlp(x, packed), expected, 3 * TOLERANCE[dtype])
    assert_close(CPU.gated_mlp(x, packed, added), added + expected, 3 * TOLERANCE[dtype])


@cases
def test_embed(dtype: torch.dtype, num_rows: int) -> None:
    table, ids = random(50, 72, dtype=dtype), torch.arange(num_rows) * 7 % 50
    assert torch.equal(CPU.embed(ids, table), REFERENCE.embed(ids, table))


@cases
def test_absorb_queries(dtype: torch.dtype, num_rows: int) -> None:
    q, weight = random(num_rows, 3, 56, dtype=dtype), random(3, 40, 100, dtype=dtype)
    positions, angles = torch.arange(num_rows), make_angles(16)
    actual = CPU.absorb_queries(q, CPU.pack_batched_linear(weight), positions, angles)
    expected = REFERENCE.absorb_queries(q, weight, positions, angles)
    assert_close(actual, expected, TOLERANCE[dtype])


@cases
def test_rows_of_experts_are_what_their_sums_are_made_of(dtype: torch.dtype, num_rows: int) -> None:
    gate_up, down = random(6, 80, 72, dtype=dtype, seed=1), random(6, 72, 40, dtype=dtype, seed=2)
    x = random(num_rows, 72, dtype=dtype) / 8
    ids = torch.randint(6, (num_rows,), generator=torch.Generator().manual_seed(3))
    packed = CPU.pack_experts(gate_up, down)
    rows = CPU.expert_rows(x, ids, packed)
    assert_close(rows, REFERENCE.expert_rows(x, ids, (gate_up, down)), 3 * TOLERANCE[dtype])
    alone = CPU.experts(x, ids[:, None].contiguous(), torch.ones(num_rows, 1), packed)
    assert torch.equal(rows.to(dtype), alone), "rounded, they are the sum of one"


def test_experts_add_rows_as_ranks_add_those_of_others() -> None:
    """A product and a sum must not be fused: the bits of one rank are those of many."""
    gate_up, down = random(6, 80, 72, seed=1), random(6, 72, 40, seed=2)
    x, weights = random(5, 72) / 8, random(5, 3, seed=4)
    ids = torch.rand(5, 6, generator=torch.Generator().manual_seed(5)).topk(3).indices
    packed = CPU.pack_experts(gate_up, down)
    rows = CPU.expert_rows(x.repeat_interleave(3, 0), ids.flatten(), packed)
    summed = weighted_sum(rows, torch.arange(15).view(5, 3), weights)
    assert torch.equal(CPU.experts(x, ids, weights, packed), summed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_columns", "length"), [(600, 200, 96), (70, 320, 64)])
def test_linear_of_many_rows(
    dtype: torch.dtype, num_rows: int, num_columns: int, length: int
) -> None:
    x, weight = random(num_rows, length, dtype=dtype), random(num_columns, length, dtype=dtype)
    expected = x.double() @ weight.double().T
    assert_close(CPU.linear(x, CPU.pack_linear(weight)), expected.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [32, 145, 300])
def test_a_row_has_the_same_bits_in_long_blocks_as_in_short_ones(num_rows: int) -> None:
    """Many rows pass along parts of k by turns, and their sums are put aside between these."""
    x = random(num_rows, 608, dtype=torch.bfloat16)
    weight = random(64, 608, dtype=torch.bfloat16, seed=1)
    packed, num_whole = CPU.pack_linear(weight), num_rows // 16 * 16

    together = CPU.linear(x, packed)

    apart = [CPU.linear(rows, packed) for rows in x[:num_whole].split(16)]
    assert torch.equal(together[:num_whole], torch.cat(apart))
    assert_close(together, REFERENCE.linear(x, weight), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_per_expert(dtype: torch.dtype) -> None:
    gate_up, down = random(2, 64, 32, dtype=dtype), random(2, 32, 32, dtype=dtype)
    x, weights = random(200, 32, dtype=dtype) / 4, random(200, 2).sigmoid()
    ids = torch.randint(-1, 2, (200, 2), generator=torch.Generator().manual_seed(0))
    actual = CPU.experts(x, ids, weights, CPU.pack_experts(gate_up, down))
    expected = REFERENCE.experts(x, ids, weights, (gate_up, down))
    assert_close(actual, expected, 3 * TOLERANCE[dtype])


GATES = [
    GateConfig(num_experts=16, num_experts_per_token=3),
    GateConfig(num_experts=64, num_experts_per_token=8, num_groups=8, num_selected_groups=4),
    GateConfig(
        num_experts=12, num_experts_per_token=4, num_groups=3, num_selected_groups=2,
        scoring="softmax", group_score="max", normalize_weights=False, scaling_factor=2.5,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", GATES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gate(config: GateConfig, has_bias: bool, num_rows: int) -> None:
    logits = random(num_rows, config.num_experts)
    bias = random(config.num_experts, seed=1) if has_bias else None
    ids, weights = CPU.gate(logits, bias, config)
    expected_ids, expected_weights = REFERENCE.gate(logits, bias, config)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights, 1e-6)


@pytest.mark.parametrize("config", GATES)
@cases
def test_route(dtype: torch.dtype, num_rows: int, config: GateConfig) -> None:
    x, router = random(num_rows, 72, dtype=dtype), random(config.num_experts, 72, seed=1)
    ids, weights = CPU.route(x, CPU.pack_router(router), None, config)
    expected_ids, expected_weights = REFERENCE.route(x, router, None, config)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights, 1e-5)


def test_gate_prefers_the_lowest_id_among_ties() -> None:
    config = GateConfig(num_experts=8, num_experts_per_token=3, num_groups=4, num_selected_groups=2)
    ids, _ = CPU.gate(torch.zeros(1, 8), None, config)
    assert ids.tolist() == [[0, 1, 2]]


def test_gumbel_noise_is_bit_equal() -> None:
    seeds, positions = torch.tensor([0, -5, 2**62]), torch.tensor([0, 7, 2**40])
    actual = CPU.gumbel_noise(seeds, positions, 5000)
    assert torch.equal(actual, REFERENCE.gumbel_noise(seeds, positions, 5000))
    assert CPU.gumbel_noise(seeds[:0], positions[:0], 10).shape == (0, 10)


@pytest.mark.parametrize("width", [1, 5, 16, 17, 1536, 4097])
def test_draws_are_those_of_the_reference(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits_BV = torch.randn(7, width, generator=generator) * 3
    logits_BV[1] = logits_BV[1].round()  # ties: the first counts
    logits_BV[2, ::2] = -torch.inf
    temperatures_B = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.7, 1.3, 0.2])
    seeds_B = torch.randint(-(2**62), 2**62, (7,), generator=generator)
    positions_B, actual, expected = torch.arange(7) * 17, *torch.full((2, 7), -1)
    CPU.draw(logits_BV, temperatures_B, seeds_B, positions_B, actual)
    REFERENCE.draw(logits_BV, temperatures_B, seeds_B, positions_B, expected)
    assert actual.tolist() == expected.tolist()


def test_gumbel_noise_of_many_tokens_is_bit_equal() -> None:
    seeds, positions = torch.arange(20), torch.arange(20) * 1000
    actual = CPU.gumbel_noise(seeds, positions, 32_768)
    assert torch.equal(actual, REFERENCE.gumbel_noise(seeds, positions, 32_768))


def make_cache(
    lens: list[int], width: int, dtype: torch.dtype, spare_blocks: int
) -> tuple[Tensor, Tensor]:
    """Return a cache whose unused rows are NaN, and a table whose unused entries are garbage."""
    needed = [-(-length // BLOCK_TOKENS) for length in lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    cache = torch.full((num_blocks, BLOCK_TOKENS, width), torch.nan, dtype=dtype)
    tables = torch.full((len(lens), max(needed, default=0) + spare_blocks), 2147480000)
    for b, (length, count) in enumerate(zip(lens, needed, strict=True)):
        for i in range(count):
            block = order.pop()
            rows = min(BLOCK_TOKENS, length - i * BLOCK_TOKENS)
            cache[block, :rows] = random(rows, width, dtype=dtype, seed=block)
            tables[b, i] = block
    return cache, tables.int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_queries", "lens"),
    [
        ([1], [1]),
        ([1], [700]),
        ([1, 1, 1], [64, 0, 1300]),
        ([3, 0, 1, 2], [3, 9, 65, 1]),
        ([1] * 20, list(range(490, 530, 2))),
        ([40], [600]),
        ([], []),
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(4, 32, 16), (9, 72, 8), (16, 64, 32)])
@pytest.mark.parametrize("first_key", [0, 1])
def test_mla_attention(
    dtype: torch.dtype, num_queries: list[int], lens: list[int], num_heads: int, rank: int,
    rope: int, first_key: int,
) -> None:  # fmt: skip
    cache, tables = make_cache(lens, rank + rope, dtype, spare_blocks=2)
    starts = torch.tensor([0, *itertools.accumulate(num_queries)], dtype=torch.int32)
    lens_B = torch.tensor(lens, dtype=torch.int32)
    q = random(int(starts[-1]), num_heads, rank + rope, dtype=dtype)
    arguments = (q, cache, starts, lens_B, tables, 0.2, rank, first_key)
    if first_key:
        cache[tables[lens_B > 0][:, 0].long(), 0] = torch.nan
    o, lse = CPU.mla_attention(*arguments)
    expected_o, expected_lse = REFERENCE.mla_attention(*arguments)
    assert_close(o, expected_o, 2 * TOLERANCE[dtype])
    assert_close(lse, expected_lse, 1e-5)


def test_attention_raises_its_maximum_when_later_keys_exceed_it() -> None:
    """Later pages, then one early key, score hundreds higher than what was summed before them."""
    num_keys, width, rank = 300, 96, 64
    cache, tables = make_cache([num_keys], width, torch.bfloat16, spare_blocks=0)
    q = random(1, 16, width, dtype=torch.bfloat16)
    for position, factor in ((150, 20.0), (299, 40.0)):
        cache[tables[0, position // BLOCK_TOKENS], position % BLOCK_TOKENS] = q[0, 3] * factor
    starts, lens = torch.tensor([0, 1]).int(), torch.tensor([num_keys]).int()
    arguments = (q, cache, starts, lens, tables, 0.1, rank)
    o, lse = CPU.mla_attention(*arguments)
    expected_o, expected_lse = REFERENCE.mla_attention(*arguments)
    assert float(expected_lse[0, 3]) > 300
    assert_close(o, expected_o, 1e-2)
    assert_close(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (5, 70), (64, 64), (100, 333)])
@pytest.mark.parametrize(("width", "value_width"), [(48, 32), (96, 64)])
def test_mla_prefill(
    dtype: torch.dtype, num_queries: int, num_keys: int, width: int, value_width: int
) -> None:
    q, k = (
        random(num_tokens, 4, width, dtype=dtype, seed=seed)
        for seed, num_tokens in enumerate((num_queries, num_keys))
    )
    v = random(num_keys, 4, value_width, dtype=dtype, seed=2)
    assert_close(
        CPU.mla_prefill(q, k, v, 0.15), REFERENCE.mla_prefill(q, k, v, 0.15), 2 * TOLERANCE[dtype]
    )
