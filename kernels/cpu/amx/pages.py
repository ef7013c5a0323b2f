"""Attention of 16 rows of queries over pages of 64 keys, in AMX tiles (bfloat16).

The 16 rows are the heads of one token (absorbed: all heads share the keys) or 16 tokens of one head
(expanded); a lane of a vector is a row. Keys and values are read as they lie, nothing is transposed
or interleaved on the way:

- scores^T = K q^T: a tile of 16 keys by 32 values is the left operand; the queries, packed once,
  are the right one. Maxima and sums over the keys are then plain vector operations.
- o = p V: a tile of 16 values' rows by 32 columns as the right operand pairs neighbouring columns
  where the instruction expects neighbouring keys. With (p, 0) on the left the sums are those of the
  even columns, with (0, p) of the odd ones: twice the products, but no copy of V. So o has, for 32
  columns, the 16 even ones first, then the odd ones; `write_pairs` puts them in order.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.kernels.cpu.amx.tiles import assemble
from whalepod.kernels.cpu.exponentials import exponential
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I32,
    I32_POINTER,
    I64,
    I64_POINTER,
    advance,
    as_pointer,
    intrinsic,
    is_bf16,
    keep_apart,
    load,
    narrow,
    offset,
    store,
)
from whalepod.kernels.cpu.vectors import load_vector, shuffle, splat, transpose
from whalepod.kernels.interface import BLOCK_TOKENS

LANES = 16
"""Rows of queries that share a pass over the keys."""

STEP = 32
"""Values along a row of one tile; the keys' width is a multiple."""

COLUMN_BLOCK = 64
"""Columns of the values that are summed at once; their number is a multiple."""

PAGE_SCORES = BLOCK_TOKENS * LANES
PAGE_TILE_BYTES = 4 * 2 * 1024
_WAYS = 4
_SLACK = 8.0
"""How far scores may exceed the maximum that they refer to: e^8 is far from overflow."""

_SCORE_STEP = "tileloadd ($0,$1,1), %tmm4\n" + "\n".join(
    f"tileloadd (${2 + g},$6,1), %tmm{5 + g % 3}\ntdpbf16ps %tmm4, %tmm{5 + g % 3}, %tmm{g}"
    for g in range(4)
)
_MIX_STEP = """tileloadd ($0,$2,1), %tmm4
tileloadd ($1,$2,1), %tmm5
tileloadd ($3,$5,1), %tmm6
tdpbf16ps %tmm6, %tmm4, %tmm0
tdpbf16ps %tmm6, %tmm5, %tmm1
tileloadd ($4,$5,1), %tmm7
tdpbf16ps %tmm7, %tmm4, %tmm2
tdpbf16ps %tmm7, %tmm5, %tmm3"""


@intrinsic
def pack_queries(typingctx, q, stride, num_rows, num_steps, packed_q):
    """Write up to 16 rows as right operands: `[steps, 16 pairs, 16 rows, 2]`.

    Rows at or past `num_rows` become copies of the last one.
    """
    words = ir.VectorType(I32, LANES)

    def codegen(context, builder, signature, args):
        q_ptr, step_of_rows, count, steps, out = args
        last = builder.sub(count, I64(1))
        sources = []
        for row in range(LANES):
            index = builder.select(builder.icmp_signed("<", I64(row), count), I64(row), last)
            sources.append(offset(builder, q_ptr, builder.mul(index, step_of_rows)))
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(loop.index, I64(STEP))
            rows = [
                builder.load(as_pointer(builder, offset(builder, row, at), words), align=2)
                for row in sources
            ]
            target = offset(builder, out, builder.mul(loop.index, I64(LANES * STEP)))
            for j, column in enumerate(transpose(builder, rows)):
                place = offset(builder, target, I64(j * STEP))
                builder.store(column, as_pointer(builder, place, words), 2)
        return context.get_dummy_value()

    return types.void(q, types.int64, types.int64, types.int64, q), codegen


