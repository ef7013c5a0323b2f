"""`CpuKernels`: which code serves which shape. Numba regions for few rows, oneDNN for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.cpu import attention, dense, elementwise, experts, gate
from whalepod.kernels.cpu.packed import PackedExperts, PackedHeads, PackedLinear
from whalepod.kernels.cpu.regions import Region, Team
from whalepod.kernels.interface import BLOCK_TOKENS, GateConfig

MODEL_REGIONS = (
    dense.LINEAR,
    dense.LINEAR_F32,
    dense.HEADS,
    elementwise.RMS_NORM,
    elementwise.ADD_RMS_NORM,
    elementwise.SWIGLU,
    elementwise.ROPE,
    elementwise.WRITE_LATENT,
    experts.EXPERTS,
    experts.COMBINE,
    attention.ATTENTION,
)
"""Compiled for the model dtype."""

F32_REGIONS = (dense.LINEAR_F32, gate.GATE, elementwise.GUMBEL_NOISE)
"""Compiled for f32 whatever the model dtype; the router of a bf16 model has f32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most rows for which a numba region serves; beyond, oneDNN through torch."""

    linear_rows: Mapping[torch.dtype, int]
    heads_rows: int
    rows_per_expert: int


def measured_limits() -> Limits:
    """Return where oneDNN overtakes, as measured (one core of a Sapphire-Rapids-class machine,
    heavily shared, CPU time, November 2026; time of torch / time of numba):

    rows of x                            1      2      4      8     16     32
    linear bf16 4096 x 1024           1.67   1.50   1.53   1.10   0.86   0.40
    linear bf16 1024 x 2048           1.76   1.68   1.65   1.09   0.92   0.41
    linear bf16 256 x 256             3.08   4.26   2.95   2.24   1.43   0.50
    linear f32 4096 x 1024            0.60   1.01   1.63   2.08   1.49   1.56
    linear f32 256 x 256              0.78   0.87   0.99   1.19   1.46   1.14

    oneDNN used AMX there; where it cannot, its bf16 GEMMs of few rows are three times slower.
    """
    has_amx = torch.cpu._is_amx_tile_supported()
    return Limits(
        linear_rows={torch.bfloat16: 8 if has_amx else 32, torch.float32: 64},
        heads_rows=4,
        rows_per_expert=16,
    )


_UNBOUNDED = 1 << 62

INVARIANT_LIMITS = Limits(
    linear_rows={torch.bfloat16: _UNBOUNDED, torch.float32: _UNBOUNDED},
    heads_rows=_UNBOUNDED,
    rows_per_expert=_UNBOUNDED,
)
"""Regions only: a row's bits then depend on the row alone, whatever the batch, chunks or threads.

