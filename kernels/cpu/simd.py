"""Typed pointers, bfloat16 and scalar functions for numba, which has none of them.

A pointer to uint16 is bfloat16 everywhere in this folder, a pointer to float32 is f32, a pointer to
uint8 is rows or weights of int8. Pointers to int16 and int8 are the same two for kernels that
multiply in matrix tiles (`amx/`): the type of a pointer chooses the code (`abi.by_operands`).

Code is compiled for numba's target: the host, or `NUMBA_CPU_NAME` with `NUMBA_CPU_FEATURES`. What
takes a `builder` emits LLVM IR while numba compiles; the rest is called in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.registry import cpu_target

intrinsic: Any = extending.intrinsic
"""Untyped: the checker would see the typing context among the arguments of a call."""

BF16_POINTER = types.CPointer(types.uint16)
F32_POINTER = types.CPointer(types.float32)
U8_POINTER = types.CPointer(types.uint8)
TILE_BF16_POINTER = types.CPointer(types.int16)
TILE_U8_POINTER = types.CPointer(types.int8)
EXACT_POINTERS = (F32_POINTER, BF16_POINTER, TILE_BF16_POINTER)
I64_POINTER = types.CPointer(types.int64)
I32_POINTER = types.CPointer(types.int32)

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


class _BFloatType(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite lacks; for operands of AVX512-BF16 instructions."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        return repr(value)


_BFloatType._create_instance()
BFLOAT = _BFloatType()


def target_has(feature: str) -> bool:
    """Return whether numba compiles for a CPU with this LLVM feature, e.g. "avx512bf16"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def num_lanes() -> int:
    """Return the f32 values of one vector register."""
    return 16 if target_has("avx512f") else 8


def is_bf16(pointer: types.Type) -> bool:
    """Return whether what a pointer points to is bfloat16."""
    return pointer in (BF16_POINTER, TILE_BF16_POINTER)


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
    """Round f32 (or a vector of it) to bfloat16 bits, to nearest even; NaN stays NaN.

    16 values are one AVX512-BF16 instruction, which takes subnormal numbers for 0.
    """
    is_vector = isinstance(value.type, ir.VectorType)
    if is_vector and value.type.count == 16 and target_has("avx512bf16"):
        return _narrow_natively(builder, value)
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


def _narrow_natively(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(ir.VectorType(BFLOAT, 16), [value.type])
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.bitcast(builder.call(function, [value]), ir.VectorType(I16, 16))


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
def address_of(typingctx, pointer):
    """Return the address that a pointer holds."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(pointer), codegen


@intrinsic
def keep_apart(typingctx):
    """Forbid that LLVM copies the calling function into its callers: compile time would explode."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


def call_c(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emit a call of a function of the C library, or of an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, list(arguments))


@intrinsic
def relax(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        if str(builder.module.triple).startswith(("x86_64", "i686")):
            call_c(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def give_way(typingctx):
    """Let another thread have the core."""

    def codegen(context, builder, signature, args):
        call_c(builder, "sched_yield", I32)
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
