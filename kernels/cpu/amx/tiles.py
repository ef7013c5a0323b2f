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

from whalepod.kernels.cpu.packed import ExactWeights
from whalepod.kernels.cpu.packed_tiles import BLOCK_GROUPS, multiply, multiply_by_vectors
from whalepod.kernels.cpu.simd import (
    F32_POINTER,
    I8,
    I16,
    I64,
    TILE_BF16_POINTER,
    as_pointer,
    intrinsic,
    keep_apart,
    offset,
)
from whalepod.kernels.cpu.workspace import Workspace

initialize_native_asmparser()  # without it LLVM aborts at inline assembly

MIN_ROWS = 4
"""Tiles are faster than AVX512-BF16 from this many rows, where a machine has both."""

_NUM_GROUPS = 4
_COLUMNS = 16 * _NUM_GROUPS
_STEP = 32
"""Values along k of one tile."""

_SUMS = range(4)
_WEIGHTS = (5, 6, 7)

_STEP_CODE = "\n".join(
    ["tileloadd ($0,$1,1), %tmm4"]
    + [
        f"tileloadd (${2 + g},$6,1), %tmm{_WEIGHTS[g % 3]}\n"
        f"tdpbf16ps %tmm{_WEIGHTS[g % 3]}, %tmm4, %tmm{g}"
        for g in range(_NUM_GROUPS)
    ]
)


def assemble(builder: Any, code: str, *operands: Any) -> None:
    """Emit instructions that take integers and addresses as $0, $1, ..."""
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


_LENGTH_PER_PASS = 256
"""Values along k that all rows pass by at once: 32 KiB of the weight stay in the first-level cache.
"""


@intrinsic
def tile_product(typingctx, x, x_stride, num_rows, w, w_stride, length, sums):
    """Set sums[r, c] = sum_k x[r, k] w[c, k], `[rows, 64]` f32, of any rows and four groups.

    `length` is a multiple of 32; strides in elements, w's of groups. A row's bits do not depend on
    how many rows there are: its sums are added in the order of k, and kept in f32 between passes.
    (Asking for the next weight meanwhile was tried, and made cold weights slower.)
    """

    def codegen(context, builder, signature, args):
        x_ptr, x_step, rows, w_ptr, w_step, length_value, out_ptr = args
        product = _Product(builder, x_step, w_ptr, w_step, length_value)
        num_whole = builder.lshr(rows, I64(4))
        rest = builder.and_(rows, I64(15))
        with builder.if_then(builder.icmp_signed(">", num_whole, I64(0))):
            _configure(builder, I64(16))
            product.multiply(x_ptr, num_whole, out_ptr)
        with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
            _configure(builder, rest)
            first = builder.shl(num_whole, I64(4))
            target = offset(builder, out_ptr, builder.mul(first, I64(_COLUMNS)))
            product.multiply(offset(builder, x_ptr, builder.mul(first, x_step)), I64(1), target)
        assemble(builder, "tilerelease")
        return context.get_dummy_value()

    signature = types.void(x, types.int64, types.int64, w, types.int64, types.int64, F32_POINTER)
    return signature, codegen


class _Product:
    """Emits the loops of `tile_product`: passes along k, blocks of 16 rows, steps of 32."""

    def __init__(self, builder: Any, x_step: Any, w: Any, w_step: Any, length: Any) -> None:
        self._builder, self._x_step, self._length = builder, x_step, length
        self._row_bytes = builder.shl(x_step, I64(1))
        self._groups = [offset(builder, w, builder.mul(I64(g), w_step)) for g in range(_NUM_GROUPS)]

    def multiply(self, x: Any, num_blocks: Any, out: Any) -> None:
        """Multiply blocks of as many rows as the tiles are configured for."""
        builder = self._builder
        is_one = builder.icmp_signed("==", num_blocks, I64(1))
        per_pass = builder.select(is_one, self._length, I64(_LENGTH_PER_PASS))
        with cgutils.for_range_slice(builder, I64(0), self._length, per_pass, inc=True) as (k, _):
            stop = builder.add(k, per_pass)
            is_last = builder.icmp_signed(">", stop, self._length)
            stop = builder.select(is_last, self._length, stop)
            with cgutils.for_range(builder, num_blocks, intp=ir.IntType(64)) as loop:
                row = builder.shl(loop.index, I64(4))
                source = offset(builder, x, builder.mul(row, self._x_step))
                target = offset(builder, out, builder.mul(row, I64(_COLUMNS)))
                self._start(k, target)
                self._steps(source, k, stop)
                self._move("tilestored %tmm{tile}, ($0,$1,1)", target)

    def _start(self, k: Any, sums: Any) -> None:
        """Zero the sums, or take up those of the pass before."""
        with self._builder.if_else(self._builder.icmp_signed("==", k, I64(0))) as (new, old):
            with new:
                for tile in _SUMS:
                    assemble(self._builder, f"tilezero %tmm{tile}")
            with old:
                self._move("tileloadd ($0,$1,1), %tmm{tile}", sums)

    def _steps(self, x: Any, start: Any, stop: Any) -> None:
        builder = self._builder
        with cgutils.for_range_slice(builder, start, stop, I64(_STEP), inc=True) as (k, _):
            at = builder.mul(k, I64(16))
            assemble(
                builder, _STEP_CODE, offset(builder, x, k), self._row_bytes,
                *(offset(builder, group, at) for group in self._groups), I64(64),
            )  # fmt: skip

    def _move(self, code: str, sums: Any) -> None:
        for tile in _SUMS:
            place = offset(self._builder, sums, I64(16 * tile))
            assemble(self._builder, code.format(tile=tile), place, I64(4 * _COLUMNS))


@multiply.written_for(TILE_BF16_POINTER)
def _multiply(w, w_stride, num_groups, x, x_stride, num_rows, length, tile_rows, sums):
    keep_apart()
    if num_groups == BLOCK_GROUPS and length % _STEP == 0 and num_rows >= tile_rows:
        tile_product(x, x_stride, num_rows, w, w_stride, length, sums)
    else:
        multiply_by_vectors(w, w_stride, num_groups, x, x_stride, num_rows, length, 0, sums)


class TileWeights(ExactWeights):
    """Weights in the model dtype; those of bfloat16 are multiplied in tiles, too."""

    def __init__(self, work: Workspace, tile_rows: int) -> None:
        super().__init__(work)
        self.tile_rows = tile_rows

    def operands(self, dtype: torch.dtype) -> types.CPointer:
        return TILE_BF16_POINTER if dtype == torch.bfloat16 else F32_POINTER
