"""The router: scores, group limit, stable top-k and weights of each token, in f32."""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.kernels.cpu.exponentials import exp_f32, store_sums
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    GROUP,
    block_of_sums,
    multiply_block,
)
from whalepod.kernels.cpu.rows import widen_row
from whalepod.kernels.cpu.simd import advance, f32_pointer, i64_pointer, load, pointer_like, store
from whalepod.kernels.cpu.thread_pool import (
    ParallelKernel,
    argument,
    argument_f64,
    finish,
    take,
    wait_for,
)

ROWS_PER_ITEM, ROWS_PER_PRODUCT = 8, 16


@njit
def _score(logits, num_experts, is_sigmoid, scores):
    if is_sigmoid:
        for e in range(num_experts):
            store(scores, e, np.float32(1.0) / (np.float32(1.0) + exp_f32(-load(logits, e))))
        return
    largest = load(logits, 0)
    for e in range(1, num_experts):
        largest = max(largest, load(logits, e))
    total = np.float32(0.0)
    for e in range(num_experts):
        value = exp_f32(load(logits, e) - largest)
        store(scores, e, value)
        total += value
    for e in range(num_experts):
        store(scores, e, load(scores, e) / total)


@njit
def _best(values, count, taken):
    """Return the index of the largest value whose `taken` is 0; the lowest index wins ties."""
    best = -1
    best_value = np.float32(-np.inf)
    for i in range(count):
        value = load(values, i)
        if load(taken, i) == np.float32(0.0) and (best < 0 or value > best_value):
            best, best_value = i, value
    return best


@njit
def _score_groups(choice, num_groups, group_size, is_top2, group_scores):
    for group in range(num_groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(group * group_size, (group + 1) * group_size):
            value = load(choice, e)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        is_sum = is_top2 and group_size > 1
        store(group_scores, group, first + second if is_sum else first)


@njit
def _mask_groups(choice, num_groups, num_selected, group_size, is_top2, scratch):
    """Set the experts outside the best groups to -inf."""
    group_scores, taken = scratch, advance(scratch, num_groups)
    _score_groups(choice, num_groups, group_size, is_top2, group_scores)
    for group in range(num_groups):
        store(taken, group, np.float32(0.0))
    for _ in range(num_selected):
        store(taken, _best(group_scores, num_groups, taken), np.float32(1.0))
    for group in range(num_groups):
        if load(taken, group) == np.float32(0.0):
            for e in range(group * group_size, (group + 1) * group_size):
                store(choice, e, np.float32(-np.inf))


@njit
def _choose(logits, bias_address, scratch, num_experts, top_k, num_groups, num_selected, is_sigmoid,
            is_top2, is_normalized, factor, ids, weights):  # fmt: skip
    """Choose the experts of one token; `scratch` is 3 E + 2 groups f32."""
    bias = f32_pointer(bias_address)
    scores, choice = scratch, advance(scratch, num_experts)
    taken = advance(scratch, 2 * num_experts)
    _score(logits, num_experts, is_sigmoid, scores)
    for e in range(num_experts):
        value = load(scores, e)
        store(choice, e, value + load(bias, e) if bias_address != 0 else value)
        store(taken, e, np.float32(0.0))
    if num_selected < num_groups:
        groups = advance(scratch, 3 * num_experts)
        size = num_experts // num_groups
        _mask_groups(choice, num_groups, num_selected, size, is_top2, groups)
    total = np.float32(0.0)
    for k in range(top_k):
        expert = _best(choice, num_experts, taken)
        store(taken, expert, np.float32(1.0))
        store(ids, k, expert)
        total += load(scores, expert)
        store(weights, k, load(scores, expert))
    divisor = total + np.float32(1e-20) if is_normalized else np.float32(1.0)
    for k in range(top_k):
        store(weights, k, load(weights, k) / divisor * factor)


def _gate_kernel(block):
    """Arguments: T, E, K, groups, selected groups, is sigmoid, is top2, is normalised, logits,
    bias or 0, ids, weights, scratch of 3 E + 2 groups f32 per token; of the router, 0 if there are
    logits already: H, x, f32 weight, stride of its groups, groups of columns, f32 scratch [T, H];
    scaling factor.
    """
    num_tokens, num_experts, top_k = argument(block, 0), argument(block, 1), argument(block, 2)
    num_groups, num_selected = argument(block, 3), argument(block, 4)
    is_sigmoid, is_top2 = argument(block, 5) != 0, argument(block, 6) != 0
    is_normalized, logits = argument(block, 7) != 0, f32_pointer(argument(block, 8))
    ids, weights = i64_pointer(argument(block, 10)), f32_pointer(argument(block, 11))
    scratch, factor = f32_pointer(argument(block, 12)), np.float32(argument_f64(block, 19))
    hidden, x = argument(block, 13), pointer_like(block, argument(block, 14))
    router, group_stride = f32_pointer(argument(block, 15)), argument(block, 16)
    column_groups, wide = argument(block, 17), f32_pointer(argument(block, 18))
    sums = block_of_sums()
    num_items = -(-num_tokens // ROWS_PER_ITEM)
    if hidden > 0:
        while True:
            item = take(block, 0)
            if item >= num_items:
                break
            first = item * ROWS_PER_ITEM
            for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
                widen_row(advance(x, token * hidden), hidden, advance(wide, token * hidden))
            finish(block, 0)
        wait_for(block, 0, num_items)
        column_items = -(-column_groups // BLOCK_GROUPS)
        num_blocks = -(-num_tokens // ROWS_PER_PRODUCT) * column_items
        while True:
            item = take(block, 1)
            if item >= num_blocks:
                break
            row, group = item // column_items * ROWS_PER_PRODUCT, item % column_items * BLOCK_GROUPS
            rows = min(ROWS_PER_PRODUCT, num_tokens - row)
            count = min(BLOCK_COLUMNS, num_experts - group * GROUP)
            multiply_block(
                advance(wide, row * hidden), hidden, rows, advance(router, group * group_stride),
                group_stride, min(BLOCK_GROUPS, column_groups - group), hidden, 0, sums,
            )  # fmt: skip
            for r in range(rows):
                target = advance(logits, (row + r) * num_experts + group * GROUP)
                store_sums(advance(sums, r * BLOCK_COLUMNS), count, target)
            finish(block, 1)
        wait_for(block, 1, num_blocks)
    while True:
        item = take(block, 2)
        if item >= num_items:
            return
        first = item * ROWS_PER_ITEM
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            _choose(
                advance(logits, token * num_experts), argument(block, 9),
                advance(scratch, token * (3 * num_experts + 2 * num_groups)), num_experts, top_k,
                num_groups, num_selected, is_sigmoid, is_top2, is_normalized, factor,
                advance(ids, token * top_k), advance(weights, token * top_k),
            )  # fmt: skip


GATE = ParallelKernel(_gate_kernel, "19qd")
