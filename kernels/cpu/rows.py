"""Rows as they lie: products with rows, weighted sums (the halves of attention), copies."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.products import dot_block, mix_block
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I16,
    I64,
    I64_POINTER,
    advance,
    intrinsic,
    is_bf16,
    keep_apart,
    narrow,
    num_lanes,
    offset,
    widen,
)
from whalepod.kernels.cpu.vectors import (
    load_vector,
    over_vectors,
    rounded,
    splat,
    store_vector,
)

_LANES = 16

_WIDE = num_lanes() == 16
"""Whether there are 32 vector registers of 16 lanes; with fewer, blocks of 4 x 4 would spill."""

_DOT_ROWS = 4 if _WIDE else 2


@njit
def dot_rows(x, x_stride, num_rows, w, w_stride, num_columns, length, out, out_stride):
    """Set out[r, c] = sum_k x[r, k] w[c, k]; each row of `w` comes from memory once."""
    keep_apart()
    c = 0
    if num_rows == 1 and _WIDE:
        while c + 8 <= num_columns:
            columns, to = advance(w, c * w_stride), advance(out, c)
            dot_block(1, 8, 0, x, x_stride, columns, w_stride, length, to, out_stride)
            c += 8
    while c + 4 <= num_columns:
        columns, to = advance(w, c * w_stride), advance(out, c)
        r = 0
        while r + _DOT_ROWS <= num_rows:
            dot_block(_DOT_ROWS, 4, r, x, x_stride, columns, w_stride, length, to, out_stride)
            r += _DOT_ROWS
        if r + 2 <= num_rows:
            dot_block(2, 4, r, x, x_stride, columns, w_stride, length, to, out_stride)
            r += 2
        if r < num_rows:
            dot_block(1, 4, r, x, x_stride, columns, w_stride, length, to, out_stride)
        c += 4
    while c < num_columns:
        columns, to = advance(w, c * w_stride), advance(out, c)
        for r in range(num_rows):
            dot_block(1, 1, r, x, x_stride, columns, w_stride, length, to, out_stride)
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


@intrinsic
def copy_row(typingctx, source, length, target):
    """Copy `length` values."""

    def codegen(context, builder, signature, args):
        size = builder.mul(args[1], I64(source.dtype.bitwidth // 8))
        cgutils.raw_memcpy(builder, args[2], args[0], size, 1)
        return context.get_dummy_value()

    return types.void(source, types.int64, source), codegen


@intrinsic
def add_row(typingctx, source, length, target):
    """Add `length` values to `target`: f32 sums, rounded."""
    is_short = is_bf16(source)
    kind = ir.VectorType(I16 if is_short else F32, _LANES)

    def codegen(context, builder, signature, args):
        source_ptr, size, target_ptr = args

        def step(i: Any, mask: Any) -> None:
            place = offset(builder, target_ptr, i)
            values = [
                load_vector(builder, pointer, kind, mask)
                for pointer in (offset(builder, source_ptr, i), place)
            ]
            if is_short:
                values = [widen(builder, value) for value in values]
            total = builder.fadd(*values)
            store_vector(builder, narrow(builder, total) if is_short else total, place, mask)

        over_vectors(builder, size, _LANES, step)
        return context.get_dummy_value()

    return types.void(source, types.int64, source), codegen


@intrinsic
def widen_row(typingctx, source, length, target):
    """Set target[i] to source[i] in f32."""
    is_short = is_bf16(source)
    kind = ir.VectorType(I16 if is_short else F32, _LANES)

    def codegen(context, builder, signature, args):
        def step(i: Any, mask: Any) -> None:
            value = load_vector(builder, offset(builder, args[0], i), kind, mask)
            value = widen(builder, value) if is_short else value
            store_vector(builder, value, offset(builder, args[2], i), mask)

        over_vectors(builder, args[1], _LANES, step)
        return context.get_dummy_value()

    return types.void(source, types.int64, F32_POINTER), codegen


@intrinsic
def combine_rows(typingctx, weights, places, num_rows, y, y_stride, count, out):
    """Set out[c] = sum_k weights[k] y[places[k], c] for `count` columns, in the order of k.

    Rows whose place is -1 add nothing. Products and sums are f32, rounded once to what `out` holds.
    """
    kind = ir.VectorType(F32, _LANES)

    def codegen(context, builder, signature, args):
        weights_ptr, places_ptr, rows, y_ptr, y_step, columns, out_ptr = args

        def step(column: Any, mask: Any) -> None:
            slot = cgutils.alloca_once(builder, kind)
            builder.store(ir.Constant(kind, None), slot)
            with cgutils.for_range(builder, rows) as loop:
                place = builder.load(offset(builder, places_ptr, loop.index))
                with builder.if_then(builder.icmp_signed(">=", place, I64(0)), likely=True):
                    weight = builder.load(offset(builder, weights_ptr, loop.index))
                    at = builder.add(builder.mul(place, y_step), column)
                    row = load_vector(builder, offset(builder, y_ptr, at), kind, mask)
                    # rounded twice, as ranks of expert parallelism add the rows of others
                    term = rounded(builder, builder.fmul(splat(builder, weight, _LANES), row))
                    builder.store(builder.fadd(term, builder.load(slot)), slot)
            total = builder.load(slot)
            value = narrow(builder, total) if is_bf16(out) else total
            store_vector(builder, value, offset(builder, out_ptr, column), mask)

        over_vectors(builder, columns, _LANES, step)
        return context.get_dummy_value()

    signature = types.void(
        F32_POINTER, I64_POINTER, types.int64, F32_POINTER, types.int64, types.int64, out
    )
    return signature, codegen
