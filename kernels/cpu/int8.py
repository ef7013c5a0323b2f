"""Products of int8: weights and rows with a scale per 32 values, as llama.cpp's q8_0.

A row is quantised by itself, so its result depends on no other row. A weight w is stored as w + 128
(unsigned), because AVX512-VNNI multiplies unsigned by signed bytes; sum (w + 128) x is put right by
-128 sum x, with which each sum begins. Sums of 32 products are exact integers, so every machine and
any number of rows give the same bits.

Weight, per 16 columns and 64 k, 1,088 bytes: [2, 8, 16, 4] uint8 (block of 32, k / 4, column,
k % 4) then [2, 16] f16 scales. Row, a record of 1.25 bytes per value: int8 values, f32 scales,
int32 -128 sums.

AMX tiles gain nothing here: with a scale per 32 values half of a tile is empty, and the sums of
each product must be scaled. 16 rows, 16 columns, 32 values: 33 ns either way (one core, 11/2026).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.panels import BLOCK_COLUMNS, BLOCK_GROUPS, GROUP
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I8,
    I16,
    I32,
    I64,
    U8_POINTER,
    advance,
    as_pointer,
    intrinsic,
    is_bf16,
    keep_apart,
    offset,
    target_has,
    widen,
)
from whalepod.kernels.cpu.vectors import (
    fma,
    lanes_below,
    load_vector,
    prefetch,
    shuffle,
    splat,
    unary,
)

BLOCK = 32
"""Values with one scale."""

STEP = 64
STEP_BYTES = GROUP * STEP + 2 * 2 * GROUP
"""Bytes of 16 columns and 64 k."""

_AHEAD_BYTES = 1024
_F16 = ir.HalfType()


def record_bytes(length: int) -> int:
    """Return the bytes of a quantised row of `length` values."""
    return -(-length // STEP) * (STEP + 2 * 8)


def _vector(kind: Any, count: int) -> Any:
    return ir.VectorType(kind, count)


def _fold(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine all lanes into one value."""
    count = vector.type.count
    while count > 1:
        count //= 2
        low = shuffle(builder, vector, vector, range(count))
        high = shuffle(builder, vector, vector, range(count, 2 * count))
        vector = combine(low, high)
    return builder.extract_element(vector, I32(0))


def _load_32(builder: Any, pointer: Any, is_short: bool, remaining: Any) -> list[Any]:
    """Load 32 values as two vectors of f32; those at or past `remaining` are 0."""
    halves = []
    for half in range(2):
        left = builder.sub(remaining, I64(16 * half))
        source = offset(builder, pointer, I64(16 * half))
        kind = _vector(I16 if is_short else F32, 16)
        values = load_vector(builder, source, kind, lanes_below(builder, left, 16))
        halves.append(widen(builder, values) if is_short else values)
    return halves


def _quantize_32(builder: Any, halves: list[Any]) -> tuple[list[Any], Any, Any]:
    """Return two vectors of int32 in -127..127, the scale, and the sum."""

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", a, b), b, a)

    amax = _fold(builder, larger(*[unary(builder, "fabs", h) for h in halves]), larger)
    scale = builder.fdiv(amax, F32(127.0))
    inverse = builder.fdiv(F32(1.0), scale)
    inverse = builder.select(builder.fcmp_ordered(">", scale, F32(0.0)), inverse, F32(0.0))
    factors = splat(builder, inverse, 16)
    values = [
        builder.fptosi(unary(builder, "rint", builder.fmul(h, factors)), _vector(I32, 16))
        for h in halves
    ]
    total = _fold(builder, builder.add(*values), builder.add)
    return values, scale, total


@intrinsic
def _quantize_block(typingctx, source, remaining, values, scale, correction):
    """Quantise 32 values of a row; those at or past `remaining` count as 0."""

    def codegen(context, builder, signature, args):
        halves = _load_32(builder, args[0], is_bf16(source), args[1])
        quantized, factor, total = _quantize_32(builder, halves)
        for half, vector in enumerate(quantized):
            target = offset(builder, args[2], I64(16 * half))
            short = builder.trunc(vector, _vector(I8, 16))
            builder.store(short, as_pointer(builder, target, short.type), 1)
        builder.store(factor, as_pointer(builder, args[3], F32), 4)
        builder.store(builder.mul(total, I32(-128)), as_pointer(builder, args[4], I32), 4)
        return context.get_dummy_value()

    signature = types.void(source, types.int64, U8_POINTER, U8_POINTER, U8_POINTER)
    return signature, codegen


