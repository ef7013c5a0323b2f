"""AMX: products of quantised rows with a weight of int8, bit for bit those of the vectors.

A tile multiplies 16 rows by 16 columns and 32 values, one scale's worth, in 16 cycles. Its sums are
exact integers; they go through memory to the vectors, which scale them and add them up in f32 as
they do without tiles. The tiles of a step work while the sums of the step before are scaled.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.amx.tiles import TileShape, assemble, configure, end_tiles
from whalepod.kernels.cpu.int8 import (
    BLOCK,
    BLOCK_ROWS,
    STEP_BYTES,
    add_scaled,
    at,
    multiply_by_vectors,
    scales_of_columns,
)
from whalepod.kernels.cpu.int8_packing import Int8Weights
from whalepod.kernels.cpu.packed_tiles import BLOCK_COLUMNS, GROUP, multiply
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I8,
    I32,
    I64,
    TILE_U8_POINTER,
    U8_POINTER,
    address_of,
    advance,
    as_pointer,
    i64_pointer,
    intrinsic,
    keep_apart,
    load,
    offset,
    store,
)
from whalepod.kernels.cpu.vectors import splat

MIN_ROWS = 6
"""Tiles are faster than AVX512-VNNI from this many rows."""

MAX_LENGTH = 32768
"""Values of a row for which there is room on the stack."""

_AHEAD_STEPS = 4
"""How far ahead of its use a weight is asked for, line by line between the sums: many requests at
once would stop the core until memory has answered."""

_TILE_BYTES = 1024
_RING = 4
"""Steps whose sums are in memory at once; a power of two."""


def _store_code(odd: int) -> str:
    """Return code that stores the sums of a step."""
    return "\n".join(f"tilestored %tmm{2 * odd + i}, (${i},$2,1)" for i in range(2))


def _step_code(odd: int) -> str:
    """Return code that stores the sums of the step before and makes new ones.

    Tiles are not renamed: two steps have sums of their own, so that one need not wait for the
    other.
    """
    first, second = 2 * odd, 2 * odd + 1
    return f"""tileloadd ($3,$5,1), %tmm4
