"""Kernels whose every row has the same bits in any company: the batch-invariant mode on CPUs.

GEMM libraries choose their order of summation by the number of rows, so a row's bits depend on its
neighbours. (Measured with MKL: padding to multiples of 4, 8 or 16 rows is not enough, more rows
choose another kernel again; within one shape, the place of a row does not matter.) Here every GEMM
has one shape, whatever the batch:

- linear layers: tiles of `ROW_TILE` rows, the last one filled up with zeros;
- attention: `[N, C] x [C, 64]` per query and block, blocks merged in their order (online softmax),
  for prefill and decode alike; keys that a query does not see add exact zeros;
- experts: tiles of the rows of one expert, summed in k order as in the reference.

The rest of the reference is row by row as it stands: torch's reductions over the last axis treat
each row alike, and `exp`, `+`, `*`, `/` give the same bits in vector bodies and tails.
(`torch.sigmoid`, `silu` and `exp2` do not; neither does `logsumexp` over a very long row.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS, Packed
from whalepod.kernels.reference import ReferenceKernels

ROW_TILE = 16
"""Rows of every GEMM. In f32 a tile of any width starts at a multiple of 64 bytes."""

QUERY_SLAB = 64
"""Queries that attend together: bounds the gathered cache rows, changes no bits."""


class InvariantKernels(ReferenceKernels):
    """`Kernels` for `--batch-invariant`; attends absorbed only, at any number of queries."""

    name = "invariant"

    def linear(self, x_TK: Tensor, weight: Packed) -> Tensor:
        return _tiled_matmul(x_TK, weight.t())

    def linear_f32(self, x_TK: Tensor, weight: Packed) -> Tensor:
        return _tiled_matmul(x_TK.float(), weight.float().t())

    def heads(self, x_TNA: Tensor, weight: Packed) -> Tensor:
        num_tokens, num_heads, _ = x_TNA.shape
        y_NTB = x_TNA.new_empty(num_heads, num_tokens, weight.shape[-1])
        for n in range(num_heads):
            y_NTB[n] = _tiled_matmul(x_TNA[:, n], weight[n])
        return y_NTB.transpose(0, 1).contiguous()

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
        o_TNR = q_TNC.new_empty(num_tokens, num_heads, latent_rank)
        lse_TN = torch.empty(num_tokens, num_heads, device=q_TNC.device)
        requests_T, num_keys_T = _keys_of_queries(query_start_B1, context_lens_B)
        for start in range(0, num_tokens, QUERY_SLAB):
            slab = slice(start, start + QUERY_SLAB)
            o, lse_TN[slab] = _attend_by_blocks(
                q_TNC[slab].float() * softmax_scale,
                cache_PBC,
                block_tables_BM[requests_T[slab]],
                num_keys_T[slab],
                first_key,
                latent_rank,
            )
            o_TNR[slab] = o.to(q_TNC.dtype)
        return o_TNR, lse_TN

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        raise NotImplementedError(
            "batch-invariant kernels attend absorbed only: expanded attention sums in another order"
            " (set absorbed_max_query_tokens to at least max_num_batched_tokens)"
        )


def _tiled_matmul(x_TK: Tensor, weight_KN: Tensor) -> Tensor:
    """Return x W, computed `ROW_TILE` rows at a time."""
    num_rows, width = x_TK.shape
    num_padded = -(-num_rows // ROW_TILE) * ROW_TILE
    padded = x_TK.new_zeros(num_padded, width)
    padded[:num_rows] = x_TK
    y = x_TK.new_empty(num_padded, weight_KN.shape[1])
    for start in range(0, num_padded, ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(padded[tile], weight_KN, out=y[tile])
    return y[:num_rows]


def _keys_of_queries(query_start_B1: Tensor, context_lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query's request `[T]` and how many keys it sees `[T]`, at least 0."""
    starts_B1 = query_start_B1.long()
    num_queries_B = starts_B1.diff()
    requests_T = torch.repeat_interleave(num_queries_B)
    tokens_T = torch.arange(len(requests_T), device=requests_T.device)
    last_T = (starts_B1[1:] - 1)[requests_T]
    return requests_T, (context_lens_B[requests_T] - (last_T - tokens_T)).clamp(min=0)


def _attend_by_blocks(
    q_TNC: Tensor,
    cache_PBC: Tensor,
    tables_TM: Tensor,
    num_keys_T: Tensor,
    first_key: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Attend with scaled f32 queries, block after block: o `[T, N, rank]`, lse `[T, N]`, f32."""
    o_TNR = q_TNC.new_zeros(*q_TNC.shape[:2], rank)
    sum_TN1 = q_TNC.new_zeros(*q_TNC.shape[:2], 1)
    max_TN1 = torch.full_like(sum_TN1, -torch.inf)
    keys_S = torch.arange(BLOCK_TOKENS, device=q_TNC.device)
    for block in range(-(-int(num_keys_T.max()) // BLOCK_TOKENS)):
        unseen_TS = (keys_S >= num_keys_T[:, None]) | (keys_S < first_key)
        ids_T = tables_TM[:, block].long().masked_fill(num_keys_T <= block * BLOCK_TOKENS, 0)
        rows_TSC = cache_PBC[ids_T].float().masked_fill(unseen_TS[..., None], 0.0)
        scores_TNS = torch.bmm(q_TNC, rows_TSC.transpose(1, 2))
        scores_TNS.masked_fill_(unseen_TS[:, None], -torch.inf)
        new_max_TN1 = torch.maximum(max_TN1, scores_TNS.amax(dim=-1, keepdim=True))
        origin_TN1 = new_max_TN1.nan_to_num(neginf=0.0)
        p_TNS = torch.exp(scores_TNS - origin_TN1)
        old_TN1 = torch.exp(max_TN1 - origin_TN1)
        sum_TN1 = sum_TN1 * old_TN1 + p_TNS.sum(dim=-1, keepdim=True)
        o_TNR = o_TNR * old_TN1 + torch.bmm(p_TNS, rows_TSC[..., :rank])
        max_TN1 = new_max_TN1
        keys_S = keys_S + BLOCK_TOKENS
    lse_TN = (max_TN1 + sum_TN1.log()).squeeze(-1)
    return o_TNR / sum_TN1.masked_fill(sum_TN1 == 0.0, 1.0), lse_TN
