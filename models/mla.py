"""Multi-head latent attention (DeepSeek-V2 report, section 2.1) over the paged latent cache.

The cache holds one row per token: R latent values and the rotated rope key that all heads share.

- Expanded: kv_b_proj turns the context's rows into keys and values per head. Best when a chunk has
  many queries, which share that work.
- Absorbed: W_UK moves into the query and W_UV after the softmax, so that all heads attend to the
  latent rows themselves. Best for few queries: nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS, Kernels, Packed
from whalepod.models.batch import ForwardBatch
from whalepod.models.config import ModelConfig
from whalepod.models.rope import interleave_rope_rows
from whalepod.models.weights import Weights

LATENT_NORM_EPS = 1e-6
"""Of q_a_layernorm and kv_a_layernorm: fixed in DeepSeek's code, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedRequests:
    """The requests of a batch with few queries, as one smaller batch."""

    tokens_T: Tensor | None
    """Their rows in the step's tokens; None: all of them."""
    query_start_B1: Tensor
    context_lens_B: Tensor
    block_tables_BM: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedRequest:
    """One request with many queries."""

    tokens: slice
    context_slots_S: Tensor
    """Where the rows of its context lie, `[S]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Which tokens of a step attend in which of the two ways; the same for every layer."""

    absorbed: AbsorbedRequests | None
    expanded: tuple[ExpandedRequest, ...]
    first_key: int = 0
    """Keys before it are masked: 1 in multi-token-prediction layers, whose slot 0 has no row."""


def plan_attention(batch: ForwardBatch, absorbed_max_query_tokens: int) -> AttentionPlan:
    """Send requests with at most `absorbed_max_query_tokens` queries to the absorbed form."""
    if batch.max_query_tokens <= absorbed_max_query_tokens:
        everything = AbsorbedRequests(
            tokens_T=None,
            query_start_B1=batch.query_start_B1,
            context_lens_B=batch.context_lens_B,
            block_tables_BM=batch.block_tables_BM,
        )
        return AttentionPlan(absorbed=everything, expanded=())
    num_queries_B = batch.query_start_B1.diff()
    is_short_B = num_queries_B <= absorbed_max_query_tokens
    return AttentionPlan(
        absorbed=_select_requests(batch, num_queries_B, is_short_B) if is_short_B.any() else None,
        expanded=tuple(_expand_request(batch, int(b)) for b in (~is_short_B).nonzero()),
    )


def _select_requests(
    batch: ForwardBatch, num_queries_B: Tensor, chosen_B: Tensor
) -> AbsorbedRequests:
    starts_B1 = torch.zeros_like(batch.query_start_B1[: int(chosen_B.sum()) + 1])
    starts_B1[1:] = num_queries_B[chosen_B].cumsum(0)
    return AbsorbedRequests(
        tokens_T=chosen_B.repeat_interleave(num_queries_B).nonzero().flatten(),
        query_start_B1=starts_B1,
        context_lens_B=batch.context_lens_B[chosen_B],
        block_tables_BM=batch.block_tables_BM[chosen_B],
    )


