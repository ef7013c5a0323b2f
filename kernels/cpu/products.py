"""Register-blocked products: rows with rows (`dot_block`), and weighted sums of rows (`mix_block`).

Each output's products are added in an order that depends on the length alone, so a row's bits do
not depend on the rows computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I16,
    I32,
    I64,
    as_pointer,
    intrinsic,
    is_bf16,
    num_lanes,
    offset,
    target_has,
    widen,
)
from whalepod.kernels.cpu.vectors import (
    dot_pairs,
    fma,
    halves,
    lanes_below,
    load_vector,
    prefetch,
    splat,
    store_vector,
    sum_lanes,
)


class _Dot:
    """One step of dot products: how many values it reads, and how it multiplies them."""

    def __init__(self, is_bf16: bool) -> None:
        self.lanes = num_lanes()
        self.is_bf16 = is_bf16
        self.is_native = is_bf16 and target_has("avx512bf16")
        self.step = 2 * self.lanes if is_bf16 else self.lanes
        self.sums = ir.VectorType(F32, self.lanes)

    def load(self, builder: Any, pointer: Any, mask: Any) -> Any:
        kind = ir.VectorType(I16 if self.is_bf16 else F32, self.step)
        values = load_vector(builder, pointer, kind, mask)
        if not self.is_bf16 or self.is_native:
            return values
        return halves(builder, builder.bitcast(values, ir.VectorType(I32, self.lanes)))

    def add(self, builder: Any, acc: Any, a: Any, b: Any) -> Any:
        if self.is_native:
            return dot_pairs(builder, acc, a, b)
        if not self.is_bf16:
            return fma(builder, a, b, acc)
        return fma(builder, a[1], b[1], fma(builder, a[0], b[0], acc))


@intrinsic(prefer_literal=True)
def dot_block(
    typingctx, num_rows, num_columns, first_row, x, x_stride, w, w_stride, length, out, out_stride
):  # fmt: skip
    """Set out[r, c] = sum_k x[r, k] w[c, k] for rows r from `first_row` on, columns c.

    num_rows, num_columns  literal ints; columns a power of two
    x, w                   pointers to bfloat16 or f32, the same type; strides in elements
    out                    pointer to f32
    """
    rows, columns = num_rows.literal_value, num_columns.literal_value
    dot = _Dot(is_bf16(x))

    def codegen(context, builder, signature, args):
        _, _, first, x_ptr, x_step, w_ptr, w_step, length_value, out_ptr, out_step = args
        indices = [builder.add(first, I64(r)) for r in range(rows)]
        x_rows = [offset(builder, x_ptr, builder.mul(index, x_step)) for index in indices]
        w_rows = [offset(builder, w_ptr, builder.mul(I64(c), w_step)) for c in range(columns)]
        slots = [
            [cgutils.alloca_once_value(builder, ir.Constant(dot.sums, None)) for _ in w_rows]
            for _ in x_rows
        ]
        ahead = builder.mul(I64(columns), w_step)
        _emit_dot_loop(builder, dot, x_rows, w_rows, slots, length_value, ahead)
        for index, row_slots in zip(indices, slots, strict=True):
            sums = sum_lanes(builder, [builder.load(slot) for slot in row_slots])
            store_vector(
                builder, sums, offset(builder, out_ptr, builder.mul(index, out_step)), None
            )
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_columns, types.int64, x, types.int64, w, types.int64, types.int64,
        F32_POINTER, types.int64,
    )  # fmt: skip
    return signature, codegen


def _emit_dot_loop(
    builder: Any, dot: _Dot, x_rows: Any, w_rows: Any, slots: Any, length: Any, ahead: Any
) -> None:
    """Emit the loop over whole vectors, then one masked step if the length leaves a rest.

    `ahead`: elements from a row of w to the one that will be wanted next, or None. Asking for it
    early is worth 10 to 60 % from memory: the hardware does not follow this many rows.
    """

    def step(k: Any, mask: Any) -> None:
        w_values = [dot.load(builder, offset(builder, w, k), mask) for w in w_rows]
        if ahead is not None:
            for w in w_rows:
                prefetch(builder, offset(builder, w, builder.add(k, ahead)))
        for x_row, row_slots in zip(x_rows, slots, strict=True):
            x_value = dot.load(builder, offset(builder, x_row, k), mask)
            for w_value, slot in zip(w_values, row_slots, strict=True):
                builder.store(dot.add(builder, builder.load(slot), x_value, w_value), slot)

    whole = builder.and_(length, I64(-dot.step))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(dot.step), inc=True) as (k, _):
        step(k, None)
    with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
        step(whole, lanes_below(builder, builder.sub(length, whole), dot.step))


class _Mix:
    """Weighted sums of value rows, `2 * lanes` columns at a time."""

    def __init__(self, is_bf16: bool) -> None:
        self.lanes = num_lanes()
        self.is_bf16 = is_bf16
        self.is_native = is_bf16 and target_has("avx512bf16")
        self.columns = 2 * self.lanes
        self.sums = ir.VectorType(F32, self.lanes)
        self.raw = ir.VectorType(I16 if is_bf16 else F32, self.columns)

    def shuffle(self, builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(I32, len(lanes))
        return builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))

    def values(self, builder: Any, row: Any, next_row: Any) -> tuple[Any, Any]:
        """Return what the two sums of a row are multiplied with."""
        n = self.lanes
        if self.is_native:
            first = [lane for i in range(n) for lane in (i, self.columns + i)]
            low = self.shuffle(builder, row, next_row, first)
            return low, self.shuffle(builder, row, next_row, [lane + n for lane in first])
        if self.is_bf16:
            return halves(builder, builder.bitcast(row, ir.VectorType(I32, n)))
        low = self.shuffle(builder, row, row, range(n))
        return low, self.shuffle(builder, row, row, range(n, 2 * n))

    def weight(self, builder: Any, pointer: Any, is_pair: bool) -> Any:
        """Return the weight (native: of two neighbouring rows) in every lane."""
        if not self.is_native:
            value = builder.load(pointer)
            return splat(builder, widen(builder, value) if self.is_bf16 else value, self.lanes)
        if is_pair:
            pair = builder.load(as_pointer(builder, pointer, I32), align=2)
        else:
            pair = builder.zext(builder.load(pointer), I32)
        return builder.bitcast(splat(builder, pair, self.lanes), self.raw)

    def add(self, builder: Any, acc: Any, weight: Any, value: Any) -> Any:
        if self.is_native:
            return dot_pairs(builder, acc, weight, value)
        return fma(builder, weight, value, acc)

    def in_order(self, builder: Any, pair: Sequence[Any]) -> Any:
        """Return the two sums of a row as one vector in the order of the columns."""
        n = self.lanes
        if self.is_bf16 and not self.is_native:
            lanes = [lane for i in range(n) for lane in (i, n + i)]
        else:
            lanes = list(range(2 * n))
        return self.shuffle(builder, pair[0], pair[1], lanes)

    def split(self, builder: Any, row: Any) -> tuple[Any, Any]:
        """Undo `in_order`."""
        n = self.lanes
        if self.is_bf16 and not self.is_native:
            lanes = (range(0, 2 * n, 2), range(1, 2 * n, 2))
        else:
            lanes = (range(n), range(n, 2 * n))
        return self.shuffle(builder, row, row, lanes[0]), self.shuffle(builder, row, row, lanes[1])


@intrinsic(prefer_literal=True)
def mix_block(
    typingctx, num_rows, num_tiles, p, p_stride, v, v_stride, length, num_columns, out, out_stride,
    add,
):  # fmt: skip
    """Set out[r, c] = sum_t p[r, t] v[t, c] (plus the old out[r, c] if `add`) for a few rows.

    num_rows, num_tiles  literal ints: sums of `num_tiles` pairs of vectors per row in registers
    p, v                 pointers to bfloat16 or f32, the same type; strides in elements
    out                  pointer to f32
    Rows of `v` at or past `length` are not read.
    """
    rows, tiles = num_rows.literal_value, num_tiles.literal_value
    mix = _Mix(is_bf16(v))

    def codegen(context, builder, signature, args):
        args = args[2:]
        columns = args[5]
        start = I64(0)
        for count in sorted({tiles, 1}, reverse=True):
            width = mix.columns * count
            rest = builder.sub(columns, start)
            stop = builder.add(start, builder.sub(rest, builder.srem(rest, I64(width))))
            with cgutils.for_range_slice(builder, start, stop, I64(width), inc=True) as (c, _):
                _emit_mix(builder, mix, rows, count, args, c, None)
            start = stop
        with builder.if_then(builder.icmp_signed("<", start, columns), likely=False):
            mask = lanes_below(builder, builder.sub(columns, start), mix.columns)
            _emit_mix(builder, mix, rows, 1, args, start, mask)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_tiles, p, types.int64, v, types.int64, types.int64, types.int64,
        F32_POINTER, types.int64, types.boolean,
    )  # fmt: skip
    return signature, codegen


def _emit_mix(
    builder: Any, mix: _Mix, rows: int, tiles: int, args: Any, column: Any, mask: Any
) -> None:
    """Emit the sums of `tiles * mix.columns` columns of each row."""
    p_ptr, p_step, v_ptr, v_step, length, _, out_ptr, out_step, add = args
    p_rows = [offset(builder, p_ptr, builder.mul(I64(r), p_step)) for r in range(rows)]
    columns = [builder.add(column, I64(tile * mix.columns)) for tile in range(tiles)]
    outs = [
        offset(builder, out_ptr, builder.add(builder.mul(I64(r), out_step), c))
        for r in range(rows)
        for c in columns
    ]
    slots = [
        [cgutils.alloca_once_value(builder, ir.Constant(mix.sums, None)) for _ in range(2)]
        for _ in outs
    ]
    single = ir.VectorType(F32, mix.columns)
    with builder.if_then(add):
        for out, pair in zip(outs, slots, strict=True):
            old = load_vector(builder, out, single, mask)
            for half, slot in zip(mix.split(builder, old), pair, strict=True):
                builder.store(half, slot)

    def step(t: Any, is_pair: bool) -> None:
        values = []
        for c in columns:
            row_ptr = offset(builder, v_ptr, builder.add(builder.mul(t, v_step), c))
            row = load_vector(builder, row_ptr, mix.raw, mask)
            following = ir.Constant(mix.raw, None)
            if is_pair:
                following = load_vector(builder, offset(builder, row_ptr, v_step), mix.raw, mask)
            values.append(mix.values(builder, row, following))
        for index, pair in enumerate(slots):
            weight = mix.weight(builder, offset(builder, p_rows[index // tiles], t), is_pair)
            for slot, value in zip(pair, values[index % tiles], strict=True):
                builder.store(mix.add(builder, builder.load(slot), weight, value), slot)

    stride = 2 if mix.is_native else 1
    whole = builder.and_(length, I64(-stride))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(stride), inc=True) as (t, _):
        step(t, mix.is_native)
    if mix.is_native:
        with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
            step(whole, False)
    for out, pair in zip(outs, slots, strict=True):
        sums = mix.in_order(builder, [builder.load(slot) for slot in pair])
        store_vector(builder, sums, out, mask)


@intrinsic
def row_dot(typingctx, a, b, length):
    """Return the f32 sum of a[k] b[k]; both bfloat16 or both f32."""
    dot = _Dot(is_bf16(a))

    def codegen(context, builder, signature, args):
        slot = cgutils.alloca_once_value(builder, ir.Constant(dot.sums, None))
        _emit_dot_loop(builder, dot, [args[0]], [args[1]], [[slot]], args[2], None)
        total = sum_lanes(builder, [builder.load(slot)])
        return builder.extract_element(total, I32(0))

    return types.float32(a, b, types.int64), codegen
