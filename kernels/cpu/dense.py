"""Linear layers: rows with one packed weight, or with one per head.

The weight comes from memory once for all rows of a step up to `ROWS_PER_ITEM`, a block of 64
columns at a time; at a small batch that is all of the time.
"""

from __future__ import annotations

from whalepod.kernels.cpu.exponentials import store_sums
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    BLOCK_ROWS,
    block_of_sums,
    multiply_block,
)
from whalepod.kernels.cpu.simd import advance, f32_pointer, pointer_like
from whalepod.kernels.cpu.thread_pool import ParallelKernel, argument, take

ROWS_PER_ITEM = 256
"""Rows that stay in the second-level cache while an item's columns pass by."""


def _linear_kernel(block):
    """out[T, L, N] = x[T, L, K] w[L, N, K], in the model dtype or f32.

    Arguments: L, T, N, K, groups, groups per item, x, its strides of T and L, w, its strides of L
    and of groups, out, its strides of T and L, tile rows, whether out is f32.
    """
    num_rows, num_columns, length = argument(block, 1), argument(block, 2), argument(block, 3)
    num_groups, groups_per_item = argument(block, 4), argument(block, 5)
    x_address, w_address, out_address = argument(block, 6), argument(block, 9), argument(block, 12)
    row_stride, head_stride = argument(block, 7), argument(block, 8)
    weight_stride, group_stride = argument(block, 10), argument(block, 11)
    out_row_stride, out_head_stride = argument(block, 13), argument(block, 14)
    tile_rows, is_f32 = argument(block, 15), argument(block, 16) != 0
    sums = block_of_sums()
    column_items = -(-num_groups // groups_per_item)
    row_items = -(-num_rows // ROWS_PER_ITEM)
    num_items = argument(block, 0) * row_items * column_items
    while True:
        item = take(block, 0)
        if item >= num_items:
            return
        head, rest = item // (row_items * column_items), item % (row_items * column_items)
        first_row, first = rest // column_items * ROWS_PER_ITEM, rest % column_items
        first *= groups_per_item
        x = advance(pointer_like(block, x_address), head * head_stride)
        weight = advance(pointer_like(block, w_address), head * weight_stride)
        for group in range(first, min(first + groups_per_item, num_groups), BLOCK_GROUPS):
            panel, column = advance(weight, group * group_stride), group * 16
            groups = min(BLOCK_GROUPS, num_groups - group)
            count = min(BLOCK_COLUMNS, num_columns - column)
            for row in range(first_row, min(first_row + ROWS_PER_ITEM, num_rows), BLOCK_ROWS):
                rows = min(BLOCK_ROWS, num_rows - row)
                multiply_block(
                    advance(x, row * row_stride), row_stride, rows, panel, group_stride, groups,
                    length, tile_rows, sums,
                )  # fmt: skip
                for r in range(rows):
                    place, source = (row + r) * out_row_stride, advance(sums, r * BLOCK_COLUMNS)
                    place += head * out_head_stride + column
                    if is_f32:
                        store_sums(source, count, advance(f32_pointer(out_address), place))
                    else:
                        out = pointer_like(block, out_address)
                        store_sums(source, count, advance(out, place))


LINEAR = ParallelKernel(_linear_kernel, "17q")
