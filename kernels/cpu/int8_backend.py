"""`Int8CpuKernels`: weights of int8, rows quantised on the way; the rest as in `CpuKernels`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from whalepod.kernels.cpu import int8_packing, int8_regions, int8_tiles
from whalepod.kernels.cpu.backend import CpuKernels
from whalepod.kernels.cpu.int8 import STEP, STEP_BYTES, record_bytes
from whalepod.kernels.cpu.operations import NEVER, aligned
from whalepod.kernels.cpu.packed import PackedExperts, PackedLinear
from whalepod.kernels.cpu.packed_tiles import BLOCK_GROUPS, GROUP


class Int8CpuKernels(CpuKernels):
    """`Kernels` on a CPU with int8 weights: projections, experts, heads of attention and the head.

    Embeddings, norms, the router and sensitive projections keep their dtype. A row's bits never
    depend on other rows.
    """

    packed_layout = "int8-2"
    KERNELS = (
        *CpuKernels.KERNELS, int8_packing.PACK_INT8, int8_regions.LINEAR_INT8,
        int8_regions.EXPERTS_INT8,
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        is_invariant: bool = False,
        code_folder: Path | None = None,
    ) -> None:
        super().__init__(
            num_threads=num_threads, is_invariant=is_invariant, code_folder=code_folder
        )
        self.name = f"{self.name}, int8"
        self._int8_tile_rows = int8_tiles.MIN_ROWS if self._has_tiles else NEVER
        # what is not rounded, too, has the same bits beside any number of rows
        self._tile_rows = 1 if self._has_tiles else NEVER

    # -- packing -------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> PackedLinear:
        if is_sensitive:
            return super().pack_linear(weight_NK)
        return self._pack(weight_NK.unsqueeze(0))

    def pack_batched_linear(self, weight_NAB: Tensor) -> PackedLinear:
        return self._pack(weight_NAB.transpose(1, 2))

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> PackedExperts:
        return self.pack_experts(gate_up_JH.unsqueeze(0), down_HI.unsqueeze(0))

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> PackedExperts:
        num_experts, double, hidden = gate_up_EJH.shape
        num_groups = 2 * -(-double // 2 // GROUP)
        panels = _panels(num_experts, num_groups * GROUP, hidden)
        self._fill(gate_up_EJH[:, : double // 2], panels[:, 0::2])
        self._fill(gate_up_EJH[:, double // 2 :], panels[:, 1::2])
        gate_up = PackedLinear(panels, num_groups * GROUP, hidden)
        return PackedExperts(gate_up, self._pack(down_EHI))

    def _pack(self, weight_LNK: Tensor) -> PackedLinear:
        panels = _panels(*weight_LNK.shape)
        self._fill(weight_LNK, panels)
        return PackedLinear(panels, *weight_LNK.shape[1:])

    def _fill(self, weight_LNK: Tensor, panels: Tensor) -> None:
        weight_LNK = self._dense(weight_LNK)
        num_weights, num_columns, length = weight_LNK.shape
        self._run(
            int8_packing.PACK_INT8, weight_LNK.dtype, num_weights * panels.shape[1], num_weights,
            num_columns, length, weight_LNK.data_ptr(), weight_LNK.stride(0),
            weight_LNK.stride(1), panels.data_ptr(), panels.stride(0), panels.stride(1),
        )  # fmt: skip

    # -- products ------------------------------------------------------------------------------

    def _linear(self, x_TLK: Tensor, weight: PackedLinear, out_TLN: Tensor) -> None:
        if weight.dtype != torch.uint8:
            super()._linear(x_TLK, weight, out_TLN)
            return
        if not out_TLN.numel():
            return
        x_TLK = self._dense(x_TLK)
        num_rows, num_heads = x_TLK.shape[0], weight.num_weights
        groups_per_item = BLOCK_GROUPS if num_rows < 64 else 4 * BLOCK_GROUPS
        stride = aligned(record_bytes(weight.length))
        self._run(
            int8_regions.LINEAR_INT8, x_TLK.dtype, self._pool.num_threads, num_heads, num_rows,
            weight.num_columns, weight.length, weight.num_groups, groups_per_item,
            x_TLK.data_ptr(), x_TLK.stride(0), x_TLK.stride(1), weight.address,
            weight.weight_stride, weight.group_stride, out_TLN.data_ptr(), out_TLN.stride(0),
            out_TLN.stride(1), out_TLN.dtype == torch.float32,
            self._borrow(num_rows * num_heads * stride), stride, self._int8_tile_rows,
        )  # fmt: skip

    def _experts(
        self,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        packed: PackedExperts,
        out_dtype: torch.dtype,
    ) -> Tensor:
        addresses = ids_TK.data_ptr(), weights_TK.data_ptr()
        return self._gated(x_TH, ids_TK.shape[1], addresses, packed, None, out_dtype)

    def gated_mlp(
        self, x_TH: Tensor, packed: PackedExperts, add_to_TH: Tensor | None = None
    ) -> Tensor:
        return self._gated(x_TH, 1, (0, 0), packed, add_to_TH, x_TH.dtype)

    def _gated(
        self,
        x_TH: Tensor,
        top_k: int,
        addresses: tuple[int, int],
        packed: PackedExperts,
        add_to_TH: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        out_TH = self._new(x_TH.shape, out_dtype)
        num_tokens = x_TH.shape[0]
        if not num_tokens:
            return out_TH
        gate_up, down, num_pairs = packed.gate_up, packed.down, num_tokens * top_k
        stride = aligned(record_bytes(packed.hidden))
        inner_stride = aligned(record_bytes(packed.inner))
        records = aligned(8 * (2 * num_pairs + 3 * packed.num_experts + 4))
        in_order = records + num_tokens * stride
        inners = in_order + num_pairs * stride * (num_tokens > 1 and addresses[0] != 0)
        y = inners + num_pairs * inner_stride
        # a block of 16 rows may end behind the last pair
        per_thread = num_pairs + 16
        scratch = self._borrow(y + 4 * 64 * per_thread * self._pool.num_threads)
        self._run(
            int8_regions.EXPERTS_INT8, x_TH.dtype, self._pool.num_threads, num_tokens, top_k,
            packed.num_experts, packed.hidden, packed.inner, gate_up.address,
            gate_up.weight_stride, gate_up.group_stride, gate_up.num_groups, down.address,
            down.weight_stride, down.group_stride, down.num_groups, x_TH.data_ptr(), *addresses,
            out_TH.data_ptr(), 0 if add_to_TH is None else add_to_TH.data_ptr(), scratch,
            scratch + records, stride, scratch + in_order, scratch + inners, inner_stride,
            scratch + y, out_dtype == torch.float32, self._int8_tile_rows,
        )  # fmt: skip
        return out_TH


def _panels(num_weights: int, num_columns: int, length: int) -> Tensor:
    shape = (num_weights, -(-num_columns // GROUP), -(-length // STEP), STEP_BYTES)
    return torch.empty(shape, dtype=torch.uint8)
