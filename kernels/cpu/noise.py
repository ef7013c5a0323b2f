"""The sampler's noise, -log(-log u), eight tokens at a time, and draws with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from torch import Tensor

from whalepod.kernels.cpu.abi import ParallelKernel, arguments, items, record
from whalepod.kernels.cpu.simd import (
    F32,
    F32_POINTER,
    I32,
    I64,
    advance,
    intrinsic,
    load,
    offset,
    store,
)
from whalepod.kernels.cpu.vectors import fma, load_vector, over_vectors, splat, store_vector
from whalepod.kernels.cpu.workspace import Workspace

TOKENS_PER_ITEM = 4096
"""Vocabulary entries that a thread takes at once."""

_LANES = 8
_F64 = ir.DoubleType()
_DOUBLES, _INTEGERS = ir.VectorType(_F64, _LANES), ir.VectorType(I64, _LANES)
_LN_2_HIGH = float.fromhex("0x1.62E42FEFA3800p-1")
_LN_2_LOW = float.fromhex("0x1.EF35793C76730p-45")
"""ln 2 in two parts, the first with so many zeros at its end that its multiples are exact."""
_NUM_TERMS = 13


def _doubles(value: float) -> Any:
    return ir.Constant(_DOUBLES, [value] * _LANES)


def _integers(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * _LANES)


def _logarithm(builder: Any, x: Any) -> Any:
    """Return ln x of positive normal f64 to about an ulp.

    x = 2^k m with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh(s) with s = (m - 1) / (m + 1):
    s (2 + 2 z / 3 + 2 z^2 / 5 + ...), z = s^2 <= 0.0295.
    """
    bits = builder.bitcast(x, _INTEGERS)
    # bits of sqrt(1/2): the exponent of what is left is k, the rest that of m
    above = builder.sub(bits, _integers(0x3FE6A09E667F3BCD))
    k = builder.ashr(above, _integers(52))
    m = builder.bitcast(builder.sub(bits, builder.shl(k, _integers(52))), _DOUBLES)
    f = builder.fsub(m, _doubles(1.0))
    s = builder.fdiv(f, builder.fadd(_doubles(2.0), f))
    z = builder.fmul(s, s)
    series = _doubles(2.0 / (2 * _NUM_TERMS + 1))
    for n in range(_NUM_TERMS - 1, 0, -1):
        series = fma(builder, series, z, _doubles(2.0 / (2 * n + 1)))
    # 2 s = f - s f, which keeps the last bits of f
    rest = builder.fmul(s, builder.fsub(builder.fmul(z, series), f))
    exponent = builder.sitofp(k, _DOUBLES)
    low = fma(builder, exponent, _doubles(_LN_2_LOW), rest)
    return builder.fadd(builder.fmul(exponent, _doubles(_LN_2_HIGH)), builder.fadd(f, low))


def _scramble(builder: Any, x: Any) -> Any:
    """Return the finaliser of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = builder.xor(x, builder.lshr(x, _integers(shift)))
        x = builder.mul(x, _integers(factor))
    return builder.xor(x, builder.lshr(x, _integers(31)))


@intrinsic
def _fill_noise(typingctx, start, first, count, out):
    """Set out[i] to the noise of token first + i; `start` hashes seed and position."""

    def codegen(context, builder, signature, args):
        start_value, first_token, size, target = args
        lanes = ir.Constant(_INTEGERS, list(range(_LANES)))

        def step(i: Any, mask: Any) -> None:
            tokens = builder.add(splat(builder, builder.add(first_token, i), _LANES), lanes)
            mixed = builder.mul(tokens, _integers(0x165667B19E3779F9))
            mixed = _scramble(builder, builder.add(splat(builder, start_value, _LANES), mixed))
            u = builder.sitofp(builder.lshr(mixed, _integers(12)), _DOUBLES)
            u = builder.fmul(builder.fadd(u, _doubles(0.5)), _doubles(2.0**-52))
            minus_log = builder.fneg(_logarithm(builder, u))
            noise = builder.fneg(_logarithm(builder, minus_log))
            single = builder.fptrunc(noise, ir.VectorType(F32, _LANES))
            store_vector(builder, single, offset(builder, target, i), mask)

        over_vectors(builder, size, _LANES, step)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.int64, F32_POINTER), codegen


