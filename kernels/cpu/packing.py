"""Packs weights on all threads: a copy with another order, at the speed of memory."""

from __future__ import annotations

from numba import njit

from whalepod.kernels.cpu.simd import advance, i32_pointer, load, store
from whalepod.kernels.cpu.thread_pool import ParallelKernel, argument, take

GROUP = 16


@njit
def _pack_group(source, row_stride, num_rows, num_units, out):
    """Set out[u, r] = source[r, u], 0 for rows at or past `num_rows`: 16 rows side by side.

    A unit is 4 bytes: an f32, or two bfloat16.
    """
    if num_rows == GROUP:
        for u in range(num_units):
            for r in range(GROUP):
                store(out, u * GROUP + r, load(source, r * row_stride + u))
        return
    for u in range(num_units):
        for r in range(GROUP):
            value = 0
            if r < num_rows:
                value = load(source, r * row_stride + u)
            store(out, u * GROUP + r, value)


def _pack_kernel(block):
    """Arguments: matrices, rows and units of each, source and its strides of matrices and rows in
    units, out and its strides of matrices and groups.
    """
    num_matrices, num_rows, num_units = argument(block, 0), argument(block, 1), argument(block, 2)
    source, matrix_stride = i32_pointer(argument(block, 3)), argument(block, 4)
    row_stride, out = argument(block, 5), i32_pointer(argument(block, 6))
    out_matrix_stride, out_group_stride = argument(block, 7), argument(block, 8)
    num_groups = -(-num_rows // GROUP)
    while True:
        item = take(block, 0)
        if item >= num_matrices * num_groups:
            return
        matrix, group = item // num_groups, item % num_groups
        first = group * GROUP
        _pack_group(
            advance(source, matrix * matrix_stride + first * row_stride), row_stride,
            min(GROUP, num_rows - first), num_units,
            advance(out, matrix * out_matrix_stride + group * out_group_stride),
        )  # fmt: skip


PACK = ParallelKernel(_pack_kernel, "9q")