def _expand_request(batch: ForwardBatch, b: int) -> ExpandedRequest:
    positions_S = torch.arange(int(batch.context_lens_B[b]), device=batch.positions_T.device)
    blocks_S = batch.block_tables_BM[b].long()[positions_S // BLOCK_TOKENS]
    return ExpandedRequest(
        tokens=slice(int(batch.query_start_B1[b]), int(batch.query_start_B1[b + 1])),
        context_slots_S=blocks_S * BLOCK_TOKENS + positions_S % BLOCK_TOKENS,
    )


class LatentAttention:
    """The attention of one layer; `prefix` names its weights ("model.layers.0.self_attn")."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        prefix: str,
        kernels: Kernels,
        cos_sin_SD: Tensor,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._cos_sin_SD = cos_sin_SD
        c, hidden = config, config.hidden_size
        query_width = c.num_heads * c.qk_head_dim
        kv_b_shape = (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{prefix}.{name}.weight", shape)

        def packed(name: str, pack: Callable[[], Packed]) -> Packed:
            return weights.packed(f"{prefix}.{name}", kernels, pack)

        def pack_q_and_kv_a() -> Packed:
            """Queries and latents share their input: one product gives both."""
            kv_a_CH = self._interleaved(take("kv_a_proj_with_mqa", c.cache_row_width, hidden), 1)
            if c.q_lora_rank is None:
                q_H = self._interleaved(take("q_proj", query_width, hidden), c.num_heads)
            else:
                q_H = take("q_a_proj", c.q_lora_rank, hidden)
            # errors of latents reach all later tokens; without whole queries the product is small
            is_sensitive = c.q_lora_rank is not None
            return kernels.pack_linear(torch.cat([q_H, kv_a_CH]), is_sensitive)

        def pack_q_b(rank: int) -> Packed:
            q_b = take("q_b_proj", query_width, rank)
            return kernels.pack_linear(self._interleaved(q_b, c.num_heads))

        def pack_part(part: int) -> Packed:
            kv_b_NDR = take("kv_b_proj", *kv_b_shape).view(c.num_heads, -1, c.kv_lora_rank)
            sizes = [c.qk_nope_head_dim, c.v_head_dim]
            part_NDR = torch.split(kv_b_NDR, sizes, dim=1)[part]
            weight = part_NDR.transpose(1, 2) if part else part_NDR
            return kernels.pack_batched_linear(weight.contiguous())

        self._q_and_kv_a = packed("q_and_kv_a", pack_q_and_kv_a)
        if c.q_lora_rank is not None:
            rank = c.q_lora_rank
            self._q_norm = take("q_a_layernorm", rank)
            self._q_b = packed("q_b", lambda: pack_q_b(rank))
        self._kv_norm_R = take("kv_a_layernorm", c.kv_lora_rank)
        self._kv_b = packed("kv_b", lambda: kernels.pack_linear(take("kv_b_proj", *kv_b_shape)))
        self._w_uk = packed("w_uk", lambda: pack_part(0))
        self._w_uv = packed("w_uv", lambda: pack_part(1))
        self._o = packed(
            "o",
            lambda: kernels.pack_linear(take("o_proj", hidden, c.num_heads * c.v_head_dim)),
        )

    def _interleaved(self, weight: Tensor, num_heads: int) -> Tensor:
        """Bring the rope rows of a projection into the kernels' order of pairs."""
        if self._config.rope.interleaved:
            return weight
        heads = weight.view(num_heads, -1, weight.shape[1])
        return interleave_rope_rows(heads, self._config.qk_rope_head_dim).flatten(0, 1)

    def __call__(
        self,
        x_TH: Tensor,
        batch: ForwardBatch,
        plan: AttentionPlan,
        cache_PBC: Tensor,
    ) -> Tensor:
        """Store the tokens' latent rows, then attend: `[T, H]` -> `[T, H]`, model dtype."""
        projected = self.store(x_TH, batch.positions_T, batch.slots_T, cache_PBC)
        return self.attend(projected, batch.positions_T, plan, cache_PBC)

    def store(
        self,
        x_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache_PBC: Tensor,
    ) -> Tensor:
        """Store the tokens' latent rows: all that is needed of a layer whose output is not read.

        Returns what `attend` continues for these tokens, or for some of them: `[T, q + C]`, q being
        the width of the queries or of their latents.
        """
        projected = self._kernels.linear(x_TH, self._q_and_kv_a)
        kv_TC = projected[:, -self._config.cache_row_width :]
        self._kernels.write_latent(
            kv_TC,
            self._kv_norm_R,
            LATENT_NORM_EPS,
            positions_T,
            self._cos_sin_SD,
            slots_T,
            cache_PBC,
        )
        return projected

    def attend(
        self,
        projected: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        cache_PBC: Tensor,
    ) -> Tensor:
        """Attend for tokens whose rows are stored, `[T, H]` model dtype."""
        q_TND = self._queries(projected)
        o_TND = self._attend(q_TND, positions_T, plan, cache_PBC)
        return self._kernels.linear(o_TND.flatten(1), self._o)

    def _queries(self, projected: Tensor) -> Tensor:
        """Return queries `[T, N, D]`, not yet rotated."""
        c = self._config
        q = projected[:, : -c.cache_row_width]
        if c.q_lora_rank is not None:
            q = self._kernels.rms_norm(q, self._q_norm, LATENT_NORM_EPS)
            q = self._kernels.linear(q, self._q_b)
        return torch.unflatten(q, 1, (c.num_heads, c.qk_head_dim))

    def _attend(
        self,
        q_TND: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        cache_PBC: Tensor,
    ) -> Tensor:
        absorbed = plan.absorbed
        if absorbed is not None and absorbed.tokens_T is None:
            q_TNC = self._kernels.absorb_queries(q_TND, self._w_uk, positions_T, self._cos_sin_SD)
            return self._absorbed(q_TNC, absorbed, plan.first_key, cache_PBC)
        o_TND = q_TND.new_empty(*q_TND.shape[:2], self._config.v_head_dim)
        if absorbed is not None:
            tokens_T = absorbed.tokens_T
            q_TNC = self._kernels.absorb_queries(
                q_TND[tokens_T], self._w_uk, positions_T[tokens_T], self._cos_sin_SD
            )
            o_TND[tokens_T] = self._absorbed(q_TNC, absorbed, plan.first_key, cache_PBC)
        nope = self._config.qk_nope_head_dim
        for request in plan.expanded:
            q_nope, q_rope = q_TND[request.tokens, :, :nope], q_TND[request.tokens, :, nope:]
            q_rope = self._kernels.rope(q_rope, positions_T[request.tokens], self._cos_sin_SD)
            q = torch.cat([q_nope, q_rope], dim=-1)
            o_TND[request.tokens] = self._expanded(q, request.context_slots_S, cache_PBC)
        return o_TND

    def _absorbed(
        self, q_TNC: Tensor, requests: AbsorbedRequests, first_key: int, cache_PBC: Tensor
    ) -> Tensor:
        """Attend in the latent space: (q W_UK) K^T, then (softmax V) W_UV."""
        o_TNR, _ = self._kernels.mla_attention(
            q_TNC,
            cache_PBC,
            requests.query_start_B1,
            requests.context_lens_B,
            requests.block_tables_BM,
            self._config.softmax_scale,
            self._config.kv_lora_rank,
            first_key,
        )
        return self._kernels.batched_linear(o_TNR, self._w_uv)

    def _expanded(self, q_TND: Tensor, context_slots_S: Tensor, cache_PBC: Tensor) -> Tensor:
        """Attend to the keys and values that kv_b_proj makes of one request's context."""
        c = self._config
        rows_SC = cache_PBC.flatten(0, 1)[context_slots_S]
        latent_SR, k_rope_SD = torch.split(rows_SC, [c.kv_lora_rank, c.qk_rope_head_dim], dim=1)
        kv = self._kernels.linear(latent_SR.contiguous(), self._kv_b)
        k_nope_SND, v_SND = torch.split(
            kv.view(-1, c.num_heads, c.qk_nope_head_dim + c.v_head_dim),
            [c.qk_nope_head_dim, c.v_head_dim],
            dim=-1,
        )
        k_rope_SND = k_rope_SD[:, None].expand(-1, c.num_heads, -1)
        k_SND = torch.cat([k_nope_SND, k_rope_SND], dim=-1)
        return self._kernels.mla_prefill(q_TND, k_SND, v_SND.contiguous(), c.softmax_scale)
