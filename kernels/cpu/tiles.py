"""AMX: products of bfloat16 in matrix tiles, for machines that have them.

16 rows by 64 columns are four tiles of sums; one tile of the rows is multiplied with four of the
weight, which lies in memory as the instruction wants it. Tiles are configured and released within
a call, so nothing is left behind for other code (oneDNN does the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from llvmlite.binding import initialize_native_asmparser
from numba import types
from numba.core import cgutils

from whalepod.kernels.cpu.simd import (
    F32_POINTER,
    I8,
    I16,
    I64,
    as_pointer,
    intrinsic,
    is_bf16,
    offset,
    target_has,
)

HAS_TILES = target_has("amx-bf16") and target_has("amx-tile")
"""Whether code for tiles is compiled."""

if HAS_TILES:
    initialize_native_asmparser()  # without it LLVM aborts at inline assembly

_NUM_GROUPS = 4
_STEP = 32
"""Values along k of one tile."""

_SUMS = range(4)
_ROWS = 4
_WEIGHTS = (5, 6, 7)

_STEP_CODE = "\n".join(
    ["tileloadd ($0,$1,1), %tmm4"]
    + [
        f"tileloadd (${2 + g},$6,1), %tmm{_WEIGHTS[g % 3]}\n"
        f"tdpbf16ps %tmm{_WEIGHTS[g % 3]}, %tmm4, %tmm{g}"
        for g in range(_NUM_GROUPS)
    ]
)


def can_use_tiles() -> bool:
    """Ask the system for the tiles of this process; say whether they may be used."""
    return HAS_TILES and bool(torch.cpu._init_amx())


def assemble(builder: Any, code: str, *operands: Any) -> None:
    """Emit instructions that take integers and addresses as $0, $1, ...; none without tiles."""
    if not HAS_TILES:
        return
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    builder.asm(kind, code, constraints, list(operands), side_effect=True)


class TileShape(NamedTuple):
    """What a tile holds: a number of rows (an i64 value), and the bytes of one."""

    num_rows: Any
    row_bytes: int


def configure(builder: Any, shapes: Sequence[TileShape]) -> None:
    """Shape the eight tiles."""
    memory = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I8, 64), None))
    start = as_pointer(builder, memory, I8)
    builder.store(I8(1), start)  # palette
    for tile, shape in enumerate(shapes):
        columns = as_pointer(builder, offset(builder, start, I64(16 + 2 * tile)), I16)
        builder.store(I16(shape.row_bytes), columns, 2)
        num_rows = builder.trunc(shape.num_rows, I8)
        builder.store(num_rows, offset(builder, start, I64(48 + tile)))
    assemble(builder, "ldtilecfg ($0)", start)


def _configure(builder: Any, num_rows: Any) -> None:
    """Give the tiles of sums and rows `num_rows` rows, those of the weight 16."""
    rows = [I64(16) if tile in _WEIGHTS else num_rows for tile in range(8)]
    configure(builder, [TileShape(count, 64) for count in rows])


@intrinsic
def has_tiles(typingctx, w):
    """Return whether tiles can multiply what `w` points to; a constant."""
    is_fit = HAS_TILES and is_bf16(w)

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(1), int(is_fit))

    return types.boolean(w), codegen


@intrinsic
def start_tiles(typingctx):
    """Give all tiles 16 rows of 64 bytes, until `end_tiles` in the same function."""

    def codegen(context, builder, signature, args):
        _configure(builder, I64(16))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def end_tiles(typingctx):
    """Release the tiles."""

    def codegen(context, builder, signature, args):
        assemble(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tile_product(typingctx, x, x_stride, num_rows, w, w_stride, length, sums):
    """Set sums[r, c] = sum_k x[r, k] w[c, k], `[rows, 64]` f32, of up to 16 rows and four groups.

    `length` is a multiple of 32; strides in elements, w's of groups.
    """

    def codegen(context, builder, signature, args):
        x_ptr, x_step, rows, w_ptr, w_step, length_value, out_ptr = args
        _configure(builder, rows)
        for tile in _SUMS:
            assemble(builder, f"tilezero %tmm{tile}")
        row_bytes = builder.shl(x_step, I64(1))
        groups = [offset(builder, w_ptr, builder.mul(I64(g), w_step)) for g in range(_NUM_GROUPS)]
        with cgutils.for_range_slice(builder, I64(0), length_value, I64(_STEP), inc=True) as (k, _):
            at = builder.mul(k, I64(16))
            assemble(
                builder, _STEP_CODE, offset(builder, x_ptr, k), row_bytes,
                *(offset(builder, group, at) for group in groups), I64(64),
            )  # fmt: skip
        for tile in _SUMS:
            target = offset(builder, out_ptr, I64(16 * tile))
            assemble(builder, f"tilestored %tmm{tile}, ($0,$1,1)", target, I64(4 * 64))
        assemble(builder, "tilerelease")
        return context.get_dummy_value()

    signature = types.void(x, types.int64, types.int64, w, types.int64, types.int64, F32_POINTER)
    return signature, codegen