@intrinsic
def _score_page(typingctx, packed_q, page, row_bytes, num_steps, scores):
    """Set scores[key, row] of the 64 keys at the address `page`."""

    def codegen(context, builder, signature, args):
        queries, page_value, stride, steps, out = args
        for tile in range(4):
            assemble(builder, f"tilezero %tmm{tile}")
        rows = [builder.add(page_value, builder.mul(stride, I64(16 * g))) for g in range(4)]
        with cgutils.for_range(builder, steps) as loop:
            queries_step = offset(builder, queries, builder.mul(loop.index, I64(LANES * STEP)))
            at = builder.mul(loop.index, I64(2 * STEP))
            operands = [builder.add(row, at) for row in rows]
            assemble(builder, _SCORE_STEP, queries_step, I64(64), *operands, stride)
        for tile in range(4):
            target = offset(builder, out, I64(tile * 16 * LANES))
            assemble(builder, f"tilestored %tmm{tile}, ($0,$1,1)", target, I64(64))
        return context.get_dummy_value()

    signature = types.void(packed_q, types.int64, types.int64, types.int64, F32_POINTER)
    return signature, codegen


def _over_ways(builder: Any, start: Any, end: Any, step: Any) -> None:
    """Call `step(row, way)` for all rows: four chains side by side, the rest in the first."""
    count = builder.sub(end, start)
    whole = builder.add(start, builder.and_(count, I64(-_WAYS)))
    with cgutils.for_range_slice(builder, start, whole, I64(_WAYS), inc=True) as (row, _):
        for way in range(_WAYS):
            step(builder.add(row, I64(way)), way)
    with cgutils.for_range_slice(builder, whole, end, I64(1), inc=True) as (row, _):
        step(row, 0)


def _combined(builder: Any, slots: list[Any], combine: Any) -> Any:
    a, b, c, d = (builder.load(slot) for slot in slots)
    return combine(combine(a, b), combine(c, d))


