"""Products of int8: weights and rows with a scale per 32 values, as llama.cpp's q8_0.

A row is quantised by itself, so its result depends on no other row. A weight w is stored as w + 128
(unsigned), because AVX512-VNNI multiplies unsigned by signed bytes; sum (w + 128) x is put right by
-128 sum x, with which each sum begins. Sums of 32 products are exact integers, so every machine and
any number of rows give the same bits.

Weight, per 16 columns and 64 k, 1,088 bytes: [2, 8, 16, 4] uint8 (block of 32, k / 4, column,
k % 4) then [2, 16] f16 scales. Row, a record of 1.25 bytes per value: int8 values, then for each
32 of them an f32 scale and the int32 -128 sum.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.abi import items
from whalepod.kernels.cpu.experts import keep_gated, prepare_row
from whalepod.kernels.cpu.exponentials import gate_group
from whalepod.kernels.cpu.linear import QUANTIZED_PER_ITEM, prepare_rows
from whalepod.kernels.cpu.packed_tiles import BLOCK_COLUMNS, BLOCK_GROUPS, GROUP, multiply
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I8,
    I16,
    I32,
    I64,
    TILE_U8_POINTER,
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
    call_llvm,
    fma,
    lanes_below,
    load_vector,
    prefetch,
    shuffle,
    splat,
)

BLOCK = 32
"""Values with one scale."""

BLOCK_ROWS = 16
"""Rows of a product."""

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

    amax = _fold(builder, larger(*[call_llvm(builder, "fabs", h) for h in halves]), larger)
    scale = builder.fdiv(amax, F32(127.0))
    inverse = builder.fdiv(F32(1.0), scale)
    inverse = builder.select(builder.fcmp_ordered(">", scale, F32(0.0)), inverse, F32(0.0))
    factors = splat(builder, inverse, 16)
    values = [
        builder.fptosi(call_llvm(builder, "rint", builder.fmul(h, factors)), _vector(I32, 16))
        for h in halves
    ]
    total = _fold(builder, builder.add(*values), builder.add)
    return values, scale, total


@intrinsic
def _quantize_block(typingctx, source, remaining, values, scale):
    """Quantise 32 values of a row; those at or past `remaining` count as 0."""

    def codegen(context, builder, signature, args):
        halves = _load_32(builder, args[0], is_bf16(source), args[1])
        quantized, factor, total = _quantize_32(builder, halves)
        for half, vector in enumerate(quantized):
            target = offset(builder, args[2], I64(16 * half))
            short = builder.trunc(vector, _vector(I8, 16))
            builder.store(short, as_pointer(builder, target, short.type), 1)
        builder.store(factor, as_pointer(builder, args[3], F32), 4)
        correction = as_pointer(builder, offset(builder, args[3], I64(4)), I32)
        builder.store(builder.mul(total, I32(-128)), correction, 4)
        return context.get_dummy_value()

    return types.void(source, types.int64, values, scale), codegen


@njit
def quantize_blocks(source, length, first, num_blocks, padded, record):
    """Quantise blocks of 32 from block `first` on; `source` begins with them.

    `length`: values that `source` has; `padded`: the row's length, a multiple of 64.
    """
    scales = advance(record, padded)
    for i in range(num_blocks):
        block = first + i
        _quantize_block(
            advance(source, i * BLOCK), length - i * BLOCK, advance(record, block * BLOCK),
            advance(scales, 8 * block),
        )  # fmt: skip


@njit
def quantize_row(source, length, record):
    """Quantise a whole row."""
    padded = -(-length // STEP) * STEP
    quantize_blocks(source, length, 0, padded // BLOCK, padded, record)


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


def at(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    """Load a value of some type from `index` bytes after a pointer."""
    return builder.load(as_pointer(builder, offset(builder, pointer, index), kind), "", 1)


def scales_of_columns(builder: Any, tile: Any, step: Any, half: int) -> Any:
    """Return the scales of 16 columns for 32 of the 64 values of a step, as f32."""
    place = builder.add(builder.mul(step, I64(STEP_BYTES)), I64(GROUP * (STEP + 2 * half)))
    return builder.fpext(at(builder, tile, place, _vector(_F16, GROUP)), _vector(F32, GROUP))


def add_scaled(builder: Any, slot: Any, total: Any, weight_scale: Any, row_scale: Any) -> None:
    """Add 16 exact sums, scaled, to those in a slot; the one order of rounding there is."""
    factor = builder.fmul(weight_scale, splat(builder, row_scale, GROUP))
    product = builder.sitofp(total, _vector(F32, GROUP))
    builder.store(fma(builder, product, factor, builder.load(slot)), slot)


def prefetch_ahead(builder: Any, tile: Any, place: Any, ahead_bytes: int) -> None:
    """Ask for a line of a weight that will be wanted soon."""
    prefetch(builder, offset(builder, tile, builder.add(place, I64(ahead_bytes))))


@intrinsic(prefer_literal=True)
def _int8_block(typingctx, num_rows, num_groups, x, x_stride, w, w_stride, length, sums):
    """Set sums[r, c] for a few rows and groups, `[rows, 64]` f32.

    num_rows, num_groups  literal ints
    x, x_stride           records and the bytes between them
    length                the rows' length, a multiple of 64
    """
    rows, groups = num_rows.literal_value, num_groups.literal_value
    singles, integers = _vector(F32, GROUP), _vector(I32, GROUP)

    def codegen(context, builder, signature, args):
        _, _, x_ptr, x_step, w_ptr, w_step, length_value, out_ptr = args
        records = [offset(builder, x_ptr, builder.mul(I64(r), x_step)) for r in range(rows)]
        scales = [offset(builder, record, length_value) for record in records]
        tiles = [offset(builder, w_ptr, builder.mul(I64(g), w_step)) for g in range(groups)]
        slots = [
            [cgutils.alloca_once_value(builder, ir.Constant(singles, None)) for _ in tiles]
            for _ in records
        ]
        num_steps = builder.lshr(length_value, I64(6))

        def block(step: Any, half: int) -> None:
            start = builder.add(builder.mul(step, I64(STEP_BYTES)), I64(half * 512))
            number = builder.add(builder.shl(step, I64(1)), I64(half))
            pair = builder.shl(number, I64(3))
            totals = []
            for scale in scales:
                correction = at(builder, scale, builder.add(pair, I64(4)), I32)
                totals.append([splat(builder, correction, GROUP)] * groups)
            for j in range(8):
                place = builder.add(start, I64(64 * j))
                weights = []
                for tile in tiles:
                    weights.append(at(builder, tile, place, integers))
                    prefetch_ahead(builder, tile, place, _AHEAD_BYTES)
                for r, record in enumerate(records):
                    index = builder.add(builder.shl(number, I64(5)), I64(4 * j))
                    values = splat(builder, at(builder, record, index, I32), GROUP)
                    totals[r] = [
                        _dot_bytes(builder, total, weight, values)
                        for total, weight in zip(totals[r], weights, strict=True)
                    ]
            for g, tile in enumerate(tiles):
                weight_scale = scales_of_columns(builder, tile, step, half)
                for r, scale in enumerate(scales):
                    row_scale = at(builder, scale, pair, F32)
                    add_scaled(builder, slots[r][g], totals[r][g], weight_scale, row_scale)

        with cgutils.for_range(builder, num_steps) as loop:
            for half in range(2):
                block(loop.index, half)
        for r, row_slots in enumerate(slots):
            for g, slot in enumerate(row_slots):
                target = offset(builder, out_ptr, I64(r * BLOCK_COLUMNS + g * GROUP))
                builder.store(builder.load(slot), as_pointer(builder, target, singles), 4)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_groups, x, types.int64, w, types.int64, types.int64, F32_POINTER
    )
    return signature, codegen


@multiply.written_for(U8_POINTER)
def multiply_by_vectors(
    w, w_stride, num_groups, x, x_stride, num_rows, length, tile_rows, sums
):  # fmt: skip
    """Of up to 16 quantised rows."""
    keep_apart()
    r = 0
    if num_groups == BLOCK_GROUPS:
        while r + 3 <= num_rows:
            row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
            _int8_block(3, 4, row, x_stride, w, w_stride, length, target)
            r += 3
        row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS)
        if r + 2 == num_rows:
            _int8_block(2, 4, row, x_stride, w, w_stride, length, target)
        elif r < num_rows:
            _int8_block(1, 4, row, x_stride, w, w_stride, length, target)
        return
    for g in range(num_groups):
        tile = advance(w, g * w_stride)
        for r in range(num_rows):
            row, target = advance(x, r * x_stride), advance(sums, r * BLOCK_COLUMNS + g * GROUP)
            _int8_block(1, 1, row, x_stride, tile, w_stride, length, target)


@prepare_rows.written_for(U8_POINTER, TILE_U8_POINTER)
def _quantize_rows(weight, block, a):
    num_records = a.num_weights * a.num_rows
    for item in items(block, 0, -(-num_records // QUANTIZED_PER_ITEM)):
        first = item * QUANTIZED_PER_ITEM
        for place in range(first, min(first + QUANTIZED_PER_ITEM, num_records)):
            row, head = place % a.num_rows, place // a.num_rows
            x = advance(a.x, row * a.row_stride + head * a.head_stride)
            quantize_row(x, a.x_length, advance(a.records, place * a.record_stride))
    return a.records, a.record_stride, a.num_rows * a.record_stride


@prepare_row.written_for(U8_POINTER, TILE_U8_POINTER)
def _quantize_row(weight, x, length, record):
    quantize_row(x, length, record)


@keep_gated.written_for(U8_POINTER, TILE_U8_POINTER)
def _quantize_gated(weight, sums, num_rows, num_pairs, block, length, out, stride):
    for r in range(num_rows):
        row = advance(sums, r * BLOCK_COLUMNS)
        for pair in range(num_pairs):  # never past what is still to be read
            gate_group(advance(row, 2 * pair * GROUP), advance(row, pair * GROUP))
        quantize_blocks(row, num_pairs * GROUP, block, 1, length, advance(out, r * stride))