(`mla_prefill` still sums in torch's order: attend absorbed at any number of queries.)
"""


class CpuKernels:
    """`Kernels` on a CPU. See `whalepod.kernels.interface` for every contract."""

    name = "cpu"

    def __init__(self, *, num_threads: int | None = None, limits: Limits | None = None) -> None:
        self._team = Team(num_threads or torch.get_num_threads())
        self._limits = limits or measured_limits()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def warm_up(self, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        """Compile all regions for a model dtype; `progress(done, all)` is called along the way."""
        regions = {(region, dtype): None for region in MODEL_REGIONS}
        regions |= {(region, torch.float32): None for region in F32_REGIONS}
        self._team.compile(list(regions), progress)

    def _run(self, region: Region, dtype: torch.dtype, num_items: int, *arguments: object) -> None:
        self._team.run(region, dtype, num_items, *arguments)

    # -- dense ---------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: Tensor) -> PackedLinear:
        return PackedLinear(weight_NK)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        num_rows = x_TK.shape[0]
        if num_rows > self._limits.linear_rows[weight.dtype]:
            return F.linear(x_TK, weight.tensor)
        out_TN = torch.empty((num_rows, weight.num_columns), dtype=weight.dtype)
        self._skinny(dense.LINEAR, x_TK, weight, out_TN)
        return out_TN

    def linear_f32(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        num_rows = x_TK.shape[0]
        if weight.dtype == torch.float32:
            return self.linear(x_TK, weight)
        out_TN = torch.empty((num_rows, weight.num_columns), dtype=torch.float32)
        self._skinny(dense.LINEAR_F32, x_TK, weight, out_TN)
        return out_TN

    def _skinny(self, region: Region, x_TK: Tensor, weight: PackedLinear, out_TN: Tensor) -> None:
        if not out_TN.numel():
            return
        x_TK = x_TK.contiguous()
        self._run(
            region, weight.dtype, weight.num_items, x_TK.shape[0], weight.num_columns,
            weight.length, x_TK.data_ptr(), weight.address, out_TN.data_ptr(),
            weight.columns_per_item,
        )  # fmt: skip

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        num_rows, length = x_TH.shape
        out_TH = torch.empty((num_rows, length), dtype=x_TH.dtype)
        self._run(
            elementwise.RMS_NORM, x_TH.dtype, _items(num_rows), num_rows, length, x_TH.data_ptr(),
            x_TH.stride(0), weight_H.data_ptr(), out_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, length = x_TH.shape
        out_TH, sum_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
        self._run(
            elementwise.ADD_RMS_NORM, x_TH.dtype, _items(num_rows), num_rows, length,
            x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(),
            sum_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH, sum_TH

    def swiglu(self, gate_up_TJ: Tensor) -> Tensor:
        num_rows, width = gate_up_TJ.shape
        out_TI = torch.empty((num_rows, width // 2), dtype=gate_up_TJ.dtype)
        self._run(
            elementwise.SWIGLU, out_TI.dtype, _items(num_rows), num_rows, width // 2,
            gate_up_TJ.data_ptr(), out_TI.data_ptr(),
        )  # fmt: skip
        return out_TI

    # -- attention -----------------------------------------------------------------------------

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        num_tokens, num_heads, width = x_TND.shape
        out_TND = torch.empty((num_tokens, num_heads, width), dtype=x_TND.dtype)
        x_TND = x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()
        self._run(
            elementwise.ROPE, x_TND.dtype, _items(num_tokens), num_tokens, num_heads, width,
            x_TND.data_ptr(), x_TND.stride(0), x_TND.stride(1), positions_T.data_ptr(),
            cos_sin_SD.data_ptr(), out_TND.data_ptr(),
        )  # fmt: skip
        return out_TND

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
            elementwise.WRITE_LATENT, kv_TC.dtype, _items(num_tokens), num_tokens, rank,
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
        out_TNR = torch.empty((num_tokens, num_heads, latent_rank), dtype=q_TNC.dtype)
        lse_TN = torch.empty((num_tokens, num_heads), dtype=torch.float32)
        heads_per_item, num_chunks = attention.MAX_HEADS_PER_ITEM, 0
        if num_tokens < 4 * self._team.num_threads:
            heads_per_item //= 2
            num_chunks = -(-table_width * BLOCK_TOKENS // attention.CHUNK_TOKENS)
        num_items = num_tokens * -(-num_heads // heads_per_item) * max(num_chunks, 1)
        num_partial = num_tokens * num_heads * num_chunks
        num_own = 2 * heads_per_item * (attention.CHUNK_TOKENS + latent_rank + 2)
        scratch = self._borrow(
            4 * (num_partial * (latent_rank + 2) + num_own * self._team.num_threads)
        )
        stats = scratch + 4 * num_partial * latent_rank
        self._run(
            attention.ATTENTION, q_TNC.dtype, num_items, num_tokens, num_heads, width,
            latent_rank, num_requests, table_width, num_chunks, first_key, heads_per_item,
            q_TNC.data_ptr(), q_TNC.stride(0), q_TNC.stride(1), cache_PBC.data_ptr(),
            query_start_B1.data_ptr(), context_lens_B.data_ptr(), block_tables_BM.data_ptr(),
            out_TNR.data_ptr(), lse_TN.data_ptr(), scratch, stats, stats + 8 * num_partial,
            softmax_scale,
        )  # fmt: skip
        return out_TNR, lse_TN

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
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

    def pack_heads(self, weight_NAB: Tensor) -> PackedHeads:
        return PackedHeads(weight_NAB)

    def heads(self, x_TNA: Tensor, weight: PackedHeads) -> Tensor:
        num_tokens = x_TNA.shape[0]
        out_TNB = torch.empty((num_tokens, weight.num_heads, weight.width), dtype=x_TNA.dtype)
        if num_tokens > self._limits.heads_rows:
            torch.bmm(x_TNA.transpose(0, 1), weight.tensor, out=out_TNB.transpose(0, 1))
            return out_TNB
        x_TNA = x_TNA if x_TNA.stride(2) == 1 else x_TNA.contiguous()
        self._run(
            dense.HEADS, x_TNA.dtype, weight.num_heads if num_tokens else 0, num_tokens,
            weight.num_heads, weight.length, weight.width, x_TNA.data_ptr(), x_TNA.stride(0),
            x_TNA.stride(1), weight.address, *weight.strides, out_TNB.data_ptr(),
        )  # fmt: skip
        return out_TNB

    # -- mixture of experts --------------------------------------------------------------------

    def gate(
        self, logits_TE: Tensor, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = logits_TE.shape
        top_k, num_groups = config.num_experts_per_token, config.num_groups
        ids_TK = torch.empty((num_tokens, top_k), dtype=torch.int64)
        weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32)
        self._run(
            gate.GATE, torch.float32, _items(num_tokens), num_tokens, num_experts, top_k,
            num_groups, config.num_selected_groups, config.scoring == "sigmoid",
            config.group_score == "top2_sum", config.normalize_weights, logits_TE.data_ptr(),
            0 if bias_E is None else bias_E.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(),
            self._borrow(4 * num_tokens * (3 * num_experts + 2 * num_groups)),
            config.scaling_factor,
        )  # fmt: skip
        return ids_TK, weights_TK

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> PackedExperts:
        return PackedExperts(gate_up_EJH, down_EHI)

    def experts(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts
    ) -> Tensor:
        num_pairs = ids_TK.numel()
        if num_pairs > self._limits.rows_per_expert * packed.num_experts:
            return self._experts_by_gemm(x_TH, ids_TK, weights_TK, packed)
        return self._experts_in_one_region(x_TH, ids_TK, weights_TK, packed)[0]

    def expert_rows(self, x_SH: Tensor, ids_S: Tensor, packed: PackedExperts) -> Tensor:
        ids_S1, num_rows = ids_S[:, None].contiguous(), len(ids_S)
        weights_S1 = torch.ones(num_rows, 1)
        if num_rows > self._limits.rows_per_expert * packed.num_experts:
            return self._experts_by_gemm(x_SH, ids_S1, weights_S1, packed).float()
        _, y = self._experts_in_one_region(x_SH, ids_S1, weights_S1, packed)
        places_S = self._scratch[: 8 * num_rows].view(torch.int64)
        y_SH = self._scratch[y : y + 4 * num_rows * packed.hidden].view(torch.float32)
        return y_SH.view(num_rows, packed.hidden).index_select(0, places_S)

    def _experts_in_one_region(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts
    ) -> tuple[Tensor, int]:
        """Return the sums, and where in the scratch memory the f32 rows of all pairs lie; the
        scratch begins with the place of each pair among them."""
        out_TH, num_pairs = torch.empty_like(x_TH), ids_TK.numel()
        num_tokens, top_k = ids_TK.shape
        inner, hidden = packed.inner, packed.hidden
        integers = 8 * (2 * num_pairs + 3 * packed.num_experts + 4)
        products = -(-integers // 64) * 64
        activations = products + 8 * num_pairs * inner
        y = activations + 4 * num_pairs * inner
        scratch = self._borrow(y + 4 * num_pairs * hidden)
        self._run(
            experts.EXPERTS, x_TH.dtype, self._team.num_threads, num_tokens, top_k,
            packed.num_experts, hidden, inner, x_TH.data_ptr(), ids_TK.data_ptr(),
            weights_TK.data_ptr(), packed.gate_up_address, packed.down_address, out_TH.data_ptr(),
            scratch, scratch + products, scratch + activations, scratch + y,
        )  # fmt: skip
        return out_TH, y

    def _experts_by_gemm(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts
    ) -> Tensor:
        """Compute each expert's tokens with oneDNN: the way of prefill."""
        num_tokens, top_k = ids_TK.shape
        order = ids_TK.flatten().argsort(stable=True)
        counts = torch.bincount(ids_TK.flatten() + 1, minlength=packed.num_experts + 1).tolist()
        x_sorted = x_TH[order // top_k]
        y_sorted = torch.empty_like(x_sorted)
        start = counts[0]
        for expert, count in enumerate(counts[1:]):
            rows = slice(start, start + count)
            if count:
                inner = self.swiglu(F.linear(x_sorted[rows], packed.gate_up[expert]))
                torch.mm(inner, packed.down[expert].T, out=y_sorted[rows])
            start += count
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel())
        places[order[: counts[0]]] = -1
        out_TH = torch.empty_like(x_TH)
        self._run(
            experts.COMBINE, x_TH.dtype, _items(num_tokens), num_tokens, top_k, packed.hidden,
            weights_TK.data_ptr(), places.data_ptr(), y_sorted.data_ptr(), out_TH.data_ptr(),
        )  # fmt: skip
        return out_TH

    # -- sampling ------------------------------------------------------------------------------

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        num_rows = seeds_B.shape[0]
        out_BV = torch.empty((num_rows, num_tokens), dtype=torch.float32)
        self._run(
            elementwise.GUMBEL_NOISE, torch.float32,
            num_rows * -(-num_tokens // elementwise.TOKENS_PER_ITEM), num_rows, num_tokens,
            seeds_B.data_ptr(), positions_B.data_ptr(), out_BV.data_ptr(),
        )  # fmt: skip
        return out_BV

    def _borrow(self, num_bytes: int) -> int:
        """Return the address of scratch memory, valid until the next operation."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()


def _items(num_rows: int) -> int:
    return -(-num_rows // elementwise.ROWS_PER_ITEM)
