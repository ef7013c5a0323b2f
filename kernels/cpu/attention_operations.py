"""Operations of attention: absorbed over the paged cache, expanded for long chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.cpu import attention, elementwise, prefill_attention
from whalepod.kernels.cpu.dense_operations import DenseOperations, items
from whalepod.kernels.cpu.operations import aligned
from whalepod.kernels.cpu.packed import PackedLinear
from whalepod.kernels.interface import BLOCK_TOKENS


class AttentionOperations(DenseOperations):
    """The part of `Kernels` where tokens see others."""

    def absorb_queries(
        self, q_TND: Tensor, w_uk: PackedLinear, positions_T: Tensor, cos_sin_SD: Tensor
    ) -> Tensor:
        num_tokens, num_heads, width = q_TND.shape
        rope, rank = cos_sin_SD.shape[1], w_uk.num_columns
        q_TNC = self._new((num_tokens, num_heads, rank + rope), q_TND.dtype)
        self._linear(q_TND[..., : width - rope], w_uk, q_TNC[..., :rank])
        self._rope(q_TND[..., width - rope :], positions_T, cos_sin_SD, q_TNC[..., rank:])
        return q_TNC

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
        num_tokens, rank = kv_TC.shape[0], norm_weight_R.shape[0]
        self._run(
            elementwise.WRITE_LATENT, kv_TC.dtype, items(num_tokens), num_tokens, rank,
            kv_TC.shape[1] - rank, kv_TC.data_ptr(), kv_TC.stride(0), norm_weight_R.data_ptr(),
            positions_T.data_ptr(), cos_sin_SD.data_ptr(), slots_T.data_ptr(),
            cache_PBC.data_ptr(), eps,
        )  # fmt: skip

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
        num_tokens, num_heads, width = q_TNC.shape
        num_requests, table_width = block_tables_BM.shape
        out_TNR = self._new((num_tokens, num_heads, latent_rank), q_TNC.dtype)
        lse_TN = self._new((num_tokens, num_heads), torch.float32)
        num_threads = self._pool.num_threads
        uses_tiles = self._uses_tiles(q_TNC.dtype, width, latent_rank)
        is_split = num_tokens < 4 * num_threads and num_tokens * num_threads > 1
        heads_per_item, num_chunks = attention.MAX_HEADS_PER_ITEM, 0
        if is_split:
            num_chunks = -(-table_width * BLOCK_TOKENS // attention.CHUNK_TOKENS)
            if not uses_tiles:
                heads_per_item //= 2
        per_chunk = num_tokens * -(-num_heads // heads_per_item)
        num_partial = num_tokens * num_heads * num_chunks
        before_o = 8 * heads_per_item * attention.CHUNK_TOKENS
        if uses_tiles:
            before_o = attention.tile_scratch_bytes(width)
        num_own = aligned(before_o + 8 * heads_per_item * (latent_rank + 2))
        partial = aligned(4 * num_partial * (latent_rank + 2))
        scratch = self._borrow(partial + num_own * num_threads)
        self._run(
            attention.ATTENTION, q_TNC.dtype, per_chunk * max(num_chunks, 1), num_tokens,
            num_heads, width, latent_rank, num_requests, table_width, num_chunks, first_key,
            heads_per_item, q_TNC.data_ptr(), q_TNC.stride(0), q_TNC.stride(1),
            cache_PBC.data_ptr(), query_start_B1.data_ptr(), context_lens_B.data_ptr(),
            block_tables_BM.data_ptr(), out_TNR.data_ptr(), lse_TN.data_ptr(), scratch,
            scratch + 4 * num_partial * latent_rank, scratch + partial, num_own, before_o,
            uses_tiles, softmax_scale,
        )  # fmt: skip
        return out_TNR, lse_TN

    def _uses_tiles(self, dtype: torch.dtype, key_width: int, value_width: int) -> bool:
        is_fit = attention.fits_tiles(key_width, value_width)
        return self._has_tiles and dtype == torch.bfloat16 and is_fit

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        if self._is_invariant:
            raise NotImplementedError(
                "batch-invariant kernels attend absorbed only: expanded attention sums in another "
                "order (set absorbed_max_query_tokens to at least max_num_batched_tokens)"
            )
        if self._uses_tiles(q_TND.dtype, q_TND.shape[2], v_SNE.shape[2]):
            return self._mla_prefill_by_tiles(q_TND, k_SND, v_SNE, softmax_scale)
        # Values as wide as the keys reach torch's flash kernel: 5 to 8 times faster than without.
        num_queries, num_keys = q_TND.shape[0], k_SND.shape[0]
        padding = q_TND.shape[2] - v_SNE.shape[2]
        q, k, v = (
            x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_SND, F.pad(v_SNE, (0, padding)))
        )
        mask = None
        if num_keys != num_queries:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=softmax_scale
        )
        return o[0, :, :, : v_SNE.shape[2]].transpose(0, 1).contiguous()

    def _mla_prefill_by_tiles(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        num_queries, num_heads, width = q_TND.shape
        num_keys, value_width = k_SND.shape[0], v_SNE.shape[2]
        out_TNE = self._new((num_queries, num_heads, value_width), q_TND.dtype)
        num_rows = num_heads * -(-num_keys // BLOCK_TOKENS) * BLOCK_TOKENS
        values, own = 2 * num_rows * width, 2 * num_rows * (width + value_width)
        num_own = aligned(prefill_attention.scratch_bytes(width, value_width))
        scratch = self._borrow(own + num_own * self._pool.num_threads)
        self._run(
            prefill_attention.PREFILL_ATTENTION, q_TND.dtype, self._pool.num_threads, num_queries,
            num_keys, num_heads, width, value_width, q_TND.data_ptr(), k_SND.data_ptr(),
            v_SNE.data_ptr(), out_TNE.data_ptr(), scratch, scratch + values, scratch + own, num_own,
            softmax_scale,
        )  # fmt: skip
        return out_TNE
