"""Linear layers: rows with one packed weight, or with one per head.

The weight comes from memory once for all rows of a step up to `ROWS_PER_ITEM`, a block of 64
columns at a time; at a small batch that is all of the time.
"""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor

from whalepod.kernels.cpu.abi import (
    ParallelKernel,
    arguments,
    by_operands,
    items,
    record,
    with_operands,
)
from whalepod.kernels.cpu.exponentials import store_sums
from whalepod.kernels.cpu.packed import PackedLinear, WeightFormat
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    GROUP,
    block_of_sums,
    multiply,
)
from whalepod.kernels.cpu.simd import EXACT_POINTERS, advance, f32_pointer, pointer_like
from whalepod.kernels.cpu.workspace import Workspace, aligned

ROWS_PER_ITEM = 256
"""Rows that stay in the second-level cache while an item's columns pass by."""

QUANTIZED_PER_ITEM = 8
"""Rows that are quantised at once."""


@by_operands
def prepare_rows(weight, block, a):
    """Return the rows that are multiplied, and their strides of T and L: as they are, or, in a
    stage, quantised."""
    raise NotImplementedError


@prepare_rows.written_for(*EXACT_POINTERS)
def _leave_rows(weight, block, a):
    return a.x, a.row_stride, a.head_stride


@njit
def store_block(sums, num_rows, count, out, is_f32, row_stride, like):
    """Write rows of `count` sums to the address `out`, in f32 or in the dtype of `like`."""
    for r in range(num_rows):
        source = advance(sums, r * BLOCK_COLUMNS)
        if is_f32:
            store_sums(source, count, advance(f32_pointer(out), r * row_stride))
        else:
            store_sums(source, count, advance(pointer_like(like, out), r * row_stride))


_LinearArguments = record(
    "num_weights num_rows num_columns x_length",
    "length",  # K as products read it
    "num_groups groups_per_item x:values row_stride head_stride weight:operands weight_stride",
    "group_stride out value_bytes out_row_stride out_head_stride",
    "is_f32:bool",  # Whether `out` holds f32; else the model dtype
    "records:bytes",  # quantised rows `[L, T]`
    "record_stride block_rows tile_rows",
)
"""out[T, L, N] = x[T, L, K] w[L, N, K]; strides in elements, of quantised ones in bytes."""


def _linear_kernel(block):
    a = arguments(block, _LinearArguments)
    rows, row_stride, head_stride = prepare_rows(a.weight, block, a)
    sums = block_of_sums()
    column_items = -(-a.num_groups // a.groups_per_item)
    row_items = -(-a.num_rows // ROWS_PER_ITEM)
    for item in items(block, 1, a.num_weights * row_items * column_items, is_last=True):
        head, rest = item // (row_items * column_items), item % (row_items * column_items)
        first_row, first = rest // column_items * ROWS_PER_ITEM, rest % column_items
        first *= a.groups_per_item
        for group in range(first, min(first + a.groups_per_item, a.num_groups), BLOCK_GROUPS):
            weight = advance(a.weight, head * a.weight_stride + group * a.group_stride)
            groups, column = min(BLOCK_GROUPS, a.num_groups - group), group * GROUP
            count = min(BLOCK_COLUMNS, a.num_columns - column)
            for row in range(first_row, min(first_row + ROWS_PER_ITEM, a.num_rows), a.block_rows):
                num_rows = min(a.block_rows, a.num_rows - row)
                source = advance(rows, head * head_stride + row * row_stride)
                multiply(
                    weight, a.group_stride, groups, source, row_stride, num_rows, a.length,
                    a.tile_rows, sums,
                )  # fmt: skip
                place = row * a.out_row_stride + head * a.out_head_stride + column
                out = a.out + place * a.value_bytes
                store_block(sums, num_rows, count, out, a.is_f32, a.out_row_stride, a.x)


LINEAR = ParallelKernel(_linear_kernel, _LinearArguments)


class LinearOperations:
    """The part of `Kernels` where rows are multiplied with weights that are not gated."""

    def __init__(self, work: Workspace, weights: WeightFormat, sensitive: WeightFormat) -> None:
        """sensitive: the format of weights whose errors matter most"""
        self._work, self._weights, self._sensitive = work, weights, sensitive

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> PackedLinear:
        return (self._sensitive if is_sensitive else self._weights).pack(weight_NK.unsqueeze(0))

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._work.new((x_TK.shape[0], weight.num_columns), x_TK.dtype)
        self.linear_into(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def linear_f32(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        out_TN = self._work.new((x_TK.shape[0], weight.num_columns), torch.float32)
        self.linear_into(x_TK.unsqueeze(1), weight, out_TN.unsqueeze(1))
        return out_TN

    def pack_batched_linear(self, weight_NAB: Tensor) -> PackedLinear:
        return self._weights.pack(weight_NAB.transpose(1, 2))

    def batched_linear(self, x_TNA: Tensor, weight: PackedLinear) -> Tensor:
        shape = (x_TNA.shape[0], weight.num_weights, weight.num_columns)
        out_TNB = self._work.new(shape, x_TNA.dtype)
        self.linear_into(x_TNA, weight, out_TNB)
        return out_TNB

    def linear_into(self, x_TLK: Tensor, weight: PackedLinear, out_TLN: Tensor) -> None:
        """Multiply row [t, l] with weight l; `out_TLN` is of the dtype of `x_TLK`, or f32."""
        if not out_TLN.numel():
            return
        x_TLK = self._work.with_dense_rows(x_TLK)
        num_rows, format_ = x_TLK.shape[0], weight.format
        groups_per_item = BLOCK_GROUPS if num_rows < 64 else 4 * BLOCK_GROUPS
        record_bytes = aligned(format_.record_bytes(weight.length))
        records_bytes = num_rows * weight.num_weights * record_bytes
        num_items = weight.num_weights * -(-weight.num_groups // groups_per_item)
        num_items *= -(-num_rows // ROWS_PER_ITEM)
        linear = _LinearArguments(
            num_weights=weight.num_weights, num_rows=num_rows, num_columns=weight.num_columns,
            x_length=weight.length, length=format_.padded(weight.length),
            num_groups=weight.num_groups, groups_per_item=groups_per_item, x=x_TLK.data_ptr(),
            row_stride=x_TLK.stride(0), head_stride=x_TLK.stride(1), weight=weight.address,
            weight_stride=weight.weight_stride, group_stride=weight.group_stride,
            out=out_TLN.data_ptr(), value_bytes=out_TLN.element_size(),
            out_row_stride=out_TLN.stride(0), out_head_stride=out_TLN.stride(1),
            is_f32=out_TLN.dtype == torch.float32,
            records=self._work.borrow(records_bytes) if records_bytes else 0,
            record_stride=record_bytes, block_rows=format_.block_rows, tile_rows=format_.tile_rows,
        )  # fmt: skip
        if format_.quantizes_rows:  # quantising has more items
            num_items = self._work.num_threads
        kernel = with_operands(LINEAR, format_.operands(x_TLK.dtype))
        self._work.run(kernel, x_TLK.dtype, num_items, linear)
