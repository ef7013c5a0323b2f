"""Operations on rows by themselves: embedding, linear layers, norms, rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.cpu import dense, elementwise
from whalepod.kernels.cpu.operations import Operations
from whalepod.kernels.cpu.packed import PackedLinear

_BLOCK_GROUPS = 4


class DenseOperations(Operations):
    """The part of `Kernels` where no token sees another."""

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        num_tokens, hidden = token_ids_T.shape[0], embedding_VH.shape[1]
        out_TH = self._new((num_tokens, hidden), embedding_VH.dtype)
        self._run(
            elementwise.EMBED, out_TH.dtype, items(num_tokens), num_tokens, hidden,
            token_ids_T.data_ptr(), embedding_VH.data_ptr(), out_TH.data_ptr(),
        )  # fmt: skip
        return out_TH

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> PackedLinear:
        return self._packer.linear(weight_NK.unsqueeze(0))

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._new((x_TK.shape[0], weight.num_columns), x_TK.dtype)
        self._linear(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def linear_f32(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._new((x_TK.shape[0], weight.num_columns), torch.float32)
        self._linear(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def pack_batched_linear(self, weight_NAB: Tensor) -> PackedLinear:
        return self._packer.linear(weight_NAB.transpose(1, 2))

    def batched_linear(self, x_TNA: Tensor, weight: PackedLinear) -> Tensor:
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
            elementwise.RMS_NORM, x_TH.dtype, items(num_rows), num_rows, length, x_TH.data_ptr(),
            x_TH.stride(0), weight_H.data_ptr(), out_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, length = x_TH.shape
        out_TH, sum_TH = (self._new(x_TH.shape, x_TH.dtype) for _ in range(2))
        self._run(
            elementwise.ADD_RMS_NORM, x_TH.dtype, items(num_rows), num_rows, length,
            x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(),
            sum_TH.data_ptr(), eps,
        )  # fmt: skip
        return out_TH, sum_TH

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        out_TND = self._new(x_TND.shape, x_TND.dtype)
        self._rope(self._dense(x_TND), positions_T, cos_sin_SD, out_TND)
        return out_TND

    def _rope(
        self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor, out_TND: Tensor
    ) -> None:
        num_tokens, num_heads, width = x_TND.shape
        self._run(
            elementwise.ROPE, x_TND.dtype, items(num_tokens), num_tokens, num_heads, width,
            x_TND.data_ptr(), x_TND.stride(0), x_TND.stride(1), positions_T.data_ptr(),
            cos_sin_SD.data_ptr(), out_TND.data_ptr(), out_TND.stride(0), out_TND.stride(1),
        )  # fmt: skip


def items(num_rows: int) -> int:
    """Return how many items a kernel of rows has."""
    return -(-num_rows // elementwise.ROWS_PER_ITEM)
