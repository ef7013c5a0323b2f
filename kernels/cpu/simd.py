"""Vector code for numba: typed pointers, bfloat16, atomics, and two register-blocked products.

Numba has neither bfloat16 nor vectors, so these intrinsics build LLVM IR. A pointer to uint16 is
bfloat16 everywhere in this folder; a pointer to float32 is f32. The instruction set is that of
numba's target (the host, or `NUMBA_CPU_NAME`): `vdpbf16ps` where it has AVX512-BF16, else shifts
and fused multiply-adds, which LLVM lowers to whatever vectors the machine has. AMX is never asked
for: many machines with AVX512-BF16 lack it.

`dot_block` and `mix_block` add each output's products in an order that depends on the length alone,
so a row's bits do not depend on the rows computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target

intrinsic: Any = extending.intrinsic
"""Untyped: the checker would see the typing context among the arguments of a call."""

BF16_POINTER = types.CPointer(types.uint16)
F32_POINTER = types.CPointer(types.float32)
I64_POINTER = types.CPointer(types.int64)
I32_POINTER = types.CPointer(types.int32)

_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
_F32 = ir.FloatType()


class _BFloatType(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite lacks; only the operands of `vdpbf16ps` have this type."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        return repr(value)


_BFloatType._create_instance()


def target_has(feature: str) -> bool:
    """Return whether numba compiles for a CPU with this LLVM feature, e.g. "avx512bf16"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def num_lanes() -> int:
    """Return the f32 values of one vector register."""
    return 16 if target_has("avx512f") else 8


# -- scalars and pointers --------------------------------------------------------------------------


def _is_bf16(pointer: types.Type) -> bool:
    return bool(pointer == BF16_POINTER)


def _offset(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [index])


def _as(builder: Any, pointer: Any, kind: Any) -> Any:
    return builder.bitcast(pointer, kind.as_pointer())


def _widen(builder: Any, bits: Any) -> Any:
    """Turn bfloat16 bits (i16 or a vector of it) into f32."""
    wide, single = _I32, _F32
    if isinstance(bits.type, ir.VectorType):
        wide, single = (ir.VectorType(kind, bits.type.count) for kind in (_I32, _F32))
    shift = ir.Constant(wide, 16 if wide is _I32 else [16] * bits.type.count)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shift), single)


def _narrow(builder: Any, value: Any) -> Any:
    """Round f32 (or a vector of it) to bfloat16 bits, to nearest even; NaN stays NaN."""
    is_vector = isinstance(value.type, ir.VectorType)
    wide, short = _I32, _I16
    if is_vector:
        wide, short = (ir.VectorType(kind, value.type.count) for kind in (_I32, _I16))

    def constant(number: int) -> Any:
        return ir.Constant(wide, [number] * value.type.count if is_vector else number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, constant(0x400000))
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(16)), short)


@intrinsic
def load(typingctx, pointer, index):
    """Return `pointer[index]`; bfloat16 comes as f32."""
    kind = types.float32 if _is_bf16(pointer) else pointer.dtype

    def codegen(context, builder, signature, args):
        value = builder.load(_offset(builder, args[0], args[1]))
        return _widen(builder, value) if _is_bf16(pointer) else value

    return kind(pointer, types.int64), codegen


