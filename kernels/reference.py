"""The meaning of every operation, in plain torch: the other kernels are tested against this file.

Arithmetic is done in f32 and rounded to the model dtype once, at the end of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.interface import GateConfig, Packed

_SEED_FACTOR, _POSITION_FACTOR, _TOKEN_FACTOR = (
    -0x61C8864680B583EB,
    -0x3D4D51C2D82B14B1,
    0x165667B19E3779F9,
)
"""Odd 64-bit multipliers (two's complement): 2^64 / golden ratio, and two primes of xxHash64."""


class ReferenceKernels:
    """`Kernels` on any device that torch knows; as slow as it is plain."""

    name = "reference"
    packed_layout: str | None = None

    def replay(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    def eager(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        return compute()

    # -- dense ---------------------------------------------------------------------------------

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        return embedding_VH[token_ids_T]

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> Packed:
        return weight_NK

    def linear(self, x_TK: Tensor, weight: Packed) -> Tensor:
        return F.linear(x_TK, weight)

    def linear_f32(self, x_TK: Tensor, weight: Packed) -> Tensor:
        return F.linear(x_TK.float(), weight.float())

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x = x_TH.float()
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return (x * weight_H.float()).to(x_TH.dtype)

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual_TH = residual_TH + x_TH
        return self.rms_norm(residual_TH, weight_H, eps), residual_TH

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> Packed:
        return self.pack_linear(gate_up_JH), self.pack_linear(down_HI)

    def gated_mlp(self, x_TH: Tensor, packed: Packed, add_to_TH: Tensor | None = None) -> Tensor:
        gate_up, down = packed
        y_TH = self.linear(_swiglu(self.linear(x_TH, gate_up)), down)
        return y_TH if add_to_TH is None else add_to_TH + y_TH

    def packed_parts(self, packed: Packed) -> tuple[list[Tensor], list[list[int]]]:
        return list(packed) if isinstance(packed, tuple) else [packed], []

    def unpack(self, tensors: list[Tensor], sizes: list[list[int]]) -> Packed:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    # -- attention -----------------------------------------------------------------------------

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        cos, sin = cos_sin_SD[positions_T].unsqueeze(1).chunk(2, dim=-1)
        even, odd = x_TND[..., 0::2].float(), x_TND[..., 1::2].float()
        pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return pairs.flatten(-2).to(x_TND.dtype)

    def absorb_queries(
        self, q_TND: Tensor, w_uk: Packed, positions_T: Tensor, cos_sin_SD: Tensor
    ) -> Tensor:
        rope = cos_sin_SD.shape[1]
        latent = self.batched_linear(q_TND[..., : q_TND.shape[-1] - rope], w_uk)
        return torch.cat([latent, self.rope(q_TND[..., -rope:], positions_T, cos_sin_SD)], dim=-1)

    def write_latent(
        self,
        kv_TC: Tensor,
        norm_weight_R: Tensor,
        eps: float,
        positions_T: Tensor,
        cos_sin_SD: Tensor,
        slots_T: Tensor,
        cache_PBC: Tensor,
    ) -> None:
        rank = norm_weight_R.shape[0]
        latent = self.rms_norm(kv_TC[:, :rank], norm_weight_R, eps)
        key = self.rope(kv_TC[:, None, rank:], positions_T, cos_sin_SD).squeeze(1)
        cache_PBC.view(-1, cache_PBC.shape[-1])[slots_T] = torch.cat([latent, key], dim=-1)

    def mla_attention(
        self,
        q_TNC: Tensor,
        cache_PBC: Tensor,
        query_start_B1: Tensor,
        context_lens_B: Tensor,
        block_tables_BM: Tensor,
        softmax_scale: float,
        latent_rank: int,
        first_key: int = 0,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads, _ = q_TNC.shape
        o_TNR = q_TNC.new_zeros(num_tokens, num_heads, latent_rank)
        lse_TN = torch.full((num_tokens, num_heads), -torch.inf, device=q_TNC.device)
        starts = query_start_B1.tolist()
        for b, context in enumerate(context_lens_B.tolist()):
            start, end = starts[b], starts[b + 1]
            if start == end or context <= first_key:
                continue
            rows_SC = gather_rows(cache_PBC, block_tables_BM[b], context)[first_key:]
            keys_S1C = rows_SC.float().unsqueeze(1)
            o, lse = _causal_attention(
                q_TNC[start:end].float(), keys_S1C, keys_S1C[..., :latent_rank], softmax_scale
            )
            o_TNR[start:end], lse_TN[start:end] = o.to(q_TNC.dtype), lse
        return o_TNR, lse_TN

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        o, _ = _causal_attention(q_TND.float(), k_SND.float(), v_SNE.float(), softmax_scale)
        return o.to(q_TND.dtype)

    def pack_batched_linear(self, weight_NAB: Tensor) -> Packed:
        return weight_NAB

    def batched_linear(self, x_TNA: Tensor, weight: Packed) -> Tensor:
        return torch.einsum("tna,nab->tnb", x_TNA, weight)

    # -- mixture of experts --------------------------------------------------------------------

    def gate(
        self, logits_TE: Tensor, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        if config.scoring == "sigmoid":
            scores_TE = sigmoid(logits_TE)
        else:
            scores_TE = torch.softmax(logits_TE, dim=-1)
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        choice_TE = _mask_groups(choice_TE, config)
        ids_TK = _stable_top(choice_TE, config.num_experts_per_token)
        weights_TK = scores_TE.gather(-1, ids_TK)
        if config.normalize_weights:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * config.scaling_factor

    def pack_router(self, weight_EH: Tensor) -> Packed:
        return weight_EH

    def route(
        self, x_TH: Tensor, router: Packed, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        return self.gate(F.linear(x_TH.float(), router), bias_E, config)

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> Packed:
        return gate_up_EJH, down_EHI

    def experts(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: Packed) -> Tensor:
        y_TKH = torch.zeros(*ids_TK.shape, x_TH.shape[-1], device=x_TH.device)
        tokens_S, places_S = torch.where(ids_TK >= 0)
        ids_S = ids_TK[tokens_S, places_S]
        y_TKH[tokens_S, places_S] = self.expert_rows(x_TH[tokens_S], ids_S, packed)
        return _sum_in_order(y_TKH, weights_TK).to(x_TH.dtype)

    def expert_rows(self, x_SH: Tensor, ids_S: Tensor, packed: Packed) -> Tensor:
        gate_up_EJH, down_EHI = packed
        y_SH = torch.empty(x_SH.shape, device=x_SH.device)
        for expert in sorted(set(ids_S.tolist())):
            rows_s = torch.where(ids_S == expert)[0]
            y_SH[rows_s] = self.gated_rows(x_SH[rows_s], gate_up_EJH[expert], down_EHI[expert])
        return y_SH

    def gated_rows(self, x_SH: Tensor, gate_up_JH: Tensor, down_HI: Tensor) -> Tensor:
        """Return what one gated MLP makes of rows, f32 `[S, H]`."""
        return self.linear_f32(_swiglu(self.linear(x_SH, gate_up_JH)), down_HI)

    # -- sampling ------------------------------------------------------------------------------

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        """Return `-log(-log(u))`, where, with 64-bit integers that wrap around:

            x = seed * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F
                + token * 0x165667B19E3779F9
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB
            u = (((x ^ (x >> 31)) >> 12) + 0.5) * 2^-52

        `>>` is logical; `u` (exact, never 0 or 1) and both logarithms are f64, the result is
        rounded to f32 once.
        Source: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators").
        """
        rows_B = seeds_B * _SEED_FACTOR + positions_B * _POSITION_FACTOR
        tokens_V = torch.arange(num_tokens, device=seeds_B.device)
        mixed = _splitmix64(rows_B[:, None] + tokens_V * _TOKEN_FACTOR)
        u = (_shift_right(mixed, 12).double() + 0.5) * 2.0**-52
        return (-torch.log(-torch.log(u))).float()

    def draw(
        self,
        logits_BV: Tensor,
        temperatures_B: Tensor,
        seeds_B: Tensor,
        positions_B: Tensor,
        out_B: Tensor,
    ) -> None:
        noise_BV = self.gumbel_noise(seeds_B, positions_B, logits_BV.shape[1])
        random_BV = logits_BV / temperatures_B[:, None] + noise_BV
        chosen_BV = torch.where(temperatures_B[:, None] > 0, random_BV, logits_BV)
        out_B.copy_(chosen_BV.argmax(dim=-1))


def _swiglu(gate_up_TJ: Tensor) -> Tensor:
    """Return silu(gate) * up, `[T, I]`, of a `[T, 2 I]` whose first half is the gate."""
    gate, up = gate_up_TJ.float().chunk(2, dim=-1)
    return (gate * sigmoid(gate) * up).to(gate_up_TJ.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)); `torch.sigmoid` differs between vector bodies and tails."""
    return 1.0 / (1.0 + torch.exp(-x))


def gather_rows(cache_PBC: Tensor, blocks_M: Tensor, num_tokens: int) -> Tensor:
    """Return the first `num_tokens` cache rows of one request, `[num_tokens, C]`.

    Touches neither table entries past the last used block nor rows past the last token.
    """
    block_tokens = cache_PBC.shape[1]
    positions = torch.arange(num_tokens, device=cache_PBC.device)
    blocks = blocks_M[positions // block_tokens].long()
    return cache_PBC[blocks, positions % block_tokens]


def _causal_attention(
    q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend right-aligned in f32: o `[T, N, E]` and lse `[T, N]`. One key head may serve all."""
    num_queries, num_heads, _ = q_TND.shape
    num_keys = k_SND.shape[0]
    k_SND = k_SND.expand(-1, num_heads, -1)
    v_SNE = v_SNE.expand(-1, num_heads, -1)
    scores_NTS = torch.einsum("tnd,snd->nts", q_TND, k_SND) * softmax_scale
    last_key_T = torch.arange(num_queries, device=q_TND.device) + (num_keys - num_queries)
    keys_S = torch.arange(num_keys, device=q_TND.device)
    scores_NTS = scores_NTS.masked_fill(keys_S > last_key_T[:, None], -torch.inf)
    lse_NT = torch.logsumexp(scores_NTS, dim=-1)
    p_NTS = torch.exp(scores_NTS - lse_NT.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("nts,sne->tne", p_NTS, v_SNE), lse_NT.T


def _stable_top(scores_TE: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` best per row, best first; the lowest id wins ties."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _mask_groups(choice_TE: Tensor, config: GateConfig) -> Tensor:
    """Set experts outside the best `num_selected_groups` groups to -inf."""
    if config.num_selected_groups == config.num_groups:
        return choice_TE
    groups_TGE = choice_TE.view(-1, config.num_groups, config.num_experts // config.num_groups)
    num_scored = min(2, groups_TGE.shape[-1]) if config.group_score == "top2_sum" else 1
    scores_TG = groups_TGE.topk(num_scored, dim=-1).values.sum(dim=-1)
    selected_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    selected_TG.scatter_(-1, _stable_top(scores_TG, config.num_selected_groups), True)
    return groups_TGE.masked_fill(~selected_TG[..., None], -torch.inf).flatten(-2)


def _sum_in_order(y_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """Return sum_k weights[t, k] * y[t, k], added in the order of k."""
    sum_TH = torch.zeros_like(y_TKH[:, 0]) if y_TKH.shape[1] else y_TKH.sum(dim=1)
    for k in range(y_TKH.shape[1]):
        sum_TH = sum_TH + y_TKH[:, k] * weights_TK[:, k, None]
    return sum_TH


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)
