"""Products of few rows with a weight: at a small batch the time is that of reading the weight."""

from __future__ import annotations

from numba import njit

from whalepod.kernels.cpu.products import dot_block, mix_block
from whalepod.kernels.cpu.regions import Region, argument, take
from whalepod.kernels.cpu.simd import advance, f32_pointer, keep_apart, num_lanes, pointer_like

_WIDE = num_lanes() == 16
"""Whether there are 32 vector registers of 16 lanes; with fewer, blocks of 4 x 4 would spill."""

_DOT_ROWS = 4 if _WIDE else 2


@njit
def dot_rows(x, row_ids, x_stride, num_rows, w, w_stride, num_columns, length, out, out_stride):
    """Set out[r, c] = sum_k x[row_ids[r], k] w[c, k]; each row of `w` comes from memory once.

    `row_ids` is a pointer to int64, or None for rows 0, 1, ...
    """
    keep_apart()
    c = 0
    if num_rows == 1 and _WIDE:
        while c + 8 <= num_columns:
            columns, to = advance(w, c * w_stride), advance(out, c)
            dot_block(1, 8, 0, x, row_ids, x_stride, columns, w_stride, length, to, out_stride)
            c += 8
    while c + 4 <= num_columns:
        columns, to = advance(w, c * w_stride), advance(out, c)
        r = 0
        while r + _DOT_ROWS <= num_rows:
            dot_block(
                _DOT_ROWS, 4, r, x, row_ids, x_stride, columns, w_stride, length, to, out_stride
            )
            r += _DOT_ROWS
        if r + 2 <= num_rows:
            dot_block(2, 4, r, x, row_ids, x_stride, columns, w_stride, length, to, out_stride)
            r += 2
        if r < num_rows:
            dot_block(1, 4, r, x, row_ids, x_stride, columns, w_stride, length, to, out_stride)
        c += 4
    while c < num_columns:
        columns, to = advance(w, c * w_stride), advance(out, c)
        for r in range(num_rows):
            dot_block(1, 1, r, x, row_ids, x_stride, columns, w_stride, length, to, out_stride)
        c += 1


@njit
def mix_rows(p, p_stride, num_rows, v, v_stride, length, num_columns, out, out_stride, add):
    """Set (or add to) out[r, c] the sum_t p[r, t] v[t, c]; see `mix_block`."""
    keep_apart()
    r = 0
    if _WIDE:
        while r + 8 <= num_rows:
            row, target = advance(p, r * p_stride), advance(out, r * out_stride)
            mix_block(
                8, 1, row, p_stride, v, v_stride, length, num_columns, target, out_stride, add
            )
            r += 8
        while r + 4 <= num_rows:
            row, target = advance(p, r * p_stride), advance(out, r * out_stride)
            mix_block(
                4, 2, row, p_stride, v, v_stride, length, num_columns, target, out_stride, add
            )
            r += 4
    while r < num_rows:
        row, target = advance(p, r * p_stride), advance(out, r * out_stride)
        mix_block(1, 4, row, p_stride, v, v_stride, length, num_columns, target, out_stride, add)
        r += 1


@njit
def _linear(block, out):
    num_rows, num_columns, length = argument(block, 0), argument(block, 1), argument(block, 2)
    x = pointer_like(block, argument(block, 3))
    w = pointer_like(block, argument(block, 4))
    chunk = argument(block, 6)
    while True:
        first = take(block, 0) * chunk
        if first >= num_columns:
            return
        count = min(chunk, num_columns - first)
        columns, target = advance(w, first * length), advance(out, first)
        dot_rows(x, None, length, num_rows, columns, length, count, length, target, num_columns)


def _linear_region(block):
    """out[T, N] in the model dtype. Arguments: T, N, K, x, w, out, columns per item."""
    _linear(block, pointer_like(block, argument(block, 5)))


def _linear_f32_region(block):
    """The same with an f32 `out`."""
    _linear(block, f32_pointer(argument(block, 5)))


LINEAR = Region(_linear_region, "7q")
LINEAR_F32 = Region(_linear_f32_region, "7q")


def _heads_region(block):
    """out[T, N, B] = x[T, N, A] w[N, A, B].

    Arguments: T, N, A, B, x, its strides of T and N, w, its strides of N, A and B, out.
    """
    num_tokens, num_heads = argument(block, 0), argument(block, 1)
    length, width = argument(block, 2), argument(block, 3)
    x = pointer_like(block, argument(block, 4))
    token_stride, head_stride = argument(block, 5), argument(block, 6)
    w = pointer_like(block, argument(block, 7))
    w_stride, a_stride, b_stride = argument(block, 8), argument(block, 9), argument(block, 10)
    out = pointer_like(block, argument(block, 11))
    out_stride = num_heads * width
    while True:
        head = take(block, 0)
        if head >= num_heads:
            return
        rows, weight = advance(x, head * head_stride), advance(w, head * w_stride)
        target = advance(out, head * width)
        if b_stride == 1:
            mix_rows(
                rows, token_stride, num_tokens, weight, a_stride, length, width, target,
                out_stride, False,
            )  # fmt: skip
        else:
            dot_rows(
                rows, None, token_stride, num_tokens, weight, b_stride, width, length, target,
                out_stride,
            )  # fmt: skip


HEADS = Region(_heads_region, "12q")
