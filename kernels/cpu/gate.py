"""The router: scores, group limit, stable top-k and weights of each token, in f32."""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.kernels.cpu.regions import Region, argument, argument_f64, take
from whalepod.kernels.cpu.simd import advance, exp_f32, f32_pointer, i64_pointer, load, store

ROWS_PER_ITEM = 8


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


def _gate_region(block):
    """Arguments: T, E, K, groups, selected groups, is sigmoid, is top2, is normalised, logits,
    bias or 0, ids, weights, scratch of 3 E + 2 groups f32 per token, scaling factor.
    """
    num_tokens, num_experts, top_k = argument(block, 0), argument(block, 1), argument(block, 2)
    num_groups, num_selected = argument(block, 3), argument(block, 4)
    is_sigmoid, is_top2 = argument(block, 5) != 0, argument(block, 6) != 0
    is_normalized = argument(block, 7) != 0
    logits, bias_address = f32_pointer(argument(block, 8)), argument(block, 9)
    bias = f32_pointer(bias_address)
    ids, weights = i64_pointer(argument(block, 10)), f32_pointer(argument(block, 11))
    scratch, factor = f32_pointer(argument(block, 12)), np.float32(argument_f64(block, 13))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            scores = advance(scratch, token * (3 * num_experts + 2 * num_groups))
            choice, taken = advance(scores, num_experts), advance(scores, 2 * num_experts)
            _score(advance(logits, token * num_experts), num_experts, is_sigmoid, scores)
            for e in range(num_experts):
                value = load(scores, e)
                store(choice, e, value + load(bias, e) if bias_address != 0 else value)
                store(taken, e, np.float32(0.0))
            if num_selected < num_groups:
                groups = advance(scores, 3 * num_experts)
                size = num_experts // num_groups
                _mask_groups(choice, num_groups, num_selected, size, is_top2, groups)
            total = np.float32(0.0)
            for k in range(top_k):
                expert = _best(choice, num_experts, taken)
                store(taken, expert, np.float32(1.0))
                store(ids, token * top_k + k, expert)
                total += load(scores, expert)
                store(weights, token * top_k + k, load(scores, expert))
            divisor = total + np.float32(1e-20) if is_normalized else np.float32(1.0)
            for k in range(token * top_k, (token + 1) * top_k):
                store(weights, k, load(weights, k) / divisor * factor)


GATE = Region(_gate_region, "13qd")
