"""Raw memory for compiled code: arrays at addresses, copies, and rows of f32 or bf16.

A heap is one mapping per rank, so kernels take addresses; their callers have checked sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from whalepod.kernels.cpu.simd import (
    BF16_POINTER,
    f32_pointer,
    intrinsic,
    load,
    store,
)

_I32 = ir.IntType(32)

F32, BF16, BYTES = 0, 1, 2
"""Kinds of rows; rows of bytes are only copied."""
_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float8_e4m3fn: BYTES}


def kind_of(dtype: torch.dtype) -> int:
    """Return what compiled code calls rows of a dtype. ValueError for unknown ones."""
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"rows of {dtype}: convert them to float32 or bfloat16")
    return kind


@intrinsic
def pointer(typingctx, address):
    """Return an address as a pointer to anything."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def bf16_pointer(typingctx, address):
    """Return an address as a pointer to bfloat16."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(16).as_pointer())

    return BF16_POINTER(types.int64), codegen


@intrinsic
def copy_bytes(typingctx, target, source, num_bytes):
    """Copy memory that does not overlap, as `memcpy` does."""

    def codegen(context, builder, signature, args):
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _word(builder, address):
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def load_acquire(typingctx, address):
    """Return a 64-bit word; later loads see what was stored before it was set."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Set a 64-bit word after all stores before it: who sees it sees them, too."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fence_acquire(typingctx):
    """Keep later loads behind all earlier ones, which an acquiring load does not: on x86-64 only
    the compiler must be told, ARM has an instruction for it."""

    def codegen(context, builder, signature, args):
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def i64_at(address, count):
    return carray(pointer(address), count, np.int64)


@njit
def i32_at(address, count):
    return carray(pointer(address), count, np.int32)


@njit
def u8_at(address, count):
    return carray(pointer(address), count, np.uint8)


@njit
def f32_at(address, count):
    return carray(pointer(address), count, np.float32)


@njit
def f64_at(address, count):
    return carray(pointer(address), count, np.float64)


@njit
def row_bytes(kind, length):
    if kind == BYTES:
        return length
    return length * (2 if kind == BF16 else 4)


@njit
def _copy_values(target, source, length):
    for i in range(length):
        store(target, i, load(source, i))


@njit
def copy_row(target, target_kind, source, source_kind, length):
    """Copy a row and convert it."""
    if target_kind == source_kind:
        copy_bytes(target, source, row_bytes(source_kind, length))
    elif source_kind == BF16:
        _copy_values(f32_pointer(target), bf16_pointer(source), length)
    else:
        _copy_values(bf16_pointer(target), f32_pointer(source), length)


@njit
def _add_scaled(sums, row, weight, length):
    for i in range(length):
        store(sums, i, load(sums, i) + load(row, i) * weight)


@njit
def add_scaled_row(sums, row, kind, weight, length):
    """Add weight * row to f32 sums: a product, then a sum, each rounded."""
    if kind == BF16:
        _add_scaled(f32_pointer(sums), bf16_pointer(row), weight, length)
    else:
        _add_scaled(f32_pointer(sums), f32_pointer(row), weight, length)


@intrinsic
def bits_to_f32(typingctx, bits):
    """Reinterpret an int32 as f32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def to_e4m3(typingctx, value):
    """Round f32 to the byte of e4m3, to nearest even; what is too large, or NaN, becomes NaN.

    Below 2**-6 the steps are 2**-9: adding 2**14 (whose last bit is 2**-9) rounds to them. Above,
    the bias of the exponent changes from 127 to 7, and 20 bits of the mantissa are rounded away.
    """

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        sign = builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80))
        size = builder.and_(bits, _I32(0x7FFFFFFF))
        shifted = builder.fadd(
            builder.bitcast(size, ir.FloatType()), ir.Constant(ir.FloatType(), 16384.0)
        )
        small = builder.sub(builder.bitcast(shifted, _I32), _I32(0x46800000))
        odd = builder.and_(builder.lshr(size, _I32(20)), _I32(1))
        rounded = builder.add(builder.add(size, _I32(0xC407FFFF)), odd)
        is_small = builder.icmp_unsigned("<", size, _I32(0x3C800000))  # 2**-6
        code = builder.select(is_small, small, builder.lshr(rounded, _I32(20)))
        is_large = builder.icmp_unsigned(">=", size, _I32(0x43F00000))  # 480, NaN too
        code = builder.select(is_large, _I32(0x7F), code)
        return builder.trunc(builder.or_(code, sign), ir.IntType(8))

    return types.uint8(types.float32), codegen