@intrinsic
def _argmax(typingctx, x, count):
    """Return the index of the first largest of `count` f32; NaN is never the largest."""

    def codegen(context, builder, signature, args):
        source, size = args
        lanes = 16
        floats, integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        lowest = ir.Constant(floats, [float("-inf")] * lanes)
        best = cgutils.alloca_once_value(builder, lowest)
        where = cgutils.alloca_once_value(builder, ir.Constant(integers, [0] * lanes))
        numbers = ir.Constant(integers, list(range(lanes)))

        def step(i: Any, mask: Any) -> None:
            values = load_vector(builder, offset(builder, source, i), floats, mask)
            if mask is not None:
                values = builder.select(mask, values, lowest)
            at = builder.add(splat(builder, builder.trunc(i, I32), lanes), numbers)
            is_more = builder.fcmp_ordered(">", values, builder.load(best))
            builder.store(builder.select(is_more, values, builder.load(best)), best)
            builder.store(builder.select(is_more, at, builder.load(where)), where)

        over_vectors(builder, size, lanes, step)
        values, places = builder.load(best), builder.load(where)
        value, place = (builder.extract_element(v, I32(0)) for v in (values, places))
        for lane in range(1, lanes):
            other, at = (builder.extract_element(v, I32(lane)) for v in (values, places))
            is_tie = builder.fcmp_ordered("==", other, value)
            is_first = builder.and_(is_tie, builder.icmp_signed("<", at, place))
            is_better = builder.or_(builder.fcmp_ordered(">", other, value), is_first)
            value = builder.select(is_better, other, value)
            place = builder.select(is_better, at, place)
        return builder.sext(place, I64)

    return types.int64(F32_POINTER, types.int64), codegen


_NoiseArguments = record(
    "num_rows num_tokens seeds:i64 positions:i64 out:f32",
)


@njit
def _hash_start(seed, position):
    """Return what the noise of all tokens at a position begins with, as in the reference."""
    start = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    return start + np.uint64(position) * np.uint64(0xC2B2AE3D27D4EB4F)


def _noise_kernel(block):
    a = arguments(block, _NoiseArguments)
    per_row = -(-a.num_tokens // TOKENS_PER_ITEM)
    for item in items(block, 0, a.num_rows * per_row, is_last=True):
        row, first = item // per_row, item % per_row * TOKENS_PER_ITEM
        start = _hash_start(load(a.seeds, row), load(a.positions, row))
        count = min(TOKENS_PER_ITEM, a.num_tokens - first)
        _fill_noise(start, first, count, advance(a.out, row * a.num_tokens + first))


_DrawArguments = record(
    "num_rows num_tokens logits:f32 temperatures:f32 seeds:i64 positions:i64 scratch:f32 out:i64",
)


def _draw_kernel(block):
    a = arguments(block, _DrawArguments)
    for row in items(block, 0, a.num_rows, is_last=True):
        temperature, x = load(a.temperatures, row), advance(a.logits, row * a.num_tokens)
        if temperature > np.float32(0.0):
            noisy = advance(a.scratch, row * a.num_tokens)
            start = _hash_start(load(a.seeds, row), load(a.positions, row))
            _fill_noise(start, 0, a.num_tokens, noisy)
            for i in range(a.num_tokens):
                store(noisy, i, load(x, i) / temperature + load(noisy, i))
            store(a.out, row, _argmax(noisy, a.num_tokens))
        else:
            store(a.out, row, _argmax(x, a.num_tokens))


GUMBEL_NOISE = ParallelKernel(_noise_kernel, _NoiseArguments)
DRAW = ParallelKernel(_draw_kernel, _DrawArguments)


class SamplingOperations:
    """The part of `Kernels` that the sampler and drafts use."""

    def __init__(self, work: Workspace) -> None:
        self._work = work

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        num_rows = seeds_B.shape[0]
        out_BV = self._work.new((num_rows, num_tokens), torch.float32)
        noise = _NoiseArguments(
            num_rows, num_tokens, seeds_B.data_ptr(), positions_B.data_ptr(), out_BV.data_ptr()
        )
        num_items = num_rows * -(-num_tokens // TOKENS_PER_ITEM)
        self._work.run(GUMBEL_NOISE, torch.float32, num_items, noise)
        return out_BV

    def draw(
        self,
        logits_BV: Tensor,
        temperatures_B: Tensor,
        seeds_B: Tensor,
        positions_B: Tensor,
        out_B: Tensor,
    ) -> None:
        num_rows, num_tokens = logits_BV.shape
        draw = _DrawArguments(
            num_rows, num_tokens, logits_BV.data_ptr(), temperatures_B.data_ptr(),
            seeds_B.data_ptr(), positions_B.data_ptr(), self._work.borrow(4 * logits_BV.numel()),
            out_B.data_ptr(),
        )  # fmt: skip
        self._work.run(DRAW, torch.float32, num_rows, draw)
