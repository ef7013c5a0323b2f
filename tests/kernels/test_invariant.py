"""Batch-invariant kernels: the bits of a row in any company, and agreement with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.equality import assert_same_bits
from tests.kernels.test_reference import PagedCase, noise
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import GateConfig
from whalepod.kernels.reference import ReferenceKernels

KERNELS = CpuKernels(num_threads=2, is_invariant=True)
COUNTS = [*range(1, 81), 127, 128, 129, 200]
FEW_COUNTS = [2, 3, 4, 9, 15, 16, 17, 33, 49, 200]
SHAPES = [(7, 13), (96, 48), (32, 20), (256, 256), (300, 512), (64, 1408), (1024, 192)]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_rows_are_independent(
    function: Callable[[Tensor], Tensor], x_TX: Tensor, counts: list[int] = COUNTS
) -> None:
    """Compare rows computed alone with the same rows in batches that begin at odd places."""
    alone = torch.cat([function(x_TX[t : t + 1].clone()) for t in range(len(x_TX))])
    for count in counts:
        start = min(count % 5, len(x_TX) - count)
        rows = slice(start, start + count)
        assert_same_bits(alone[rows], function(x_TX[rows]), f"{count} rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_linear_layers_give_a_row_the_same_bits_among_any_rows(
    num_threads: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    raw = noise(num_out, num_in, seed=1).to(dtype)
    weight = KERNELS.pack_linear(raw)
    x = noise(205, num_in).to(dtype)
    counts = COUNTS if dtype is torch.float32 and num_threads == 1 else FEW_COUNTS
    assert_rows_are_independent(lambda x: KERNELS.linear(x, weight), x, counts)
    if dtype is torch.float32:
        torch.testing.assert_close(
            KERNELS.linear(x, weight), ReferenceKernels().linear(x, raw), rtol=1e-4, atol=1e-4
        )


def test_router_and_head_give_a_row_the_same_bits_among_any_rows(num_threads: int) -> None:
    weight = KERNELS.pack_linear(noise(100, 40, seed=1))
    assert_rows_are_independent(lambda x: KERNELS.linear_f32(x, weight), noise(205, 40))


@pytest.mark.parametrize("width", [2, 26, 48, 200, 1024])
def test_elementwise_operations_and_norms_do_not_see_the_ends_of_vectors(
    num_threads: int, width: int
) -> None:
    x_TX, weight = noise(205, width), noise(width, seed=1)
    assert_rows_are_independent(lambda x: KERNELS.rms_norm(x, weight, 1e-6), x_TX)


def test_heads_give_a_row_the_same_bits_among_any_rows(num_threads: int) -> None:
    raw, x = noise(3, 16, 40, seed=1), noise(205, 3, 24)[..., :16]
    weight = KERNELS.pack_batched_linear(raw)
    assert_rows_are_independent(lambda x: KERNELS.batched_linear(x, weight), x)
    torch.testing.assert_close(
        KERNELS.batched_linear(x, weight), ReferenceKernels().batched_linear(x, raw)
    )


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_routing_gives_a_row_the_same_bits_among_any_rows(scoring: str, num_threads: int) -> None:
    config = GateConfig(
        num_experts=24,
        num_experts_per_token=5,
        num_groups=4,
        num_selected_groups=2,
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
    )
    for part in (0, 1):
        assert_rows_are_independent(
            lambda x, part=part: KERNELS.gate(x, None, config)[part], noise(205, 24)
        )


def test_experts_give_a_row_the_same_bits_among_any_rows(num_threads: int) -> None:
    raw = noise(4, 26, 40), noise(4, 40, 13, seed=1)
    packed = KERNELS.pack_experts(*raw)
    x = noise(90, 40, seed=2)
    order = torch.rand(90, 4, generator=torch.Generator().manual_seed(3)).argsort(-1)
    ids = order[:, :3].contiguous()
    weights = torch.rand(90, 3, generator=torch.Generator().manual_seed(4))
    whole = KERNELS.experts(x, ids, weights, packed)
    for count in (1, 2, 3, 17, 40, 89):
        rows = slice(90 - count, None)
        part = KERNELS.experts(x[rows], ids[rows], weights[rows], packed)
        assert_same_bits(whole[rows], part, f"{count} rows")
    torch.testing.assert_close(whole, ReferenceKernels().experts(x, ids, weights, raw))


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([], []),
        ([0], [0]),
        ([1], [1]),
        ([1, 0, 3, 2], [64, 100, 3, 0]),
        ([130, 1, 70, 5], [130, 129, 200, 5]),
        ([4], [2]),
        ([1] * (64 + 3), [1 + 5 * b for b in range(64 + 3)]),
    ],
)
def test_attention_agrees_with_the_definition(
    queries: list[int], contexts: list[int], first_key: int
) -> None:
    case = PagedCase(queries, contexts)
    o, lse = case.attend(KERNELS, first_key)
    o_expected, lse_expected = case.expected(first_key)
    torch.testing.assert_close(o, o_expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, lse_expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_attention_gives_a_query_the_same_bits_in_prefill_and_decode(
    num_threads: int, num_heads: int
) -> None:
    case = PagedCase([150, 1, 30], [150, 70, 95], num_heads=num_heads)
    o, lse = case.attend(KERNELS)
    for request, start, num_queries in ((0, 0, 150), (1, 150, 1), (2, 151, 30)):
        for j in range(0, num_queries, 13):
            t, context = start + j, case.contexts[request] - num_queries + j + 1
            o_alone, lse_alone = KERNELS.mla_attention(
                case.q[t : t + 1],
                case.cache,
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([context], dtype=torch.int32),
                case.tables[request : request + 1],
                0.3,
                16,
            )
            assert_same_bits(o[t : t + 1], o_alone, f"query {t}")
            assert_same_bits(lse[t : t + 1], lse_alone, f"query {t}")


def test_expanded_attention_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="absorbed_max_query_tokens"):
        KERNELS.mla_prefill(noise(1, 1, 4), noise(1, 1, 4), noise(1, 1, 4), 1.0)