@njit
def quantize_blocks(source, length, first, num_blocks, padded, record):
    """Quantise blocks of 32 from block `first` on; `source` begins with them.

    `length`: values that `source` has; `padded`: the row's length, a multiple of 64.
    """
    scales = advance(record, padded)
    corrections = advance(scales, padded // BLOCK * 4)
    for i in range(num_blocks):
        block = first + i
        _quantize_block(
            advance(source, i * BLOCK), length - i * BLOCK, advance(record, block * BLOCK),
            advance(scales, 4 * block), advance(corrections, 4 * block),
        )  # fmt: skip


def _dot_bytes(builder: Any, acc: Any, weights: Any, values: Any) -> Any:
    """Add to 16 int32 the products of four unsigned with four signed bytes each."""
    if target_has("avx512vnni"):
        bytes_ = _vector(I8, 64)
        kind = ir.FunctionType(acc.type, [acc.type, bytes_, bytes_])
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        operands = [builder.bitcast(operand, bytes_) for operand in (weights, values)]
        return builder.call(function, [acc, *operands])
    bytes_, words = _vector(I8, 64), _vector(I16, 64)
    unsigned = builder.zext(builder.bitcast(weights, bytes_), words)
    signed = builder.sext(builder.bitcast(values, bytes_), words)
    # 255 * -128 fits 16 bits, the sum of two does not
    pairs = builder.bitcast(builder.mul(unsigned, signed), _vector(I32, 32))
    sixteen = ir.Constant(pairs.type, [16] * 32)
    low = builder.ashr(builder.shl(pairs, sixteen), sixteen)
    pairs = builder.add(low, builder.ashr(pairs, sixteen))
    even = shuffle(builder, pairs, pairs, range(0, 32, 2))
    odd = shuffle(builder, pairs, pairs, range(1, 32, 2))
    return builder.add(acc, builder.add(even, odd))


@intrinsic(prefer_literal=True)
def _int8_block(
    typingctx, num_rows, num_groups, x, x_stride, ids, first, w, w_stride, length, sums
):
    """Set sums[r, c] for a few rows and groups, `[rows, 64]` f32.

    num_rows, num_groups  literal ints
    x, x_stride           records and the bytes between them
    ids                   pointer to int64: row r is record ids[first + r]; or None: first + r
    length                the rows' length, a multiple of 64
    """
    rows, groups = num_rows.literal_value, num_groups.literal_value
    singles, integers = _vector(F32, GROUP), _vector(I32, GROUP)
    has_ids = not isinstance(ids, types.NoneType)

    def codegen(context, builder, signature, args):
        _, _, x_ptr, x_step, ids_ptr, first_row, w_ptr, w_step, length_value, out_ptr = args
        places = [builder.add(first_row, I64(r)) for r in range(rows)]
        if has_ids:
            places = [builder.load(offset(builder, ids_ptr, place)) for place in places]
        records = [offset(builder, x_ptr, builder.mul(place, x_step)) for place in places]
        scales = [offset(builder, record, length_value) for record in records]
        blocks = builder.lshr(length_value, I64(5))
        corrections = [offset(builder, s, builder.shl(blocks, I64(2))) for s in scales]
        panels = [offset(builder, w_ptr, builder.mul(I64(g), w_step)) for g in range(groups)]
        slots = [
            [cgutils.alloca_once_value(builder, ir.Constant(singles, None)) for _ in panels]
            for _ in records
        ]
        num_steps = builder.lshr(length_value, I64(6))

        def at(pointer: Any, index: Any, kind: Any) -> Any:
            return builder.load(as_pointer(builder, offset(builder, pointer, index), kind), "", 1)

        def block(step: Any, half: int) -> None:
            start = builder.add(builder.mul(step, I64(STEP_BYTES)), I64(half * 512))
            number = builder.add(builder.shl(step, I64(1)), I64(half))
            wide = builder.shl(number, I64(2))
            totals = []
            for correction in corrections:
                value = splat(builder, at(correction, wide, I32), GROUP)
                totals.append([value] * groups)
            for j in range(8):
                place = builder.add(start, I64(64 * j))
                weights = []
                for panel in panels:
                    weights.append(at(panel, place, integers))
                    ahead = builder.add(place, I64(_AHEAD_BYTES))
                    prefetch(builder, offset(builder, panel, ahead))
                for r, record in enumerate(records):
                    index = builder.add(builder.shl(number, I64(5)), I64(4 * j))
                    values = splat(builder, at(record, index, I32), GROUP)
                    totals[r] = [
                        _dot_bytes(builder, total, weight, values)
                        for total, weight in zip(totals[r], weights, strict=True)
                    ]
            scale_at = builder.add(builder.mul(step, I64(STEP_BYTES)), I64(1024 + half * 2 * GROUP))
            for g, panel in enumerate(panels):
                weight_scale = builder.fpext(at(panel, scale_at, _vector(_F16, GROUP)), singles)
                for r, scale in enumerate(scales):
                    factor = splat(builder, at(scale, wide, F32), GROUP)
                    product = builder.sitofp(totals[r][g], singles)
                    slot = slots[r][g]
                    scaled = builder.fmul(weight_scale, factor)
                    builder.store(fma(builder, product, scaled, builder.load(slot)), slot)

        with cgutils.for_range(builder, num_steps) as loop:
            for half in range(2):
                block(loop.index, half)
        for r, row_slots in enumerate(slots):
            for g, slot in enumerate(row_slots):
                target = offset(builder, out_ptr, I64(r * BLOCK_COLUMNS + g * GROUP))
                builder.store(builder.load(slot), as_pointer(builder, target, singles), 4)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_groups, x, types.int64, ids, types.int64, w, types.int64, types.int64,
        F32_POINTER,
    )  # fmt: skip
    return signature, codegen


@njit
def multiply_bytes(x, x_stride, ids, first, num_rows, w, w_stride, num_groups, length, sums):
    """Set sums[r, c] for up to 16 quantised rows and 4 groups of columns."""
    keep_apart()
    r = 0
    if num_groups == BLOCK_GROUPS:
        while r + 3 <= num_rows:
            target = advance(sums, r * BLOCK_COLUMNS)
            _int8_block(3, 4, x, x_stride, ids, first + r, w, w_stride, length, target)
            r += 3
        while r < num_rows:
            target = advance(sums, r * BLOCK_COLUMNS)
            _int8_block(1, 4, x, x_stride, ids, first + r, w, w_stride, length, target)
            r += 1
        return
    for g in range(num_groups):
        panel = advance(w, g * w_stride)
        for row in range(num_rows):
            target = advance(sums, row * BLOCK_COLUMNS + g * GROUP)
            _int8_block(1, 1, x, x_stride, ids, first + row, panel, w_stride, length, target)