@intrinsic
def store(typingctx, pointer, index, value):
    """Set `pointer[index]`; an f32 for a bfloat16 pointer is rounded to nearest even."""
    kind = types.float32 if _is_bf16(pointer) else pointer.dtype

    def codegen(context, builder, signature, args):
        stored = _narrow(builder, args[2]) if _is_bf16(pointer) else args[2]
        builder.store(stored, _offset(builder, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, kind), codegen


@intrinsic
def advance(typingctx, pointer, count):
    """Return the pointer to `pointer[count]`."""

    def codegen(context, builder, signature, args):
        return _offset(builder, args[0], args[1])

    return pointer(pointer, types.int64), codegen


@intrinsic
def keep_apart(typingctx):
    """Forbid that LLVM copies the calling function into its callers: compile time would explode."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


def _pointer_from_address(kind: types.Type) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[-1], context.get_value_type(kind))

    return codegen


@intrinsic
def pointer_like(typingctx, pointer, address):
    """Return an address as a pointer of the same type as `pointer`."""
    return pointer(pointer, types.int64), _pointer_from_address(pointer)


@intrinsic
def f32_pointer(typingctx, address):
    """Return an address as a pointer to f32."""
    return F32_POINTER(types.int64), _pointer_from_address(F32_POINTER)


@intrinsic
def i64_pointer(typingctx, address):
    """Return an address as a pointer to int64."""
    return I64_POINTER(types.int64), _pointer_from_address(I64_POINTER)


@intrinsic
def i32_pointer(typingctx, address):
    """Return an address as a pointer to int32."""
    return I32_POINTER(types.int64), _pointer_from_address(I32_POINTER)


@intrinsic
def bits_to_f32(typingctx, bits):
    """Reinterpret an int32 as f32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@njit
def exp_f32(x):
    """Return e^x to about 2 ulp; 0 below -87, e^88 above 88. Vectorises, unlike libm's.

    x = n ln 2 + r with |r| <= ln(2) / 2, and e^r by Taylor's polynomial of degree 7.
    """
    clamped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.int32(clamped * np.float32(1.4426950408889634) + np.float32(1024.5)) - np.int32(1024)
    r = clamped - np.float32(n) * np.float32(0.693359375)
    r = r + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    scale = bits_to_f32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return p * scale if x >= np.float32(-87.0) else np.float32(0.0)


# -- vectors ---------------------------------------------------------------------------------------


def _splat(builder: Any, value: Any, count: int) -> Any:
    kind = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _mask(builder: Any, remaining: Any, count: int) -> Any:
    """Return <count x i1>: the lanes below `remaining`."""
    lanes = ir.Constant(ir.VectorType(_I64, count), list(range(count)))
    return builder.icmp_signed("<", lanes, _splat(builder, remaining, count))


def _load_vector(builder: Any, pointer: Any, kind: Any, mask: Any) -> Any:
    """Load a vector from an unaligned address; masked lanes are 0 and their memory untouched."""
    bytes_per_lane = kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4
    if mask is None:
        return builder.load(_as(builder, pointer, kind), align=bytes_per_lane)
    element = f"i{kind.element.width}" if isinstance(kind.element, ir.IntType) else "f32"
    name = f"llvm.masked.load.v{kind.count}{element}.p0"
    signature = ir.FunctionType(kind, [kind.as_pointer(), _I32, mask.type, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    address = _as(builder, pointer, kind)
    return builder.call(function, [address, _I32(bytes_per_lane), mask, ir.Constant(kind, None)])


def _store_vector(builder: Any, value: Any, pointer: Any, mask: Any) -> None:
    """Store a vector to an unaligned address; the memory of masked lanes is untouched."""
    kind = value.type
    width = kind.element.width if isinstance(kind.element, ir.IntType) else 32
    if mask is None:
        builder.store(value, _as(builder, pointer, kind), align=width // 8)
        return
    element = f"i{width}" if isinstance(kind.element, ir.IntType) else "f32"
    name = f"llvm.masked.store.v{kind.count}{element}.p0"
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), _I32, mask.type])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    builder.call(function, [value, _as(builder, pointer, kind), _I32(width // 8), mask])


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fma.v{a.type.count}f32"
    signature = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [a, b, c])


def _prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line at an address, which need not be mapped."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), _I32(0), _I32(3), _I32(1)])


def _dot_pairs(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """Emit `vdpbf16ps`: add the products of neighbouring bfloat16 pairs to 16 f32 sums."""
    pairs = ir.VectorType(_BFloatType(), 32)
    signature = ir.FunctionType(acc.type, [acc.type, pairs, pairs])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Split <n x i32>, each a pair of bfloat16, into the even and the odd values as f32."""
    count = pairs.type.count
    kind = ir.VectorType(_F32, count)
    even = builder.shl(pairs, ir.Constant(pairs.type, [16] * count))
    odd = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * count))
    return builder.bitcast(even, kind), builder.bitcast(odd, kind)


def _sum_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return a vector of each input's lane sum; 2^n inputs. The order of adding is always the same.

    Two inputs are folded into one register at a time, lane j with lane j + half.
    """
    width = vectors[0].type.count
    vectors = list(vectors)
    groups = 1
    while width > 1:
        width //= 2
        low = [group * 2 * width + lane for group in range(groups) for lane in range(width)]
        if len(vectors) > 1:
            count = vectors[0].type.count
            low += [count + lane for lane in low]
            groups *= 2
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        else:
            pairs = [(vectors[0], vectors[0])]
        vectors = [_fold(builder, a, b, low, width) for a, b in pairs]
    return vectors[0]


def _fold(builder: Any, a: Any, b: Any, low: Sequence[int], distance: int) -> Any:
    kind = ir.VectorType(_I32, len(low))
    first = builder.shuffle_vector(a, b, ir.Constant(kind, list(low)))
    second = builder.shuffle_vector(a, b, ir.Constant(kind, [lane + distance for lane in low]))
    return builder.fadd(first, second)


class _Dot:
    """One step of dot products: how many values it reads, and how it multiplies them."""

    def __init__(self, is_bf16: bool) -> None:
        self.lanes = num_lanes()
        self.is_bf16 = is_bf16
        self.is_native = is_bf16 and target_has("avx512bf16")
        self.step = 2 * self.lanes if is_bf16 else self.lanes
        self.sums = ir.VectorType(_F32, self.lanes)

    def load(self, builder: Any, pointer: Any, mask: Any) -> Any:
        kind = ir.VectorType(_I16 if self.is_bf16 else _F32, self.step)
        values = _load_vector(builder, pointer, kind, mask)
        if not self.is_bf16 or self.is_native:
            return values
        return _halves(builder, builder.bitcast(values, ir.VectorType(_I32, self.lanes)))

    def add(self, builder: Any, acc: Any, a: Any, b: Any) -> Any:
        if self.is_native:
            return _dot_pairs(builder, acc, a, b)
        if not self.is_bf16:
            return _fma(builder, a, b, acc)
        return _fma(builder, a[1], b[1], _fma(builder, a[0], b[0], acc))


@intrinsic(prefer_literal=True)
def dot_block(
    typingctx, num_rows, num_columns, first_row, x, row_ids, x_stride, w, w_stride, length, out,
    out_stride,
):  # fmt: skip
    """Set out[r, c] = sum_k x[row_ids[r], k] w[c, k] for rows r from `first_row` on, columns c.

    num_rows, num_columns  literal ints; columns a power of two
    x, w                   pointers to bfloat16 or f32, the same type; strides in elements
    row_ids                pointer to int64, or None: row r of x
    out                    pointer to f32 or bfloat16
    """
    rows, columns = num_rows.literal_value, num_columns.literal_value
    dot = _Dot(_is_bf16(x))
    has_ids = row_ids == I64_POINTER

    def codegen(context, builder, signature, args):
        _, _, first, x_ptr, ids_ptr, x_step, w_ptr, w_step, length_value, out_ptr, out_step = args
        indices = [builder.add(first, _I64(r)) for r in range(rows)]
        sources = indices
        if has_ids:
            sources = [builder.load(_offset(builder, ids_ptr, index)) for index in indices]
        x_rows = [_offset(builder, x_ptr, builder.mul(row, x_step)) for row in sources]
        w_rows = [_offset(builder, w_ptr, builder.mul(_I64(c), w_step)) for c in range(columns)]
        slots = [
            [cgutils.alloca_once_value(builder, ir.Constant(dot.sums, None)) for _ in w_rows]
            for _ in x_rows
        ]
        ahead = builder.mul(_I64(columns), w_step)
        _emit_dot_loop(builder, dot, x_rows, w_rows, slots, length_value, ahead)
        for index, row_slots in zip(indices, slots, strict=True):
            sums = _sum_lanes(builder, [builder.load(slot) for slot in row_slots])
            value = _narrow(builder, sums) if _is_bf16(out) else sums
            target = _offset(builder, out_ptr, builder.mul(index, out_step))
            _store_vector(builder, value, target, None)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_columns, types.int64, x, row_ids, types.int64, w, types.int64, types.int64,
        out, types.int64,
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
        w_values = [dot.load(builder, _offset(builder, w, k), mask) for w in w_rows]
        if ahead is not None:
            for w in w_rows:
                _prefetch(builder, _offset(builder, w, builder.add(k, ahead)))
        for x_row, row_slots in zip(x_rows, slots, strict=True):
            x_value = dot.load(builder, _offset(builder, x_row, k), mask)
            for w_value, slot in zip(w_values, row_slots, strict=True):
                builder.store(dot.add(builder, builder.load(slot), x_value, w_value), slot)

    whole = builder.and_(length, _I64(-dot.step))
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(dot.step), inc=True) as (k, _):
        step(k, None)
    with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
        step(whole, _mask(builder, builder.sub(length, whole), dot.step))


class _Mix:
    """Weighted sums of value rows, `2 * lanes` columns at a time."""

    def __init__(self, is_bf16: bool) -> None:
        self.lanes = num_lanes()
        self.is_bf16 = is_bf16
        self.is_native = is_bf16 and target_has("avx512bf16")
        self.columns = 2 * self.lanes
        self.sums = ir.VectorType(_F32, self.lanes)
        self.raw = ir.VectorType(_I16 if is_bf16 else _F32, self.columns)

    def shuffle(self, builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(_I32, len(lanes))
        return builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))

    def values(self, builder: Any, row: Any, next_row: Any) -> tuple[Any, Any]:
        """Return what the two sums of a row are multiplied with."""
        n = self.lanes
        if self.is_native:
            first = [lane for i in range(n) for lane in (i, self.columns + i)]
            low = self.shuffle(builder, row, next_row, first)
            return low, self.shuffle(builder, row, next_row, [lane + n for lane in first])
        if self.is_bf16:
            return _halves(builder, builder.bitcast(row, ir.VectorType(_I32, n)))
        low = self.shuffle(builder, row, row, range(n))
        return low, self.shuffle(builder, row, row, range(n, 2 * n))

    def weight(self, builder: Any, pointer: Any, is_pair: bool) -> Any:
        """Return the weight (native: of two neighbouring rows) in every lane."""
        if not self.is_native:
            value = builder.load(pointer)
            return _splat(builder, _widen(builder, value) if self.is_bf16 else value, self.lanes)
        if is_pair:
            pair = builder.load(_as(builder, pointer, _I32), align=2)
        else:
            pair = builder.zext(builder.load(pointer), _I32)
        return builder.bitcast(_splat(builder, pair, self.lanes), self.raw)

    def add(self, builder: Any, acc: Any, weight: Any, value: Any) -> Any:
        if self.is_native:
            return _dot_pairs(builder, acc, weight, value)
        return _fma(builder, weight, value, acc)

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
    out                  pointer to f32, or to bfloat16 (then `add` must be false)
    Rows of `v` at or past `length` are not read.
    """
    rows, tiles = num_rows.literal_value, num_tiles.literal_value
    mix = _Mix(_is_bf16(v))
    is_bf16_out = _is_bf16(out)

    def codegen(context, builder, signature, args):
        args = args[2:]
        columns = args[5]
        start = _I64(0)
        for count in sorted({tiles, 1}, reverse=True):
            width = mix.columns * count
            rest = builder.sub(columns, start)
            stop = builder.add(start, builder.sub(rest, builder.srem(rest, _I64(width))))
            with cgutils.for_range_slice(builder, start, stop, _I64(width), inc=True) as (c, _):
                _emit_mix(builder, mix, rows, count, args, c, None, is_bf16_out)
            start = stop
        with builder.if_then(builder.icmp_signed("<", start, columns), likely=False):
            mask = _mask(builder, builder.sub(columns, start), mix.columns)
            _emit_mix(builder, mix, rows, 1, args, start, mask, is_bf16_out)
        return context.get_dummy_value()

    signature = types.void(
        num_rows, num_tiles, p, types.int64, v, types.int64, types.int64, types.int64, out,
        types.int64, types.boolean,
    )  # fmt: skip
    return signature, codegen


def _emit_mix(
    builder: Any, mix: _Mix, rows: int, tiles: int, args: Any, column: Any, mask: Any,
    is_bf16_out: bool,
) -> None:  # fmt: skip
    """Emit the sums of `tiles * mix.columns` columns of each row."""
    p_ptr, p_step, v_ptr, v_step, length, _, out_ptr, out_step, add = args
    p_rows = [_offset(builder, p_ptr, builder.mul(_I64(r), p_step)) for r in range(rows)]
    columns = [builder.add(column, _I64(tile * mix.columns)) for tile in range(tiles)]
    outs = [
        _offset(builder, out_ptr, builder.add(builder.mul(_I64(r), out_step), c))
        for r in range(rows)
        for c in columns
    ]
    slots = [
        [cgutils.alloca_once_value(builder, ir.Constant(mix.sums, None)) for _ in range(2)]
        for _ in outs
    ]
    if not is_bf16_out:
        single = ir.VectorType(_F32, mix.columns)
        with builder.if_then(add):
            for out, pair in zip(outs, slots, strict=True):
                old = _load_vector(builder, out, single, mask)
                for half, slot in zip(mix.split(builder, old), pair, strict=True):
                    builder.store(half, slot)

    def step(t: Any, is_pair: bool) -> None:
        values = []
        for c in columns:
            row_ptr = _offset(builder, v_ptr, builder.add(builder.mul(t, v_step), c))
            row = _load_vector(builder, row_ptr, mix.raw, mask)
            following = ir.Constant(mix.raw, None)
            if is_pair:
                following = _load_vector(builder, _offset(builder, row_ptr, v_step), mix.raw, mask)
            values.append(mix.values(builder, row, following))
        for index, pair in enumerate(slots):
            weight = mix.weight(builder, _offset(builder, p_rows[index // tiles], t), is_pair)
            for slot, value in zip(pair, values[index % tiles], strict=True):
                builder.store(mix.add(builder, builder.load(slot), weight, value), slot)

    stride = 2 if mix.is_native else 1
    whole = builder.and_(length, _I64(-stride))
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(stride), inc=True) as (t, _):
        step(t, mix.is_native)
    if mix.is_native:
        with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
            step(whole, False)
    for out, pair in zip(outs, slots, strict=True):
        sums = mix.in_order(builder, [builder.load(slot) for slot in pair])
        _store_vector(builder, _narrow(builder, sums) if is_bf16_out else sums, out, mask)


@intrinsic
def row_dot(typingctx, a, b, length):
    """Return the f32 sum of a[k] b[k]; both bfloat16 or both f32."""
    dot = _Dot(_is_bf16(a))

    def codegen(context, builder, signature, args):
        slot = cgutils.alloca_once_value(builder, ir.Constant(dot.sums, None))
        _emit_dot_loop(builder, dot, [args[0]], [args[1]], [[slot]], args[2], None)
        total = _sum_lanes(builder, [builder.load(slot)])
        return builder.extract_element(total, _I32(0))

    return types.float32(a, b, types.int64), codegen


def _reduce(combine: Callable[..., Any], start: float) -> Callable[..., Any]:
    """Return the code of a reduction of f32 values, a register at a time."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = num_lanes()
        kind = ir.VectorType(_F32, lanes)
        pointer, length = args
        initial = ir.Constant(kind, [start] * lanes)
        slot = cgutils.alloca_once_value(builder, initial)

        def step(i: Any, mask: Any) -> None:
            values = _load_vector(builder, _offset(builder, pointer, i), kind, mask)
            if mask is not None:
                values = builder.select(mask, values, initial)
            builder.store(combine(builder, builder.load(slot), values), slot)

        whole = builder.and_(length, _I64(-lanes))
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(lanes), inc=True) as (i, _):
            step(i, None)
        with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
            step(whole, _mask(builder, builder.sub(length, whole), lanes))
        total = builder.load(slot)
        while lanes > 1:
            lanes //= 2
            half = ir.VectorType(_I32, lanes)
            low, high = (
                builder.shuffle_vector(total, total, ir.Constant(half, list(part)))
                for part in (range(lanes), range(lanes, 2 * lanes))
            )
            total = combine(builder, low, high)
        return builder.extract_element(total, _I32(0))

    return codegen


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


@intrinsic
def row_max(typingctx, values, length):
    """Return the largest of `length` f32 values; -inf if there are none."""
    return types.float32(F32_POINTER, types.int64), _reduce(_larger, float("-inf"))


@intrinsic
def row_sum(typingctx, values, length):
    """Return the sum of `length` f32 values, in an order that depends on the length alone."""
    add = _reduce(lambda builder, a, b: builder.fadd(a, b), 0.0)
    return types.float32(F32_POINTER, types.int64), add