tileloadd ($6,$2,1), %tmm6
tilezero %tmm{first}
tdpbsud %tmm6, %tmm4, %tmm{first}
tileloadd ($4,$5,1), %tmm5
tileloadd ($7,$2,1), %tmm7
tilezero %tmm{second}
tdpbsud %tmm7, %tmm5, %tmm{second}
{_store_code(1 - odd)}"""


class _Group:
    """Emits the product of up to `num_rows` records with 16 columns.

    scales   of the rows, `[blocks, 16 rows]`: f32, and the int32 correction
    """

    def __init__(self, builder: Any, num_rows: int, x: Any, x_stride: Any, scales: Any,
                 w: Any) -> None:  # fmt: skip
        self.builder, self.num_rows = builder, num_rows
        self.x, self.x_stride, self.scales, self.w = x, x_stride, scales, w
        self.singles, self.integers = ir.VectorType(F32, GROUP), ir.VectorType(I32, GROUP)
        self.slots = [cgutils.alloca_once(builder, self.singles) for _ in range(num_rows)]
        for slot in self.slots:
            builder.store(ir.Constant(self.singles, None), slot)
        # vectors, because rows of tiles must not straddle lines
        lines = cgutils.alloca_once(builder, self.integers, 32 * _RING)
        self.sums = as_pointer(builder, lines, I8)

    def sums_of(self, step: Any, half: int) -> Any:
        """Return where the sums of half a step lie."""
        which = self.builder.and_(step, I64(_RING - 1))
        place = self.builder.add(self.builder.shl(which, I64(11)), I64(_TILE_BYTES * half))
        return offset(self.builder, self.sums, place)

    def store_sums(self, step: Any, odd: int) -> None:
        """Bring the sums of a step from tiles to memory."""
        places = [self.sums_of(step, half) for half in range(2)]
        assemble(self.builder, _store_code(odd), *places, I64(64))

    def multiply(self, step: Any, odd: int) -> None:
        """Start the tiles of a step, store the sums of the one before, add those before that."""
        builder = self.builder
        before = builder.sub(step, I64(1))
        row = offset(builder, self.x, builder.shl(step, I64(6)))
        weight = offset(builder, self.w, builder.mul(step, I64(STEP_BYTES)))
        assemble(
            builder, _step_code(odd), self.sums_of(before, 0), self.sums_of(before, 1), I64(64),
            row, offset(builder, row, I64(BLOCK)), self.x_stride, weight,
            offset(builder, weight, I64(BLOCK * GROUP)),
        )  # fmt: skip
        self.add(builder.sub(step, I64(2)))

    def add(self, step: Any) -> None:
        """Scale the sums of a step, if there is one, and add them up."""
        with self.builder.if_then(self.builder.icmp_signed(">=", step, I64(0)), likely=True):
            self._add(step)

    def _add(self, step: Any) -> None:
        builder = self.builder
        ahead = offset(
            builder, self.w, builder.mul(builder.add(step, I64(2 + _AHEAD_STEPS)), I64(STEP_BYTES))
        )
        lines = iter(range(0, STEP_BYTES, 64))
        for half in range(2):
            block = builder.add(builder.shl(step, I64(1)), I64(half))
            scales = offset(builder, self.scales, builder.mul(block, I64(8 * BLOCK_ROWS)))
            weight_scale = scales_of_columns(builder, self.w, step, half)
            totals = self.sums_of(step, half)
            for r, slot in enumerate(self.slots):
                correction = at(builder, scales, I64(8 * r + 4), I32)
                total = at(builder, totals, I64(64 * r), self.integers)
                total = builder.add(total, splat(builder, correction, GROUP))
                row_scale = at(builder, scales, I64(8 * r), F32)
                add_scaled(builder, slot, total, weight_scale, row_scale)
                for line in islice(lines, -(-17 // (2 * self.num_rows))):
                    assemble(builder, "prefetcht0 ($0)", offset(builder, ahead, I64(line)))

    def store(self, count: Any, out: Any) -> None:
        for r, slot in enumerate(self.slots):
            with self.builder.if_then(self.builder.icmp_signed("<", I64(r), count)):
                target = offset(self.builder, out, I64(r * BLOCK_COLUMNS))
                target = as_pointer(self.builder, target, self.singles)
                self.builder.store(self.builder.load(slot), target, 4)


@intrinsic(prefer_literal=True)
def _group_by_tiles(typingctx, num_rows, x, x_stride, count, scales, w, length, sums):
    """Set sums[r, c] for `count` <= `num_rows` (literal) records and 16 columns, `[16, 64]` f32.

    The caller configures and releases the tiles.
    """
    rows = num_rows.literal_value

    def codegen(context, builder, signature, args):
        _, x_ptr, x_step, count_value, scale_ptr, w_ptr, length_value, out = args
        group = _Group(builder, rows, x_ptr, x_step, scale_ptr, w_ptr)
        num_steps = builder.lshr(length_value, I64(6))
        last = builder.sub(num_steps, I64(1))
        whole = builder.and_(num_steps, I64(-2))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(2), inc=True) as (step, _):
            group.multiply(step, 0)
            group.multiply(builder.add(step, I64(1)), 1)
        with builder.if_else(builder.icmp_signed("<", whole, num_steps)) as (then, otherwise):
            with then:
                group.multiply(last, 0)
                group.store_sums(last, 0)
            with otherwise:
                group.store_sums(last, 1)
        group.add(builder.sub(last, I64(1)))
        group.add(last)
        group.store(count_value, out)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, x, types.int64, types.int64, U8_POINTER, w, types.int64, F32_POINTER
    )
    return signature, codegen


@intrinsic
def _start_tiles(typingctx, num_rows):
    """Shape the tiles: sums of `num_rows` rows, rows of 32 bytes, weights of 8 rows."""

    def codegen(context, builder, signature, args):
        sums, rows, weights = TileShape(args[0], 64), TileShape(args[0], 32), TileShape(I64(8), 64)
        configure(builder, [sums, sums, sums, sums, rows, rows, weights, weights])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _room_for_scales(typingctx):
    """Return memory on the stack of the calling function."""

    def codegen(context, builder, signature, args):
        room = cgutils.alloca_once(builder, I64, MAX_LENGTH // BLOCK * BLOCK_ROWS)
        return as_pointer(builder, room, I8)

    return U8_POINTER(), codegen


@njit
def _collect_scales(x, x_stride, num_rows, length, scales):
    """Bring the scales of rows together: a step then looks at few lines and needs one address."""
    target = i64_pointer(address_of(scales))
    for r in range(num_rows):
        source = i64_pointer(address_of(advance(x, r * x_stride + length)))
        for i in range(length // BLOCK):
            store(target, i * BLOCK_ROWS + r, load(source, i))


@njit
def _multiply_by_tiles(x, x_stride, num_rows, w, w_stride, num_groups, length, sums):
    keep_apart()
    scales = _room_for_scales()
    _collect_scales(x, x_stride, num_rows, length, scales)
    _start_tiles(num_rows)
    for g in range(num_groups):
        tile, target = advance(w, g * w_stride), advance(sums, g * GROUP)
        if num_rows > 12:
            _group_by_tiles(16, x, x_stride, num_rows, scales, tile, length, target)
        elif num_rows > 8:
            _group_by_tiles(12, x, x_stride, num_rows, scales, tile, length, target)
        elif num_rows > 4:
            _group_by_tiles(8, x, x_stride, num_rows, scales, tile, length, target)
        else:
            _group_by_tiles(4, x, x_stride, num_rows, scales, tile, length, target)
    end_tiles()


@multiply.written_for(TILE_U8_POINTER)
def _multiply(w, w_stride, num_groups, x, x_stride, num_rows, length, tile_rows, sums):
    if num_rows >= tile_rows and length <= MAX_LENGTH:
        _multiply_by_tiles(x, x_stride, num_rows, w, w_stride, num_groups, length, sums)
    else:
        multiply_by_vectors(w, w_stride, num_groups, x, x_stride, num_rows, length, 0, sums)


class TileInt8Weights(Int8Weights):
    """Weights of int8 that matrix tiles multiply, too."""

    tile_rows = MIN_ROWS

    def operands(self, dtype: torch.dtype) -> types.CPointer:
        return TILE_U8_POINTER
