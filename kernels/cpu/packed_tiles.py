"""Products of rows with a packed weight: any rows by 64 columns at the most, in f32.

A weight lies in groups of 16 columns (`packed.py`). Each vector of a group holds 16 columns at one
k (f32) or two neighbouring k (bfloat16), and is multiplied with one value or pair of a row in all
lanes: every output is a lane of its own, added in the order of k whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.abi import by_operands
from whalepod.kernels.cpu.simd import (
    BF16_POINTER,
    F32,
    F32_POINTER,
    I16,
    I32,
    I64,
    advance,
    as_pointer,
    intrinsic,
    is_bf16,
    keep_apart,
    num_lanes,
    offset,
    target_has,
    widen,
)
from whalepod.kernels.cpu.vectors import dot_pairs, fma, halves, load_vector, prefetch, splat

GROUP = 16
"""Columns of a group: the f32 lanes of a vector."""

BLOCK_GROUPS = 4
BLOCK_COLUMNS = BLOCK_GROUPS * GROUP
BLOCK_ROWS = 128
"""Rows of one call, whose sums are `[128, 64]` f32."""

_WIDE = num_lanes() == 16
"""Whether there are 32 vector registers of 16 lanes."""

_AHEAD_BYTES = 1024
"""How far ahead of its use a weight is asked for. Hardware prefetchers stop at 4 KiB borders; from
memory this is worth 10 to 25 % (one core of a Sapphire-Rapids-class machine, November 2026)."""


class _Product:
    """One step along k: how many values it takes, and how it multiplies them."""

    def __init__(self, is_bf16: bool) -> None:
        self.is_bf16 = is_bf16
        self.is_native = is_bf16 and target_has("avx512bf16")
        self.values = 2 if is_bf16 else 1
        self.sums = ir.VectorType(F32, GROUP)
        self.raw = ir.VectorType(I16 if is_bf16 else F32, GROUP * self.values)

    def weight(self, builder: Any, pointer: Any) -> Any:
        vector = load_vector(builder, pointer, self.raw, None)
        if not self.is_bf16 or self.is_native:
            return vector
        return halves(builder, builder.bitcast(vector, ir.VectorType(I32, GROUP)))

    def row(self, builder: Any, pointer: Any, is_single: bool) -> Any:
        """Load a value or pair of a row into all lanes; `is_single`: the pair has no second."""
        if not self.is_bf16:
            return splat(builder, builder.load(pointer), GROUP)
        if is_single:
            pair = builder.zext(builder.load(pointer), I32)
        else:
            pair = builder.load(as_pointer(builder, pointer, I32), align=2)
        if self.is_native:
            return builder.bitcast(splat(builder, pair, GROUP), self.raw)
        low = widen(builder, builder.trunc(pair, I16))
        high = widen(builder, builder.trunc(builder.lshr(pair, I32(16)), I16))
        return splat(builder, low, GROUP), splat(builder, high, GROUP)

    def add(self, builder: Any, acc: Any, row: Any, weight: Any) -> Any:
        if self.is_native:
            return dot_pairs(builder, acc, row, weight)
        if not self.is_bf16:
            return fma(builder, row, weight, acc)
        return fma(builder, row[1], weight[1], fma(builder, row[0], weight[0], acc))


@intrinsic(prefer_literal=True)
def _tile_block(typingctx, num_rows, num_groups, x, x_stride, w, w_stride, length, sums):
    """Set sums[r, c] = sum_k x[r, k] w[c, k] for a few rows and groups; sums `[rows, 64]` f32.

    num_rows, num_groups  literal ints: what fits in registers
    x, w                  pointers to bfloat16 or f32, the same type; strides in elements, w's of
                          groups
    """
    rows, groups = num_rows.literal_value, num_groups.literal_value
    product = _Product(is_bf16(w))

    def codegen(context, builder, signature, args):
        _, _, x_ptr, x_step, w_ptr, w_step, length_value, out_ptr = args
        x_rows = [offset(builder, x_ptr, builder.mul(I64(r), x_step)) for r in range(rows)]
        w_groups = [offset(builder, w_ptr, builder.mul(I64(g), w_step)) for g in range(groups)]
        slots = [
            [cgutils.alloca_once_value(builder, ir.Constant(product.sums, None)) for _ in w_groups]
            for _ in x_rows
        ]
        # At the end of a group the weight that will be wanted next begins the following block.
        ahead = I64(_AHEAD_BYTES // (2 if product.is_bf16 else 4))
        following = builder.add(ahead, builder.mul(I64(groups - 1), w_step))
        last = builder.sub(w_step, ahead)

        def step(k: Any, is_single: bool) -> None:
            at = builder.mul(k, I64(GROUP))
            distance = builder.select(builder.icmp_signed("<", at, last), ahead, following)
            target = builder.add(at, distance)
            vectors = []
            for group in w_groups:
                vectors.append(product.weight(builder, offset(builder, group, at)))
                prefetch(builder, offset(builder, group, target))
            for x_row, row_slots in zip(x_rows, slots, strict=True):
                value = product.row(builder, offset(builder, x_row, k), is_single)
                for vector, slot in zip(vectors, row_slots, strict=True):
                    builder.store(product.add(builder, builder.load(slot), value, vector), slot)

        whole = builder.and_(length_value, I64(-product.values))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(product.values), inc=True) as (
            k,
            _,
        ):
            step(k, False)
        if product.is_bf16:
            with builder.if_then(builder.icmp_signed("<", whole, length_value), likely=False):
                step(whole, True)
        for r, row_slots in enumerate(slots):
            for g, slot in enumerate(row_slots):
                target = offset(builder, out_ptr, I64(r * BLOCK_COLUMNS + g * GROUP))
                builder.store(builder.load(slot), as_pointer(builder, target, product.sums), 4)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_groups, x, types.int64, w, types.int64, types.int64, F32_POINTER
    )
    return signature, codegen


@intrinsic
def block_of_sums(typingctx):
    """Return f32 memory for `[128, 64]` sums on the stack of the calling function."""

    def codegen(context, builder, signature, args):
        return cgutils.alloca_once(builder, F32, BLOCK_ROWS * BLOCK_COLUMNS)

    return F32_POINTER(), codegen


@njit
def _wide_rows(w, w_stride, x, x_stride, num_rows, length, sums):
    r = 0
    while r + 6 <= num_rows:
        row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
        _tile_block(6, 4, row, x_stride, w, w_stride, length, target)
        r += 6
    while r + 4 <= num_rows:
        row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
        _tile_block(4, 4, row, x_stride, w, w_stride, length, target)
        r += 4
    while r + 2 <= num_rows:
        row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
        _tile_block(2, 4, row, x_stride, w, w_stride, length, target)
        r += 2
    if r < num_rows:
        row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
        _tile_block(1, 4, row, x_stride, w, w_stride, length, target)


@njit
def _narrow_rows(w, w_stride, num_groups, x, x_stride, num_rows, length, sums):
    for g in range(num_groups):
        group, column = advance(w, g * w_stride), advance(sums, g * GROUP)
        r = 0
        while r + 4 <= num_rows:
            row, target = advance(x, r * x_stride), advance(column, r * BLOCK_COLUMNS)
            _tile_block(4, 1, row, x_stride, group, w_stride, length, target)
            r += 4
        while r < num_rows:
            row, target = advance(x, r * x_stride), advance(column, r * BLOCK_COLUMNS)
            _tile_block(1, 1, row, x_stride, group, w_stride, length, target)
            r += 1


@by_operands
def multiply(w, w_stride, num_groups, x, x_stride, num_rows, length, tile_rows, sums):
    """Set sums[r, c] = sum_k x[r, k] w[c, k], groups up to 4 (c = 16 g + lane).

    tile_rows  matrix tiles multiply from this many rows on, where the operands are theirs
    """
    raise NotImplementedError


@multiply.written_for(F32_POINTER, BF16_POINTER)
def multiply_by_vectors(
    w, w_stride, num_groups, x, x_stride, num_rows, length, tile_rows, sums
):  # fmt: skip
    keep_apart()
    if _WIDE and num_groups == BLOCK_GROUPS:
        _wide_rows(w, w_stride, x, x_stride, num_rows, length, sums)
    elif not _WIDE and num_rows == 1 and num_groups == BLOCK_GROUPS:
        _tile_block(1, 4, x, x_stride, w, w_stride, length, sums)
    else:
        _narrow_rows(w, w_stride, num_groups, x, x_stride, num_rows, length, sums)
