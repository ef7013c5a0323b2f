"""e^x, and what attention, SwiGLU and the router make of it, a vector at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I32,
    I64,
    intrinsic,
    is_bf16,
    narrow,
    num_lanes,
    offset,
)
from whalepod.kernels.cpu.vectors import call_llvm, load_vector, over_vectors, splat, store_vector

_LANES = 16
_LOG2_E = 1.4426950408889634
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4
_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def _constant(kind: Any, value: float) -> Any:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def exponential(builder: Any, x: Any) -> Any:
    """Return e^x to about 2 ulp; 0 below -87, e^88 above 88; of a float or a vector.

    x = n ln 2 + r with |r| <= ln(2) / 2, and e^r by Taylor's polynomial of degree 7.
    """
    kind = x.type
    is_vector = isinstance(kind, ir.VectorType)
    integers = ir.VectorType(I32, kind.count) if is_vector else I32
    smallest, largest = _constant(kind, -87.0), _constant(kind, 88.0)
    is_tiny = builder.fcmp_ordered("<", x, smallest)
    x = builder.select(is_tiny, smallest, x)
    x = builder.select(builder.fcmp_ordered(">", x, largest), largest, x)
    n = call_llvm(builder, "rint", builder.fmul(x, _constant(kind, _LOG2_E)))
    r = call_llvm(builder, "fma", n, _constant(kind, -_LN_2_HIGH), x)
    r = call_llvm(builder, "fma", n, _constant(kind, -_LN_2_LOW), r)
    p = _constant(kind, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p = call_llvm(builder, "fma", p, r, _constant(kind, coefficient))
    exponent = builder.add(builder.fptosi(n, integers), _constant(integers, 127))
    scale = builder.bitcast(builder.shl(exponent, _constant(integers, 23)), kind)
    return builder.select(is_tiny, _constant(kind, 0.0), builder.fmul(p, scale))


def _silu_times(builder: Any, gate: Any, up: Any) -> Any:
    one = _constant(gate.type, 1.0)
    denominator = builder.fadd(one, exponential(builder, builder.fneg(gate)))
    return builder.fmul(builder.fdiv(gate, denominator), up)


@intrinsic
def exp_f32(typingctx, x):
    """Return e^x of one f32."""

    def codegen(context, builder, signature, args):
        return exponential(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def gate_group(typingctx, sums, out):
    """Set out[i] = silu(sums[i]) * sums[16 + i] for 16 values; `out` bfloat16 or f32."""
    kind = ir.VectorType(F32, _LANES)

    def codegen(context, builder, signature, args):
        gate = load_vector(builder, args[0], kind, None)
        up = load_vector(builder, offset(builder, args[0], I64(_LANES)), kind, None)
        value = _silu_times(builder, gate, up)
        store_vector(builder, narrow(builder, value) if is_bf16(out) else value, args[1], None)
        return context.get_dummy_value()

    return types.void(F32_POINTER, out), codegen


@intrinsic
def store_sums(typingctx, sums, count, out):
    """Set out[i] = sums[i] for i below `count`; up to 64 values are rounded to what `out` holds."""
    kind = ir.VectorType(F32, _LANES)

    def codegen(context, builder, signature, args):
        source, size, target = args

        def move(i: Any, mask: Any) -> None:
            value = load_vector(builder, offset(builder, source, i), kind, None)
            value = narrow(builder, value) if is_bf16(out) else value
            store_vector(builder, value, offset(builder, target, i), mask)

        over_vectors(builder, size, _LANES, move)
        return context.get_dummy_value()

    return types.void(F32_POINTER, types.int64, out), codegen


@intrinsic
def exp_of_scores(typingctx, scores, count, scale, largest, weights):
    """Set scores[i] = e^(scores[i] * scale - largest), and weights[i] to the same, rounded."""
    lanes = num_lanes()
    kind = ir.VectorType(F32, lanes)

    def codegen(context, builder, signature, args):
        score, size, factor, origin, weight = args
        factors, origins = splat(builder, factor, lanes), splat(builder, origin, lanes)

        def step(i: Any, mask: Any) -> None:
            row = offset(builder, score, i)
            x = builder.fmul(load_vector(builder, row, kind, mask), factors)
            value = exponential(builder, builder.fsub(x, origins))
            store_vector(builder, value, row, mask)
            rounded = narrow(builder, value) if is_bf16(weights) else value
            store_vector(builder, rounded, offset(builder, weight, i), mask)

        over_vectors(builder, size, lanes, step)
        return context.get_dummy_value()

    signature = types.void(F32_POINTER, types.int64, types.float32, types.float32, weights)
    return signature, codegen
