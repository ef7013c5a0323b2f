"""Products of int8 in AMX tiles: the bits of `int8.py`, for many rows.

A scale belongs to 32 values and a tile holds 64 bytes a row, so half of each tile along k is used.
Each product of 16 rows with 16 columns and 32 values is an exact integer; it is scaled and added to
f32 sums as the vector code does it, in the same order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from whalepod.kernels.cpu.panels import BLOCK_COLUMNS, BLOCK_GROUPS, GROUP
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I8,
    I16,
    I32,
    I64,
    as_pointer,
    intrinsic,
    offset,
    target_has,
)
from whalepod.kernels.cpu.tiles import HAS_TILES, assemble
from whalepod.kernels.cpu.vectors import fma, lanes_below, load_vector, splat, transpose

BLOCK = 32
"""Values with one scale."""

STEP = 64
STEP_BYTES = GROUP * STEP + 2 * 2 * GROUP
"""Bytes of 16 columns and 64 k."""

HAS_BYTE_TILES = HAS_TILES and target_has("amx-int8")
"""Whether code for tiles of bytes is compiled."""

_ROWS = 16
_CHUNK_STEPS = 8
"""Steps of the rows that are copied side by side at once: 8 KiB, and 16 scales of each row."""

_CHUNK_BYTES = _CHUNK_STEPS * STEP
_F16 = ir.HalfType()
_WORDS, _SINGLES = ir.VectorType(I32, GROUP), ir.VectorType(F32, GROUP)

_SHAPES = {0: (16, 64), 1: (16, 64), 2: (16, BLOCK), 3: (16, BLOCK), 4: (8, 64), 5: (8, 64)}
"""Rows and bytes of the tiles: sums, rows, weights, for two blocks in turn."""


@intrinsic
def has_byte_tiles(typingctx):
    """Return whether tiles can multiply bytes; a constant."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(1), int(HAS_BYTE_TILES))

    return types.boolean(), codegen


def _memory(builder: Any, kind: Any, count: int) -> Any:
    slot = cgutils.alloca_once(builder, kind, count)
    slot.align = 64
    return slot


def _configure(builder: Any) -> None:
    shape = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I8, 64), None))
    start = as_pointer(builder, shape, I8)
    builder.store(I8(1), start)  # palette
    for tile, (rows, row_bytes) in _SHAPES.items():
        place = offset(builder, start, I64(16 + 2 * tile))
        builder.store(I16(row_bytes), as_pointer(builder, place, I16), 2)
        builder.store(I8(rows), offset(builder, start, I64(48 + tile)))
    assemble(builder, "ldtilecfg ($0)", start)


class _Chunk:
    """The rows of up to 8 steps side by side, their scales and corrections by block."""

    def __init__(self, builder: Any) -> None:
        self.values = _memory(builder, I8, _ROWS * _CHUNK_BYTES)
        self.scales = _memory(builder, I32, 2 * _CHUNK_STEPS * _ROWS)
        self.corrections = _memory(builder, I32, 2 * _CHUNK_STEPS * _ROWS)

    def fill(self, builder: Any, records: list[Any], length: Any, first: Any, steps: Any) -> None:
        """Copy from step `first` on; `length` values of a record come before its scales."""
        line = ir.VectorType(I8, STEP)
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(builder.add(first, loop.index), I64(STEP))
            for row, record in enumerate(records):
                value = builder.load(as_pointer(builder, offset(builder, record, at), line), "", 1)
                place = builder.add(builder.mul(loop.index, I64(STEP)), I64(row * _CHUNK_BYTES))
                target = as_pointer(builder, offset(builder, self.values, place), line)
                builder.store(value, target, 1)
        mask = lanes_below(builder, builder.shl(steps, I64(1)), GROUP)
        at = builder.add(length, builder.shl(first, I64(3)))
        after_scales = builder.lshr(length, I64(3))
        for target in (self.scales, self.corrections):
            rows = [
                load_vector(
                    builder, as_pointer(builder, offset(builder, r, at), I32), _WORDS, mask
                )
                for r in records
            ]
            for block, vector in enumerate(transpose(builder, rows)):
                place = offset(builder, target, I64(block * _ROWS))
                builder.store(vector, as_pointer(builder, place, _WORDS), 4)
            at = builder.add(at, after_scales)


