"""`CpuKernels`: what is compiled, mixtures of experts, and sampling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whalepod.kernels.cpu import (
    attention,
    captured_graphs,
    dense,
    elementwise,
    experts,
    gate,
    noise,
    packing,
    prefill_attention,
)
from whalepod.kernels.cpu.attention_operations import AttentionOperations
from whalepod.kernels.cpu.operations import aligned
from whalepod.kernels.cpu.packed import PackedExperts, PackedLinear
from whalepod.kernels.cpu.thread_pool import ParallelKernel
from whalepod.kernels.interface import GateConfig

MODEL_KERNELS = (
    dense.LINEAR,
    gate.GATE,
    captured_graphs.REPLAY,
    elementwise.EMBED,
    elementwise.RMS_NORM,
    elementwise.ADD_RMS_NORM,
    elementwise.ROPE,
    elementwise.WRITE_LATENT,
    experts.EXPERTS,
    experts.GATED_MLP,
    attention.ATTENTION,
)
"""Compiled for the model dtype."""

F32_KERNELS = (noise.GUMBEL_NOISE, noise.DRAW, packing.PACK)
"""Compiled for f32 whatever the model dtype."""


class CpuKernels(AttentionOperations):
    """`Kernels` on a CPU. See `whalepod.kernels.interface` for every contract."""

    packed_layout: str | None = "panels-1"
    KERNELS: tuple[ParallelKernel, ...] = MODEL_KERNELS

    def warm_up(self, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        """Compile all kernels for a model dtype; `progress(done, all)` is called along the way."""
        kernels = {(kernel, dtype): None for kernel in self.KERNELS}
        kernels |= {(kernel, torch.float32): None for kernel in F32_KERNELS}
        if self._has_tiles and dtype == torch.bfloat16:
            kernels[prefill_attention.PREFILL_ATTENTION, dtype] = None
        self._pool.compile(list(kernels), progress)

    def packed_parts(
        self, packed: PackedLinear | PackedExperts
    ) -> tuple[list[Tensor], list[list[int]]]:
        parts = [packed] if isinstance(packed, PackedLinear) else [packed.gate_up, packed.down]
        return [p.tensor for p in parts], [[p.num_columns, p.length] for p in parts]

    def unpack(self, tensors: list[Tensor], sizes: list[list[int]]) -> PackedLinear | PackedExperts:
        parts = [PackedLinear(t, *size) for t, size in zip(tensors, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else PackedExperts(*parts)

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
            gate.GATE, dtype, self._pool.num_threads if num_tokens else 0, num_tokens, num_experts,
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
        self._graphs.keep(self._ones_S1)
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
        scratch = self._borrow(y + 4 * 64 * num_pairs * self._pool.num_threads)
        self._run(
            experts.EXPERTS, x_TH.dtype, self._pool.num_threads, num_tokens, top_k,
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
            experts.GATED_MLP, x_TH.dtype, self._pool.num_threads, num_tokens, packed.hidden,
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
