"""Typed pointers, bfloat16 and scalar functions for numba, which has none of them.

A pointer to uint16 is bfloat16 everywhere in this folder; a pointer to float32 is f32. Code is
compiled for numba's target: the host, or `NUMBA_CPU_NAME` with `NUMBA_CPU_FEATURES`. What takes a
`builder` emits LLVM IR while numba compiles; the rest is called in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core.registry import cpu_target

intrinsic: Any = extending.intrinsic
"""Untyped: the checker would see the typing context among the arguments of a call."""

BF16_POINTER = types.CPointer(types.uint16)
F32_POINTER = types.CPointer(types.float32)
I64_POINTER = types.CPointer(types.int64)
I32_POINTER = types.CPointer(types.int32)

I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
F32 = ir.FloatType()


def target_has(feature: str) -> bool:
    """Return whether numba compiles for a CPU with this LLVM feature, e.g. "avx512bf16"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def num_lanes() -> int:
    """Return the f32 values of one vector register."""
    return 16 if target_has("avx512f") else 8


def is_bf16(pointer: types.Type) -> bool:
    """Return whether what a pointer points to is bfloat16."""
    return bool(pointer == BF16_POINTER)


def offset(builder: Any, pointer: Any, index: Any) -> Any:
    """Return the pointer to `pointer[index]`."""
    return builder.gep(pointer, [index])


def as_pointer(builder: Any, pointer: Any, kind: Any) -> Any:
    """Return a pointer to the same memory as values of another type."""
    return builder.bitcast(pointer, kind.as_pointer())


def widen(builder: Any, bits: Any) -> Any:
    """Turn bfloat16 bits (i16 or a vector of it) into f32."""
    wide, single = I32, F32
    if isinstance(bits.type, ir.VectorType):
        wide, single = (ir.VectorType(kind, bits.type.count) for kind in (I32, F32))
    shift = ir.Constant(wide, 16 if wide is I32 else [16] * bits.type.count)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shift), single)


def narrow(builder: Any, value: Any) -> Any:
    """Round f32 (or a vector of it) to bfloat16 bits, to nearest even; NaN stays NaN."""
    is_vector = isinstance(value.type, ir.VectorType)
    wide, short = I32, I16
    if is_vector:
        wide, short = (ir.VectorType(kind, value.type.count) for kind in (I32, I16))

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
    kind = types.float32 if is_bf16(pointer) else pointer.dtype

    def codegen(context, builder, signature, args):
        value = builder.load(offset(builder, args[0], args[1]))
        return widen(builder, value) if is_bf16(pointer) else value

    return kind(pointer, types.int64), codegen


@intrinsic
def store(typingctx, pointer, index, value):
    """Set `pointer[index]`; an f32 for a bfloat16 pointer is rounded to nearest even."""
    kind = types.float32 if is_bf16(pointer) else pointer.dtype

    def codegen(context, builder, signature, args):
        stored = narrow(builder, args[2]) if is_bf16(pointer) else args[2]
        builder.store(stored, offset(builder, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, kind), codegen


@intrinsic
def advance(typingctx, pointer, count):
    """Return the pointer to `pointer[count]`."""

    def codegen(context, builder, signature, args):
        return offset(builder, args[0], args[1])

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
        return builder.bitcast(args[0], F32)

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
