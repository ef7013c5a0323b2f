"""`CpuKernels`: the operations as regions; what each is given, and the memory that it works in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.cpu import (
    attention,
    dense,
    elementwise,
    expanded,
    experts,
    gate,
    noise,
    packing,
    programs,
)
from whalepod.kernels.cpu.packed import PackedExperts, PackedLinear, Packer
from whalepod.kernels.cpu.regions import Region, Team
from whalepod.kernels.cpu.tiles import can_use_tiles
from whalepod.kernels.interface import BLOCK_TOKENS, GateConfig

MODEL_REGIONS = (
    dense.LINEAR,
    gate.GATE,
    programs.PROGRAM,
    elementwise.EMBED,
    elementwise.RMS_NORM,
    elementwise.ADD_RMS_NORM,
    elementwise.SWIGLU,
    elementwise.ROPE,
    elementwise.WRITE_LATENT,
    experts.EXPERTS,
    experts.GATED_MLP,
    attention.ATTENTION,
)
"""Compiled for the model dtype."""

F32_REGIONS = (noise.GUMBEL_NOISE, noise.DRAW, packing.PACK)
"""Compiled for f32 whatever the model dtype."""

MIN_TILE_ROWS = 4
"""From so many rows on AMX is faster than AVX512-BF16, where a machine has both."""

_NEVER = 1 << 62
_ALIGNMENT = 64
_BLOCK_GROUPS = 4


class CpuKernels:
    """`Kernels` on a CPU. See `whalepod.kernels.interface` for every contract.

    is_invariant  a row's bits depend on the row alone, whatever the batch, the chunks, the threads
    code_folder   keeps compiled code for the next process; None: where numba would
    """

    packed_layout: str | None = "panels-1"
    REGIONS: tuple[Region, ...] = MODEL_REGIONS

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        is_invariant: bool = False,
        code_folder: Path | None = None,
    ) -> None:
        self.name = "cpu, batch-invariant" if is_invariant else "cpu"
        self._is_invariant = is_invariant
        self._team = Team(num_threads or torch.get_num_threads(), code_folder)
        self._has_tiles = can_use_tiles()
        # Tiles add in another order: a row's bits would depend on how many rows are beside it.
        self._tile_rows = MIN_TILE_ROWS if not is_invariant and self._has_tiles else _NEVER
        self._packer = Packer(self._team)
        self._programs = programs.Programs(self._team)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._ones_S1 = torch.ones(0, 1)

    def warm_up(self, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        """Compile all regions for a model dtype; `progress(done, all)` is called along the way."""
        regions = {(region, dtype): None for region in self.REGIONS}
        regions |= {(region, torch.float32): None for region in F32_REGIONS}
        if self._has_tiles and dtype == torch.bfloat16:
            regions[expanded.EXPANDED, dtype] = None
        self._team.compile(list(regions), progress)

    def _run(self, region: Region, dtype: torch.dtype, num_items: int, *arguments: object) -> None:
        self._team.run(region, dtype, num_items, *arguments)

    def repeat(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        return self._programs.run(key, dtype, compute)

    def outside(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        return self._programs.outside(compute, like)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for what an operation makes; a program that is recorded keeps it."""
        return self._programs.new(shape, dtype)

    def _dense(self, x: Tensor) -> Tensor:
        """Return the tensor with its last dimension contiguous."""
        if x.stride(-1) == 1:
            return x
        assert not self._programs.is_recording, "a copy would not be repeated"
        return x.contiguous()

    # -- dense ---------------------------------------------------------------------------------

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        num_tokens, hidden = token_ids_T.shape[0], embedding_VH.shape[1]
        out_TH = self._new((num_tokens, hidden), embedding_VH.dtype)
        self._run(
            elementwise.EMBED, out_TH.dtype, _items(num_tokens), num_tokens, hidden,
            token_ids_T.data_ptr(), embedding_VH.data_ptr(), out_TH.data_ptr(),
        )  # fmt: skip
        return out_TH

    def pack_linear(self, weight_NK: Tensor) -> PackedLinear:
        return self._packer.linear(weight_NK.unsqueeze(0))

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._new((x_TK.shape[0], weight.num_columns), x_TK.dtype)
        self._linear(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def linear_f32(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._new((x_TK.shape[0], weight.num_columns), torch.float32)
        self._linear(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def pack_heads(self, weight_NAB: Tensor) -> PackedLinear:
        return self._packer.linear(weight_NAB.transpose(1, 2))

    def heads(self, x_TNA: Tensor, weight: PackedLinear) -> Tensor:
        shape = (x_TNA.shape[0], weight.num_weights, weight.num_columns)
        out_TNB = self._new(shape, x_TNA.dtype)
        self._linear(x_TNA, weight, out_TNB)
        return out_TNB

    def _linear(self, x_TLK: Tensor, weight: PackedLinear, out_TLN: Tensor) -> None:
        if not out_TLN.numel():
            return
        x_TLK = self._dense(x_TLK)
        num_rows = x_TLK.shape[0]
        groups_per_item = _BLOCK_GROUPS if num_rows < 64 else 4 * _BLOCK_GROUPS
        num_items = weight.num_weights * -(-weight.num_groups // groups_per_item)
        self._run(
            dense.LINEAR, x_TLK.dtype, num_items * -(-num_rows // dense.ROWS_PER_ITEM),
            weight.num_weights, num_rows, weight.num_columns, weight.length, weight.num_groups,
            groups_per_item, x_TLK.data_ptr(), x_TLK.stride(0), x_TLK.stride(1), weight.address,
            weight.weight_stride, weight.group_stride, out_TLN.data_ptr(), out_TLN.stride(0),
            out_TLN.stride(1), self._tile_rows, out_TLN.dtype == torch.float32,
        )  # fmt: skip

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        num_rows, length = x_TH.shape
        out_TH = self._new((num_rows, length), x_TH.dtype)
        self._run(
            elementwise.RMS_NORM, x_TH.dtype, _items(num_rows), num_rows, length, x_TH.data_ptr(),
            x_TH.stride(0), weight_H.data_ptr(), out_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, length = x_TH.shape
        out_TH, sum_TH = (self._new(x_TH.shape, x_TH.dtype) for _ in range(2))
        self._run(
            elementwise.ADD_RMS_NORM, x_TH.dtype, _items(num_rows), num_rows, length,
            x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(),
            sum_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH, sum_TH

    def swiglu(self, gate_up_TJ: Tensor) -> Tensor:
        num_rows, width = gate_up_TJ.shape
        out_TI = self._new((num_rows, width // 2), gate_up_TJ.dtype)
        self._run(
            elementwise.SWIGLU, out_TI.dtype, _items(num_rows), num_rows, width // 2,
            gate_up_TJ.data_ptr(), out_TI.data_ptr(),
        )  # fmt: skip
        return out_TI

    def packed_parts(
        self, packed: PackedLinear | PackedExperts
    ) -> tuple[list[Tensor], list[list[int]]]:
        parts = [packed] if isinstance(packed, PackedLinear) else [packed.gate_up, packed.down]
        return [p.tensor for p in parts], [[p.num_columns, p.length] for p in parts]

    def unpack(self, tensors: list[Tensor], sizes: list[list[int]]) -> PackedLinear | PackedExperts:
        parts = [PackedLinear(t, *size) for t, size in zip(tensors, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else PackedExperts(*parts)

    # -- attention -----------------------------------------------------------------------------

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        out_TND = self._new(x_TND.shape, x_TND.dtype)
        self._rope(self._dense(x_TND), positions_T, cos_sin_SD, out_TND)
        return out_TND

    def _rope(
        self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor, out_TND: Tensor
    ) -> None:
        num_tokens, num_heads, width = x_TND.shape
        self._run(
            elementwise.ROPE, x_TND.dtype, _items(num_tokens), num_tokens, num_heads, width,
            x_TND.data_ptr(), x_TND.stride(0), x_TND.stride(1), positions_T.data_ptr(),
            cos_sin_SD.data_ptr(), out_TND.data_ptr(), out_TND.stride(0), out_TND.stride(1),
        )  # fmt: skip

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
        out_TNR = self._new((num_tokens, num_heads, latent_rank), q_TNC.dtype)
        lse_TN = self._new((num_tokens, num_heads), torch.float32)
        num_threads = self._team.num_threads
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
        num_own = aligned(expanded.scratch_bytes(width, value_width))
        scratch = self._borrow(own + num_own * self._team.num_threads)
        self._run(
            expanded.EXPANDED, q_TND.dtype, self._team.num_threads, num_queries, num_keys,
            num_heads, width, value_width, q_TND.data_ptr(), k_SND.data_ptr(), v_SNE.data_ptr(),
            out_TNE.data_ptr(), scratch, scratch + values, scratch + own, num_own, softmax_scale,
        )  # fmt: skip
        return out_TNE

    # -- mixture of experts --------------------------------------------------------------------

    def gate(
        self, logits_TE: Tensor, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        return self._gate(torch.float32, logits_TE, (0,) * 5, 0, bias_E, config)

    def pack_router(self, weight_EH: Tensor) -> PackedLinear:
        return self._packer.linear(weight_EH.unsqueeze(0))

    def route(
        self, x_TH: Tensor, router: PackedLinear, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        num_tokens, hidden = x_TH.shape
        logits_TE = self._new((num_tokens, router.num_columns), torch.float32)
        product = (
            hidden, x_TH.data_ptr(), router.address, router.group_stride, router.num_groups,
        )  # fmt: skip
        return self._gate(x_TH.dtype, logits_TE, product, num_tokens * hidden, bias_E, config)

    def _gate(
        self,
        dtype: torch.dtype,
        logits_TE: Tensor,
        product: tuple[int, ...],
        num_wide: int,
        bias_E: Tensor | None,
        config: GateConfig,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = logits_TE.shape
        top_k, num_groups = config.num_experts_per_token, config.num_groups
        ids_TK = self._new((num_tokens, top_k), torch.int64)
        weights_TK = self._new((num_tokens, top_k), torch.float32)
        wide = aligned(4 * num_tokens * (3 * num_experts + 2 * num_groups))
        scratch = self._borrow(wide + 4 * num_wide)
        self._run(
            gate.GATE, dtype, self._team.num_threads if num_tokens else 0, num_tokens, num_experts,
            top_k, num_groups, config.num_selected_groups, config.scoring == "sigmoid",
            config.group_score == "top2_sum", config.normalize_weights, logits_TE.data_ptr(),
            0 if bias_E is None else bias_E.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(),
            scratch, *product, scratch + wide, config.scaling_factor,
        )  # fmt: skip
        return ids_TK, weights_TK

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> PackedExperts:
        return self._packer.gated_mlp(gate_up_EJH, down_EHI)

    def experts(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts
    ) -> Tensor:
        return self._experts(x_TH, ids_TK, weights_TK, packed, x_TH.dtype)

    def expert_rows(self, x_SH: Tensor, ids_S: Tensor, packed: PackedExperts) -> Tensor:
        if len(ids_S) > len(self._ones_S1):
            self._ones_S1 = torch.ones(2 * len(ids_S), 1)
        self._programs.keep(self._ones_S1)
        # the sum of one, with weight one
        return self._experts(x_SH, ids_S[:, None], self._ones_S1, packed, torch.float32)

    def _experts(
        self,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        packed: PackedExperts,
        out_dtype: torch.dtype,
    ) -> Tensor:
        out_TH = self._new(x_TH.shape, out_dtype)
        num_tokens, top_k = ids_TK.shape
        if not num_tokens:
            return out_TH
        gate_up, down, num_pairs = packed.gate_up, packed.down, ids_TK.numel()
        value_bytes = x_TH.element_size()
        gathered = aligned(8 * (2 * num_pairs + 3 * packed.num_experts + 4))
        inner = gathered + aligned(value_bytes * num_pairs * packed.hidden * (num_tokens > 1))
        y = inner + aligned(value_bytes * num_pairs * gate_up.num_groups * 8)
        scratch = self._borrow(y + 4 * 64 * num_pairs * self._team.num_threads)
        self._run(
            experts.EXPERTS, x_TH.dtype, self._team.num_threads, num_tokens, top_k,
            packed.num_experts, packed.hidden, packed.inner, gate_up.address,
            gate_up.weight_stride, gate_up.group_stride, gate_up.num_groups, down.address,
            down.weight_stride, down.group_stride, down.num_groups, x_TH.data_ptr(),
            ids_TK.data_ptr(), weights_TK.data_ptr(), out_TH.data_ptr(), self._tile_rows, scratch,
            scratch + gathered, scratch + inner, scratch + y, out_dtype == torch.float32,
        )  # fmt: skip
        return out_TH

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> PackedExperts:
        return self._packer.gated_mlp(gate_up_JH.unsqueeze(0), down_HI.unsqueeze(0))

    def gated_mlp(
        self, x_TH: Tensor, packed: PackedExperts, add_to_TH: Tensor | None = None
    ) -> Tensor:
        out_TH = self._new(x_TH.shape, x_TH.dtype)
        num_tokens = x_TH.shape[0]
        if not num_tokens:
            return out_TH
        gate_up, down = packed.gate_up, packed.down
        self._run(
            experts.GATED_MLP, x_TH.dtype, self._team.num_threads, num_tokens, packed.hidden,
            packed.inner, gate_up.address, gate_up.group_stride, gate_up.num_groups, down.address,
            down.group_stride, down.num_groups, x_TH.data_ptr(), out_TH.data_ptr(),
            self._tile_rows,
            self._borrow(x_TH.element_size() * num_tokens * gate_up.num_groups * 8),
            0 if add_to_TH is None else add_to_TH.data_ptr(),
        )  # fmt: skip
        return out_TH

    # -- sampling ------------------------------------------------------------------------------

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        num_rows = seeds_B.shape[0]
        out_BV = self._new((num_rows, num_tokens), torch.float32)
        self._run(
            noise.GUMBEL_NOISE, torch.float32,
            num_rows * -(-num_tokens // noise.TOKENS_PER_ITEM), num_rows, num_tokens,
            seeds_B.data_ptr(), positions_B.data_ptr(), out_BV.data_ptr(),
        )  # fmt: skip
        return out_BV

    def draw(
        self,
        logits_BV: Tensor,
        temperatures_B: Tensor,
        seeds_B: Tensor,
        positions_B: Tensor,
        out_B: Tensor,
    ) -> None:
        num_rows, num_tokens = logits_BV.shape
        self._run(
            noise.DRAW, torch.float32, num_rows, num_rows, num_tokens, logits_BV.data_ptr(),
            temperatures_B.data_ptr(), seeds_B.data_ptr(), positions_B.data_ptr(),
            self._borrow(4 * num_rows * num_tokens), out_B.data_ptr(),
        )  # fmt: skip

    def _borrow(self, num_bytes: int) -> int:
        """Return the address of scratch memory, valid until the next operation."""
        if self._scratch.numel() < num_bytes + _ALIGNMENT:
            self._scratch = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self._programs.keep(self._scratch)
        return aligned(self._scratch.data_ptr())


def aligned(num_bytes: int) -> int:
    """Return the number of bytes, rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _items(num_rows: int) -> int:
    return -(-num_rows // elementwise.ROWS_PER_ITEM)
