"""LLVM IR of vectors, and reductions of a row of f32.

Where the target has AVX512-BF16, products of bfloat16 are `vdpbf16ps`; else they are shifts and
fused multiply-adds, which LLVM lowers to whatever vectors the machine has. AMX is never asked for:
many machines with AVX512-BF16 lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from whalepod.kernels.cpu.simd import (
    BFLOAT,
    F32,
    F32_POINTER,
    I32,
    I64,
    as_pointer,
    intrinsic,
    num_lanes,
    offset,
)


def splat(builder: Any, value: Any, count: int) -> Any:
    kind = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def lanes_below(builder: Any, remaining: Any, count: int) -> Any:
    """Return <count x i1>: the lanes below `remaining`."""
    lanes = ir.Constant(ir.VectorType(I64, count), list(range(count)))
    return builder.icmp_signed("<", lanes, splat(builder, remaining, count))


def load_vector(builder: Any, pointer: Any, kind: Any, mask: Any) -> Any:
    """Load a vector from an unaligned address; masked lanes are 0 and their memory untouched."""
    bytes_per_lane = kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4
    if mask is None:
        return builder.load(as_pointer(builder, pointer, kind), align=bytes_per_lane)
    element = f"i{kind.element.width}" if isinstance(kind.element, ir.IntType) else "f32"
    name = f"llvm.masked.load.v{kind.count}{element}.p0"
    signature = ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    address = as_pointer(builder, pointer, kind)
    return builder.call(function, [address, I32(bytes_per_lane), mask, ir.Constant(kind, None)])


def store_vector(builder: Any, value: Any, pointer: Any, mask: Any) -> None:
    """Store a vector to an unaligned address; the memory of masked lanes is untouched."""
    kind = value.type
    width = kind.element.width if isinstance(kind.element, ir.IntType) else 32
    if mask is None:
        builder.store(value, as_pointer(builder, pointer, kind), align=width // 8)
        return
    element = f"i{width}" if isinstance(kind.element, ir.IntType) else "f32"
    name = f"llvm.masked.store.v{kind.count}{element}.p0"
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), I32, mask.type])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    builder.call(function, [value, as_pointer(builder, pointer, kind), I32(width // 8), mask])


def over_vectors(builder: Any, size: Any, lanes: int, step: Callable[[Any, Any], None]) -> None:
    """Call `step(index, mask)` for whole vectors, then once more, masked, for what is left."""
    whole = builder.and_(size, I64(-lanes))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(lanes), inc=True) as (i, _):
        step(i, None)
    with builder.if_then(builder.icmp_signed("<", whole, size), likely=False):
        step(whole, lanes_below(builder, builder.sub(size, whole), lanes))


def call_llvm(builder: Any, name: str, *operands: Any) -> Any:
    """Call an LLVM intrinsic that is overloaded by its one type: a float, or a vector of floats."""
    kind = operands[0].type
    is_vector = isinstance(kind, ir.VectorType)
    element = "f64" if (kind.element if is_vector else kind) == ir.DoubleType() else "f32"
    suffix = f"v{kind.count}{element}" if is_vector else element
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, operands)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "fma", a, b, c)


def rounded(builder: Any, a: Any) -> Any:
    """Return the vector as it is, and keep the compiler from fusing what made it with what follows.

    LLVM is free here to turn a product and a sum into one operation, which rounds once.
    """
    return call_llvm(builder, "arithmetic.fence", a)


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line at an address, which need not be mapped."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), I32(0), I32(3), I32(1)])


def dot_pairs(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """Emit `vdpbf16ps`: add the products of neighbouring bfloat16 pairs to 16 f32 sums."""
    pairs = ir.VectorType(BFLOAT, 32)
    signature = ir.FunctionType(acc.type, [acc.type, pairs, pairs])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


def shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Return the chosen lanes of two vectors, those of the second counted on from the first's."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _quarters(*lanes: int) -> list[int]:
    return [4 * quarter + lane for quarter in range(4) for lane in lanes]


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 values of 32 bits: 64 shuffles within and between quarters."""
    low, high = _quarters(0, 16, 1, 17), _quarters(2, 18, 3, 19)
    pairs = [
        shuffle(builder, rows[2 * i], rows[2 * i + 1], lanes)
        for i in range(8)
        for lanes in (low, high)
    ]
    low, high = _quarters(0, 1, 16, 17), _quarters(2, 3, 18, 19)
    fours = [
        shuffle(builder, pairs[4 * i + half], pairs[4 * i + 2 + half], lanes)
        for i in range(4)
        for half in range(2)
        for lanes in (low, high)
    ]
    even = [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
    odd = [lane + 4 for lane in even]
    columns = [None] * 16
    for j in range(4):
        for first, lanes in enumerate((even, odd)):
            x = shuffle(builder, fours[j], fours[4 + j], lanes)
            y = shuffle(builder, fours[8 + j], fours[12 + j], lanes)
            columns[4 * first + j] = shuffle(builder, x, y, even)
            columns[4 * (first + 2) + j] = shuffle(builder, x, y, odd)
    return columns


def halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Split <n x i32>, each a pair of bfloat16, into the even and the odd values as f32."""
    count = pairs.type.count
    kind = ir.VectorType(F32, count)
    even = builder.shl(pairs, ir.Constant(pairs.type, [16] * count))
    odd = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * count))
    return builder.bitcast(even, kind), builder.bitcast(odd, kind)


def sum_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
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
    kind = ir.VectorType(I32, len(low))
    first = builder.shuffle_vector(a, b, ir.Constant(kind, list(low)))
    second = builder.shuffle_vector(a, b, ir.Constant(kind, [lane + distance for lane in low]))
    return builder.fadd(first, second)


def _reduce(combine: Callable[..., Any], start: float) -> Callable[..., Any]:
    """Return the code of a reduction of f32 values, a register at a time."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = num_lanes()
        kind = ir.VectorType(F32, lanes)
        pointer, length = args
        initial = ir.Constant(kind, [start] * lanes)
        slot = cgutils.alloca_once_value(builder, initial)

        def step(i: Any, mask: Any) -> None:
            values = load_vector(builder, offset(builder, pointer, i), kind, mask)
            if mask is not None:
                values = builder.select(mask, values, initial)
            builder.store(combine(builder, builder.load(slot), values), slot)

        over_vectors(builder, length, lanes, step)
        total = builder.load(slot)
        while lanes > 1:
            lanes //= 2
            half = ir.VectorType(I32, lanes)
            low, high = (
                builder.shuffle_vector(total, total, ir.Constant(half, list(part)))
                for part in (range(lanes), range(lanes, 2 * lanes))
            )
            total = combine(builder, low, high)
        return builder.extract_element(total, I32(0))

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
