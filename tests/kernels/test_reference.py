"""The reference kernels against slower or independent statements of the same thing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS, GateConfig
from whalepod.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
GARBAGE_BLOCK = 2_147_480_000


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- dense -------------------------------------------------------------------------------------


def test_rms_norm_gives_rows_of_unit_root_mean_square() -> None:
    y_TH = KERNELS.rms_norm(noise(5, 64) * 100.0, torch.ones(64), 1e-6)
    torch.testing.assert_close(y_TH.square().mean(-1), torch.ones(5))


def test_rms_norm_rounds_to_bf16_once() -> None:
    x, weight = noise(20, 64).bfloat16(), noise(64, seed=1).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-6), exact.bfloat16())


def test_add_rms_norm_returns_the_norm_and_the_sum() -> None:
    x, residual, weight = noise(3, 8), noise(3, 8, seed=1), noise(8, seed=2)
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, KERNELS.rms_norm(x + residual, weight, 1e-5))


def test_an_mlp_gates_the_second_half_by_the_first_and_saturates() -> None:
    x = torch.tensor([[0.0, 1000.0, -1000.0, 1.0, 2.0, 3.0, 4.0, -5.0]])
    expected = torch.tensor([[0.0, 3000.0, 0.0, -5.0 / (1.0 + math.exp(-1.0))]])
    packed = KERNELS.pack_gated_mlp(torch.eye(8), torch.eye(8, 4))
    torch.testing.assert_close(KERNELS.gated_mlp(x, packed)[:, :4], expected)


def test_linear_f32_does_not_round_its_sums() -> None:
    x, weight = noise(4, 300).bfloat16(), noise(6, 300, seed=1).bfloat16()
    y = KERNELS.linear_f32(x, KERNELS.pack_linear(weight))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, (x.double() @ weight.double().T).float())


# -- attention ---------------------------------------------------------------------------------


def test_rope_turns_adjacent_pairs_by_the_angle_of_the_position() -> None:
    angles_S1 = torch.arange(10.0)[:, None] * 0.3
    table = torch.cat([angles_S1.cos(), angles_S1.sin()], dim=-1)
    x_TND = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    y_TND = KERNELS.rope(x_TND, torch.tensor([4, 9]), table)
    expected = [[[math.cos(1.2), math.sin(1.2)]], [[-math.sin(2.7), math.cos(2.7)]]]
    torch.testing.assert_close(y_TND, torch.tensor(expected))


def test_write_latent_stores_normed_latents_and_turned_keys_in_their_slots() -> None:
    table, weight, kv_TC = noise(200, 8), noise(16, seed=1), noise(3, 24, seed=2)
    positions, slots = torch.tensor([7, 8, 150]), torch.tensor([5, 130, 64])
    cache = torch.full((3, BLOCK_TOKENS, 24), torch.nan)
    KERNELS.write_latent(kv_TC, weight, 1e-6, positions, table, slots, cache)
    rows = cache.view(-1, 24)
    assert torch.equal(rows[slots, :16], KERNELS.rms_norm(kv_TC[:, :16], weight, 1e-6))
    assert torch.equal(rows[slots, 16:], KERNELS.rope(kv_TC[:, None, 16:], positions, table)[:, 0])
    assert int(rows.isnan().all(-1).sum()) == 3 * BLOCK_TOKENS - 3


class PagedCase:
    """Requests over shuffled blocks; all that no request may read is NaN or garbage."""

    def __init__(
        self, queries: list[int], contexts: list[int], *, num_heads: int = 3, seed: int = 0
    ) -> None:
        self.queries, self.contexts = queries, contexts
        counts = [-(-context // BLOCK_TOKENS) for context in contexts]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        self.cache = torch.full((sum(counts) + 1, BLOCK_TOKENS, 24), torch.nan)
        self.tables = torch.full((len(queries), max(counts, default=0) + 1), GARBAGE_BLOCK)
        self.tables = self.tables.to(torch.int32)
        self.rows = []
        for b, context in enumerate(contexts):
            rows = torch.randn(context, 24, generator=generator)
            for j in range(counts[b]):
                block = self.tables[b, j] = order.pop()
                part = rows[j * BLOCK_TOKENS : (j + 1) * BLOCK_TOKENS]
                self.cache[block, : len(part)] = part
            self.rows.append(rows)
        self.q = torch.randn(sum(queries), num_heads, 24, generator=generator)
        self.starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def attend(self, kernels: ReferenceKernels, first_key: int = 0) -> tuple[Tensor, Tensor]:
        contexts = torch.tensor(self.contexts, dtype=torch.int32)
        return kernels.mla_attention(
            self.q, self.cache, self.starts, contexts, self.tables, 0.3, 16, first_key
        )

    def expected(self, first_key: int = 0) -> tuple[Tensor, Tensor]:
        """Attend one query and head at a time, in f64."""
        o = torch.zeros(len(self.q), self.q.shape[1], 16, dtype=torch.float64)
        lse = torch.full(o.shape[:2], -torch.inf, dtype=torch.float64)
        t = 0
        for rows, num_queries in zip(self.rows, self.queries, strict=True):
            for j in range(num_queries):
                seen = rows[first_key : max(len(rows) - num_queries + j + 1, 0)].double()
                if len(seen):
                    scores = self.q[t].double() @ seen.T * 0.3
                    o[t], lse[t] = scores.softmax(-1) @ seen[:, :16], scores.logsumexp(-1)
                t += 1
        return o, lse


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([], []),
        ([0], [0]),
        ([1], [1]),
        ([1, 0, 3, 2], [64, 100, 3, 0]),
        ([1, 1, 1, 1], [63, 65, 128, 300]),
        ([130, 1, 70, 5], [130, 129, 200, 5]),
        ([4], [2]),
    ],
)
def test_mla_attention_reads_exactly_the_rows_of_each_request(
    queries: list[int], contexts: list[int], first_key: int
) -> None:
    case = PagedCase(queries, contexts)
    o, lse = case.attend(KERNELS, first_key)
    o_expected, lse_expected = case.expected(first_key)
    torch.testing.assert_close(o, o_expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, lse_expected.float(), rtol=1e-5, atol=1e-6)


def test_mla_attention_keeps_the_dtype_of_queries() -> None:
    case = PagedCase([2], [70])
    case.q, case.cache = case.q.bfloat16(), case.cache.bfloat16()
    o, lse = case.attend(KERNELS)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 70), (5, 5), (65, 130)])
def test_mla_prefill_is_causal_attention_aligned_to_the_right(
    num_queries: int, num_keys: int
) -> None:
    q, k, v = noise(num_queries, 2, 12), noise(num_keys, 2, 12, seed=1), noise(num_keys, 2, 20)
    scores = torch.einsum("tnd,snd->nts", q, k) * 0.3
    unseen = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
    p = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    expected = torch.einsum("nts,sne->tne", p, v)
    torch.testing.assert_close(KERNELS.mla_prefill(q, k, v, 0.3), expected)


def test_heads_multiplies_each_head_by_its_own_weight() -> None:
    x_TNA, weight_NAB = noise(4, 3, 7)[..., :5], noise(3, 5, 6, seed=1)
    y_TNB = KERNELS.batched_linear(x_TNA, KERNELS.pack_batched_linear(weight_NAB))
    for n in range(3):
        torch.testing.assert_close(y_TNB[:, n], x_TNA[:, n] @ weight_NAB[n])


# -- mixture of experts ------------------------------------------------------------------------


def choose(
    logits: list[float], bias: list[float] | None, config: GateConfig
) -> tuple[list[int], list[float]]:
    bias_E = None if bias is None else torch.tensor(bias)
    ids, weights = KERNELS.gate(torch.tensor([logits]), bias_E, config)
    return ids[0].tolist(), weights[0].tolist()


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_the_bias_moves_the_choice_but_not_the_weights() -> None:
    config = GateConfig(num_experts=4, num_experts_per_token=2, normalize_weights=False)
    ids, weights = choose([2.0, 1.0, 0.0, -9.0], [0.0, 0.0, 0.0, 5.0], config)
    assert ids == [3, 0]
    assert weights == pytest.approx([sigmoid(-9.0), sigmoid(2.0)])


def test_experts_outside_the_selected_groups_lose_even_to_negative_scores() -> None:
    config = GateConfig(num_experts=4, num_experts_per_token=2, num_groups=2, num_selected_groups=1)
    ids, _ = choose([3.0, -9.0, 2.0, -3.0], [-2.0, 0.0, -2.0, -0.5], config)
    assert ids == [1, 0]


def test_groups_are_scored_by_their_two_best_or_by_their_best() -> None:
    logits = [2.0, -9.0, 1.0, 1.0]
    for group_score, expected in (("top2_sum", [2, 3]), ("max", [0, 1])):
        config = GateConfig(
            num_experts=4,
            num_experts_per_token=2,
            num_groups=2,
            num_selected_groups=1,
            group_score=group_score,
        )
        assert choose(logits, None, config)[0] == expected


def test_the_lowest_id_wins_ties_of_experts_and_groups() -> None:
    config = GateConfig(
        num_experts=64, num_experts_per_token=4, num_groups=8, num_selected_groups=2
    )
    assert choose([0.5] * 64, None, config)[0] == [0, 1, 2, 3]


def test_weights_are_normalised_then_scaled() -> None:
    config = GateConfig(num_experts=3, num_experts_per_token=2, scaling_factor=2.5)
    _, weights = choose([1.0, 0.0, -5.0], None, config)
    total = sigmoid(1.0) + sigmoid(0.0)
    assert weights == pytest.approx([2.5 * sigmoid(1.0) / total, 2.5 * sigmoid(0.0) / total])


def test_weights_stay_finite_when_all_scores_underflow() -> None:
    config = GateConfig(num_experts=2, num_experts_per_token=2)
    assert choose([-200.0, -300.0], [0.0, 12.0], config)[1] == [0.0, 0.0]


def test_experts_add_what_is_selected_and_skip_minus_one() -> None:
    gate_up, down, x = noise(3, 8, 6), noise(3, 6, 4, seed=1), noise(4, 6, seed=2)
    ids = torch.tensor([[0, 2], [-1, 1], [-1, -1], [1, 0]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(3))
    y = KERNELS.experts(x, ids, weights, KERNELS.pack_experts(gate_up, down))
    for t in range(4):
        expected = torch.zeros(6)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                expected += weight * (down[expert] @ inner)
        torch.testing.assert_close(y[t], expected)
    assert torch.equal(y[2], torch.zeros(6))


def test_every_operation_accepts_no_tokens() -> None:
    empty, positions = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)
    config = GateConfig(num_experts=4, num_experts_per_token=2)
    assert KERNELS.linear(empty, noise(5, 8)).shape == (0, 5)
    assert KERNELS.linear_f32(empty, noise(5, 8)).shape == (0, 5)
    assert KERNELS.rms_norm(empty, torch.ones(8), 1e-6).shape == (0, 8)
    mlp = KERNELS.pack_gated_mlp(noise(6, 8), noise(8, 3))
    assert KERNELS.gated_mlp(empty, mlp).shape == (0, 8)
    assert KERNELS.rope(torch.zeros(0, 2, 8), positions, noise(9, 8)).shape == (0, 2, 8)
    assert KERNELS.batched_linear(torch.zeros(0, 2, 8), noise(2, 8, 3)).shape == (0, 2, 3)
    ids, weights = KERNELS.gate(torch.zeros(0, 4), None, config)
    packed = KERNELS.pack_experts(noise(4, 6, 8), noise(4, 8, 3))
    assert KERNELS.experts(empty, ids, weights, packed).shape == (0, 8)
    assert KERNELS.gumbel_noise(positions, positions, 7).shape == (0, 7)


# -- sampling ----------------------------------------------------------------------------------


def gumbel_in_python(seed: int, position: int, token: int) -> float:
    """Follow the docstring with Python's integers."""
    wrap = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F) & wrap
    x = (x + token * 0x165667B19E3779F9) & wrap
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wrap
    u = (((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


def test_gumbel_noise_is_the_documented_hash() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1], [0, 5, 2**20, 131071]
    g_BV = KERNELS.gumbel_noise(torch.tensor(seeds), torch.tensor(positions), 40)
    assert g_BV.dtype == torch.float32
    expected = [
        [gumbel_in_python(s, p, v) for v in range(40)]
        for s, p in zip(seeds, positions, strict=True)
    ]
    torch.testing.assert_close(g_BV, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_gumbel_noise_of_a_row_does_not_depend_on_the_others() -> None:
    seeds, positions = torch.arange(9), torch.arange(9) * 3
    together = KERNELS.gumbel_noise(seeds, positions, 1001)
    for b in range(9):
        alone = KERNELS.gumbel_noise(seeds[b : b + 1], positions[b : b + 1], 1001)
        assert torch.equal(together[b], alone[0])
    assert torch.equal(KERNELS.gumbel_noise(seeds, positions, 10), together[:, :10])


def test_gumbel_noise_has_the_moments_of_its_distribution() -> None:
    seeds, positions = torch.arange(400), torch.arange(400) % 7
    g = KERNELS.gumbel_noise(seeds, positions, 1000).double()
    assert g.isfinite().all()
    assert float(g.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6.0, abs=0.02)
    neighbours = torch.corrcoef(torch.stack([g[:-1].flatten(), g[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.01


def test_sampling_with_gumbel_noise_follows_the_probabilities() -> None:
    logp_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    g_BV = KERNELS.gumbel_noise(torch.full((20_000,), 42), torch.arange(20_000), 4)
    counts = (logp_V + g_BV).argmax(-1).bincount(minlength=4) / 20_000
    torch.testing.assert_close(counts, logp_V.exp(), rtol=0.0, atol=0.015)