@intrinsic
def multiply_byte_tiles(typingctx, x, x_stride, ids, first, num_rows, w, w_stride, length, sums):
    """Set sums[r, c] for up to 16 quantised rows and 64 columns, see `int8.multiply_bytes`."""
    has_ids = not isinstance(ids, types.NoneType)

    def codegen(context, builder, signature, args):
        x_ptr, x_step, ids_ptr, first_row, count, w_ptr, w_step, length_value, out_ptr = args
        last = builder.sub(count, I64(1))
        records = []
        for row in range(_ROWS):
            index = builder.select(builder.icmp_signed("<", I64(row), count), I64(row), last)
            place = builder.add(first_row, index)
            if has_ids:
                place = builder.load(offset(builder, ids_ptr, place))
            records.append(offset(builder, x_ptr, builder.mul(place, x_step)))
        num_steps = builder.lshr(length_value, I64(6))
        chunk, exact = _Chunk(builder), _memory(builder, I32, 2 * _ROWS * GROUP)
        slots = [cgutils.alloca_once(builder, _SINGLES) for _ in range(_ROWS)]
        _configure(builder)

        def sums_at(row: int, group: Any) -> Any:
            place = builder.add(builder.shl(group, I64(4)), I64(row * BLOCK_COLUMNS))
            return as_pointer(builder, offset(builder, out_ptr, place), _SINGLES)

        def block(panel: Any, index: Any, half: int) -> None:
            number = builder.add(builder.shl(index, I64(1)), I64(half))
            product = offset(builder, exact, I64(half * _ROWS * GROUP))
            rows = offset(builder, chunk.values, builder.mul(number, I64(BLOCK)))
            weights = offset(builder, panel, I64(half * 512))
            assemble(
                builder,
                f"tilezero %tmm{half}\ntileloadd ($0,$1,1), %tmm{2 + half}\n"
                f"tileloadd ($2,$3,1), %tmm{4 + half}\n"
                f"tdpbsud %tmm{4 + half}, %tmm{2 + half}, %tmm{half}\n"
                f"tilestored %tmm{half}, ($4,$3,1)",
                rows, I64(_CHUNK_BYTES), weights, I64(64), product,
            )  # fmt: skip
            scale_at = offset(builder, panel, I64(GROUP * STEP + half * 2 * GROUP))
            kind = ir.VectorType(_F16, GROUP)
            halves = builder.load(as_pointer(builder, scale_at, kind), "", 1)
            weight_scale = builder.fpext(halves, _SINGLES)
            scales, corrections = (
                offset(builder, part, builder.mul(number, I64(_ROWS)))
                for part in (chunk.scales, chunk.corrections)
            )
            for row, slot in enumerate(slots):
                sum_at = as_pointer(builder, offset(builder, product, I64(row * GROUP)), _WORDS)
                total = builder.load(sum_at, align=4)
                correction = builder.load(offset(builder, corrections, I64(row)))
                total = builder.add(total, splat(builder, correction, GROUP))
                factor = builder.bitcast(builder.load(offset(builder, scales, I64(row))), F32)
                scaled = builder.fmul(weight_scale, splat(builder, factor, GROUP))
                value = builder.sitofp(total, _SINGLES)
                builder.store(fma(builder, value, scaled, builder.load(slot)), slot)

        with cgutils.for_range_slice(
            builder, I64(0), num_steps, I64(_CHUNK_STEPS), inc=True
        ) as (start, _):
            left = builder.sub(num_steps, start)
            is_whole = builder.icmp_signed("<", I64(_CHUNK_STEPS), left)
            steps = builder.select(is_whole, I64(_CHUNK_STEPS), left)
            chunk.fill(builder, records, length_value, start, steps)
            is_first = builder.icmp_signed("==", start, I64(0))
            with cgutils.for_range(builder, I64(BLOCK_GROUPS)) as group:
                for row, slot in enumerate(slots):
                    old = builder.load(sums_at(row, group.index), align=4)
                    begin = builder.select(is_first, ir.Constant(_SINGLES, None), old)
                    builder.store(begin, slot)
                panels = offset(builder, w_ptr, builder.mul(group.index, w_step))
                with cgutils.for_range(builder, steps) as loop:
                    at = builder.mul(builder.add(start, loop.index), I64(STEP_BYTES))
                    for half in range(2):
                        block(offset(builder, panels, at), loop.index, half)
                for row, slot in enumerate(slots):
                    builder.store(builder.load(slot), sums_at(row, group.index), 4)
        assemble(builder, "tilerelease")
        return context.get_dummy_value()

    signature = types.void(
        x, types.int64, ids, types.int64, types.int64, w, types.int64, types.int64, F32_POINTER
    )
    return signature, codegen