@intrinsic
def _softmax_columns(typingctx, scores, low, ends, num_keys, scale, running):
    """Set scores[key, row] = e^(scale * score - reference), 0 outside low <= key < ends[row].

    running  f32 [3, 16]: reference (-inf before the first key), sum of the weights, and the factor
             that belongs to what was summed with the old reference
    Returns whether a factor is not 1. Each row's results depend on its own scores alone.
    """
    singles, integers = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def codegen(context, builder, signature, args):
        score, first, end_ptr, count, factor, state = args
        factors = splat(builder, factor, LANES)
        lane_ends = builder.load(as_pointer(builder, end_ptr, integers), align=4)
        nothing = ir.Constant(singles, [float("-inf")] * LANES)
        zero = ir.Constant(singles, None)
        reference_at, sum_at, factor_at = (
            as_pointer(builder, offset(builder, state, I64(i * LANES)), singles) for i in range(3)
        )

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", a, b), b, a)

        def place(row: Any) -> Any:
            at = offset(builder, score, builder.mul(row, I64(LANES)))
            return as_pointer(builder, at, singles)

        def is_seen(row: Any) -> Any:
            number = splat(builder, builder.trunc(row, I32), LANES)
            return builder.icmp_signed("<", number, lane_ends)

        def fresh(value: Any) -> list[Any]:
            return [cgutils.alloca_once_value(builder, value) for _ in range(_WAYS)]

        maxima = fresh(nothing)

        def raise_maximum(row: Any, way: int) -> None:
            value = builder.select(is_seen(row), builder.load(place(row), align=4), nothing)
            builder.store(larger(builder.load(maxima[way]), value), maxima[way])

        _over_ways(builder, first, count, raise_maximum)
        largest = builder.fmul(_combined(builder, maxima, larger), factors)
        old = builder.load(reference_at, align=4)
        limit = builder.fadd(old, ir.Constant(singles, [_SLACK] * LANES))
        is_raised = builder.fcmp_ordered(">", largest, limit)
        reference = builder.select(is_raised, largest, old)
        shrink = exponential(builder, builder.fsub(old, reference))
        one = ir.Constant(singles, [1.0] * LANES)
        shrink = builder.select(is_raised, shrink, one)
        sums = fresh(zero)

        def exponentiate(row: Any, way: int) -> None:
            x = builder.fmul(builder.load(place(row), align=4), factors)
            value = exponential(builder, builder.fsub(x, reference))
            value = builder.select(is_seen(row), value, zero)
            builder.store(value, place(row), 4)
            builder.store(builder.fadd(builder.load(sums[way]), value), sums[way])

        _over_ways(builder, first, count, exponentiate)
        with cgutils.for_range(builder, first) as loop:
            builder.store(zero, place(loop.index), 4)
        total = builder.fmul(builder.load(sum_at, align=4), shrink)
        total = builder.fadd(total, _combined(builder, sums, builder.fadd))
        for vector, at in ((reference, reference_at), (total, sum_at), (shrink, factor_at)):
            builder.store(vector, at, 4)
        bits = builder.bitcast(is_raised, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    signature = types.boolean(
        F32_POINTER, types.int64, I32_POINTER, types.int64, types.float32, F32_POINTER
    )
    return signature, codegen


@intrinsic
def _scale_rows(typingctx, o, num_columns, factors):
    """Multiply each of 16 rows with its factor."""
    singles = ir.VectorType(F32, LANES)

    def codegen(context, builder, signature, args):
        start, columns, factor_ptr = args
        with cgutils.for_range(builder, I64(LANES)) as row:
            factor = builder.load(offset(builder, factor_ptr, row.index))
            values = offset(builder, start, builder.mul(row.index, columns))
            with cgutils.for_range_slice(builder, I64(0), columns, I64(LANES), inc=True) as (c, _):
                at = as_pointer(builder, offset(builder, values, c), singles)
                scaled = builder.fmul(builder.load(at, align=4), splat(builder, factor, LANES))
                builder.store(scaled, at, 4)
        return context.get_dummy_value()

    return types.void(F32_POINTER, types.int64, F32_POINTER), codegen


def _pairs(builder: Any, a: Any, b: Any) -> list[Any]:
    """Return a[0], b[0], a[1], b[1], ... as two vectors."""
    lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
    return [shuffle(builder, a, b, lanes[half * LANES :][:LANES]) for half in range(2)]


@intrinsic
def _weights_to_tiles(typingctx, weights, tiles):
    """Round 16 keys' weights `[16 keys, 16 rows]`; write (p, 0) and (0, p) as left operands."""
    singles, integers = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def codegen(context, builder, signature, args):
        rows = []
        for key in range(16):
            source = offset(builder, args[0], I64(key * LANES))
            value = load_vector(builder, source, singles, None)
            rows.append(builder.zext(narrow(builder, value), integers))
        sixteen = ir.Constant(integers, [16] * LANES)
        start = builder.inttoptr(args[1], I32.as_pointer())
        for row, column in enumerate(transpose(builder, rows)):
            for half, value in enumerate((column, builder.shl(column, sixteen))):
                target = offset(builder, start, I64(half * 256 + row * LANES))
                builder.store(value, as_pointer(builder, target, integers), 4)
        return context.get_dummy_value()

    return types.void(F32_POINTER, types.int64), codegen


@intrinsic
def _mix_pages(typingctx, tiles, pages, num_pages, row_bytes, num_columns, is_first, out):
    """Set (or add to) out[row, c] the weighted sum of the values, columns in the order of pairs.

    pages  addresses of 64 rows each; `tiles` is the address of their weights
    out    f32 [16, columns]
    """

    def codegen(context, builder, signature, args):
        weights, page_ptr, count, stride, columns, is_set, out_ptr = args
        out_bytes = builder.shl(columns, I64(2))
        with cgutils.for_range(builder, builder.lshr(columns, I64(6))) as block:
            target = offset(builder, out_ptr, builder.shl(block.index, I64(6)))
            sums = [offset(builder, target, I64(16 * tile)) for tile in range(4)]
            with builder.if_else(is_set) as (then, otherwise):
                with then:
                    for tile in range(4):
                        assemble(builder, f"tilezero %tmm{tile}")
                with otherwise:
                    for tile in range(4):
                        assemble(builder, f"tileloadd ($0,$1,1), %tmm{tile}", sums[tile], out_bytes)
            with cgutils.for_range(builder, count) as page:
                rows = builder.load(offset(builder, page_ptr, page.index))
                rows = builder.add(rows, builder.shl(block.index, I64(7)))
                left = builder.add(weights, builder.mul(page.index, I64(PAGE_TILE_BYTES)))
                for group in range(4):
                    even = builder.add(left, I64(2048 * group))
                    row = builder.add(rows, builder.mul(I64(16 * group), stride))
                    assemble(
                        builder, _MIX_STEP, even, builder.add(even, I64(1024)), I64(64), row,
                        builder.add(row, I64(64)), stride,
                    )  # fmt: skip
            for tile in range(4):
                assemble(builder, f"tilestored %tmm{tile}, ($0,$1,1)", sums[tile], out_bytes)
        return context.get_dummy_value()

    signature = types.void(
        types.int64, I64_POINTER, types.int64, types.int64, types.int64, types.boolean, F32_POINTER
    )
    return signature, codegen


Pages = namedtuple("Pages", "keys key_bytes values value_bytes count low ends")
"""keys, values  addresses of pages; their rows are `key_bytes`, `value_bytes` apart
low, ends     row r sees keys low <= k < ends[r], counted from the first page's first"""

Memory = namedtuple("Memory", "scores tiles o running")
"""scores, tiles  scratch: f32 [pages, 64, 16]; the address of pages * 8 KiB
o              f32 [16, columns] in the order of pairs, not normalised
running        f32 [3, 16], see `_softmax_columns`"""


@njit
def attend_pages(packed_q, num_steps, pages, num_columns, scale, is_first, memory):
    """Attend to whole pages. The caller starts and ends the tiles.

    packed_q  from `pack_queries`
    is_first  begin `o` and `running`
    """
    keep_apart()
    running = memory.running
    if is_first:
        for row in range(LANES):
            store(running, row, np.float32(-np.inf))
            store(running, LANES + row, np.float32(0.0))
    for page in range(pages.count):
        target = advance(memory.scores, page * PAGE_SCORES)
        _score_page(packed_q, load(pages.keys, page), pages.key_bytes, num_steps, target)
    num_keys = pages.count * BLOCK_TOKENS
    is_raised = _softmax_columns(memory.scores, pages.low, pages.ends, num_keys, scale, running)
    if is_raised and not is_first:
        _scale_rows(memory.o, num_columns, advance(running, 2 * LANES))
    for group in range(pages.count * 4):
        _weights_to_tiles(advance(memory.scores, group * 256), memory.tiles + group * 2048)
    _mix_pages(
        memory.tiles, pages.values, pages.count, pages.value_bytes, num_columns, is_first, memory.o
    )


@intrinsic
def write_pairs(typingctx, o, total, num_columns, out):
    """Set out[c] = o[c] / total, from the order of pairs to that of columns."""
    singles = ir.VectorType(F32, LANES)
    integers = ir.VectorType(I32, LANES)
    is_short = is_bf16(out)

    def codegen(context, builder, signature, args):
        source, sum_, columns, target = args
        factors = splat(builder, builder.fdiv(F32(1.0), sum_), LANES)
        with cgutils.for_range_slice(builder, I64(0), columns, I64(2 * LANES), inc=True) as (c, _):
            place = offset(builder, source, c)
            even, odd = (
                builder.fmul(load_vector(builder, part, singles, None), factors)
                for part in (place, offset(builder, place, I64(LANES)))
            )
            goal = offset(builder, target, c)
            if is_short:
                low, high = (builder.zext(narrow(builder, v), integers) for v in (even, odd))
                sixteen = ir.Constant(integers, [16] * LANES)
                both = builder.or_(low, builder.shl(high, sixteen))
                builder.store(both, as_pointer(builder, goal, integers), 2)
            else:
                for half, vector in enumerate(_pairs(builder, even, odd)):
                    part = offset(builder, goal, I64(half * LANES))
                    builder.store(vector, as_pointer(builder, part, singles), 4)
        return context.get_dummy_value()

    return types.void(F32_POINTER, types.float32, types.int64, out), codegen


@intrinsic
def copy_page(typingctx, source, low, high, row_stride, width, target):
    """Copy rows low .. high of 64 rows to dense ones of `width` values; the others become 0."""
    assert is_bf16(source) or source == F32_POINTER
    value_bytes = 2 if is_bf16(source) else 4

    def codegen(context, builder, signature, args):
        source_ptr, first, end, stride, columns, target_ptr = args
        row_bytes = builder.mul(columns, I64(value_bytes))
        with cgutils.for_range(builder, I64(BLOCK_TOKENS)) as loop:
            goal = offset(builder, target_ptr, builder.mul(loop.index, columns))
            is_real = builder.and_(
                builder.icmp_signed(">=", loop.index, first),
                builder.icmp_signed("<", loop.index, end),
            )
            with builder.if_else(is_real) as (then, otherwise):
                with then:
                    row = offset(builder, source_ptr, builder.mul(loop.index, stride))
                    cgutils.raw_memcpy(builder, goal, row, row_bytes, 1)
                with otherwise:
                    cgutils.memset(builder, goal, row_bytes, 0)
        return context.get_dummy_value()

    signature = types.void(source, types.int64, types.int64, types.int64, types.int64, source)
    return signature, codegen
