"""Embedding, norms, rotary embedding and the cache write, a row at a time."""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.kernels.cpu.products import row_dot
from whalepod.kernels.cpu.rows import copy_row
from whalepod.kernels.cpu.simd import (
    advance,
    f32_pointer,
    i64_pointer,
    load,
    pointer_like,
    store,
)
from whalepod.kernels.cpu.thread_pool import ParallelKernel, argument, argument_f64, take

ROWS_PER_ITEM = 8
"""Rows that a thread takes at once."""


@njit
def _normalize(x, weight, length, eps, out):
    mean = row_dot(x, x, length) / np.float32(length)
    scale = np.float32(1.0) / np.sqrt(mean + eps)
    for i in range(length):
        store(out, i, load(x, i) * scale * load(weight, i))


def _rms_norm_kernel(block):
    """Arguments: T, H, x, its row stride, weight, out, eps."""
    num_rows, length = argument(block, 0), argument(block, 1)
    x, stride = pointer_like(block, argument(block, 2)), argument(block, 3)
    weight, out = pointer_like(block, argument(block, 4)), pointer_like(block, argument(block, 5))
    eps = np.float32(argument_f64(block, 6))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_PER_ITEM, num_rows)):
            _normalize(advance(x, row * stride), weight, length, eps, advance(out, row * length))


def _add_rms_norm_kernel(block):
    """Arguments: T, H, x, residual, weight, out, out residual, eps; rows are contiguous."""
    num_rows, length = argument(block, 0), argument(block, 1)
    x, residual = pointer_like(block, argument(block, 2)), pointer_like(block, argument(block, 3))
    weight = pointer_like(block, argument(block, 4))
    out, total = pointer_like(block, argument(block, 5)), pointer_like(block, argument(block, 6))
    eps = np.float32(argument_f64(block, 7))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_PER_ITEM, num_rows)):
            start = row * length
            sums = advance(total, start)
            for i in range(length):
                store(sums, i, load(x, start + i) + load(residual, start + i))
            _normalize(sums, weight, length, eps, advance(out, start))


@njit
def _rotate(x, angles, num_pairs, out):
    for i in range(num_pairs):
        even, odd = load(x, 2 * i), load(x, 2 * i + 1)
        cos, sin = load(angles, i), load(angles, num_pairs + i)
        store(out, 2 * i, even * cos - odd * sin)
        store(out, 2 * i + 1, odd * cos + even * sin)


def _embed_kernel(block):
    """Arguments: T, H, ids, embedding, out."""
    num_tokens, length = argument(block, 0), argument(block, 1)
    ids, table = i64_pointer(argument(block, 2)), pointer_like(block, argument(block, 3))
    out = pointer_like(block, argument(block, 4))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            row = advance(table, load(ids, token) * length)
            copy_row(row, length, advance(out, token * length))


def _rope_kernel(block):
    """Arguments: T, N, D, x, its strides of T and N, positions, cos_sin, out and its strides."""
    num_tokens, num_heads, width = argument(block, 0), argument(block, 1), argument(block, 2)
    x = pointer_like(block, argument(block, 3))
    token_stride, head_stride = argument(block, 4), argument(block, 5)
    positions, angles = i64_pointer(argument(block, 6)), f32_pointer(argument(block, 7))
    out = pointer_like(block, argument(block, 8))
    out_token_stride, out_head_stride = argument(block, 9), argument(block, 10)
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            row = advance(angles, load(positions, token) * width)
            for head in range(num_heads):
                source = advance(x, token * token_stride + head * head_stride)
                target = advance(out, token * out_token_stride + head * out_head_stride)
                _rotate(source, row, width // 2, target)


def _write_latent_kernel(block):
    """Arguments: T, R, D, kv, its row stride, weight, positions, cos_sin, slots, cache, eps."""
    num_tokens, rank, width = argument(block, 0), argument(block, 1), argument(block, 2)
    kv, stride = pointer_like(block, argument(block, 3)), argument(block, 4)
    weight, positions = pointer_like(block, argument(block, 5)), i64_pointer(argument(block, 6))
    angles, slots = f32_pointer(argument(block, 7)), i64_pointer(argument(block, 8))
    cache, eps = pointer_like(block, argument(block, 9)), np.float32(argument_f64(block, 10))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            source = advance(kv, token * stride)
            target = advance(cache, load(slots, token) * (rank + width))
            _normalize(source, weight, rank, eps, target)
            row = advance(angles, load(positions, token) * width)
            _rotate(advance(source, rank), row, width // 2, advance(target, rank))


RMS_NORM = ParallelKernel(_rms_norm_kernel, "6qd")
ADD_RMS_NORM = ParallelKernel(_add_rms_norm_kernel, "7qd")
EMBED = ParallelKernel(_embed_kernel, "5q")
ROPE = ParallelKernel(_rope_kernel, "11q")
WRITE_LATENT = ParallelKernel(_write_latent_kernel, "10qd")
