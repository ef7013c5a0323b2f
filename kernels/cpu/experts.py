"""All routed experts of a step in one parallel region.

Tokens are grouped by expert, so each weight row is read once for all tokens that chose its expert.
Two stages, one wait between them: gate, up and SwiGLU; then down and the weighted sum.

64 experts of 256 x 1024, top-8, bf16, one core (shared, CPU time, November 2026), before the
weights were prefetched; ms:

tokens                          1      4     16     64    128    256
one region                    1.4    5.0     15     29     43     65
one oneDNN GEMM per expert    5.3     11     31     43     40     52
"""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.kernels.cpu.dense import dot_rows
from whalepod.kernels.cpu.elementwise import ROWS_PER_ITEM, gated
from whalepod.kernels.cpu.regions import Region, argument, finish, take, wait_for
from whalepod.kernels.cpu.simd import advance, f32_pointer, i64_pointer, load, pointer_like, store

INNER_PER_ITEM = 64
"""Inner features (rows of gate and of up) of an item of the first stage."""

HIDDEN_PER_ITEM = 32
"""Hidden features of an item of the second stage."""


@njit
def _group_by_expert(ids, num_tokens, top_k, num_experts, places, rows, active):
    """Sort the (token, k) pairs by expert; return how many experts have any.

    places  [T, K]       of each pair, its index in the sorted list, or -1
    rows    [T * K]      the token of each sorted pair
    active  [2 E + 2]    (expert, first sorted pair) of each active expert, then an end mark
    """
    num_pairs = num_tokens * top_k
    counts = advance(active, 2 * num_experts + 2)
    for e in range(num_experts):
        store(counts, e, 0)
    for pair in range(num_pairs):
        expert = load(ids, pair)
        if expert >= 0:
            store(counts, expert, load(counts, expert) + 1)
    num_active, start = 0, 0
    for e in range(num_experts):
        count = load(counts, e)
        if count > 0:
            store(active, 2 * num_active, e)
            store(active, 2 * num_active + 1, start)
            num_active += 1
        store(counts, e, start)
        start += count
    store(active, 2 * num_active + 1, start)
    for pair in range(num_pairs):
        expert = load(ids, pair)
        store(places, pair, -1)
        if expert >= 0:
            place = load(counts, expert)
            store(counts, expert, place + 1)
            store(places, pair, place)
            store(rows, place, pair // top_k)
    return num_active


@njit
def _add_in_order(weights, places, top_k, y, hidden, first, count, out):
    """Set out[h] = sum_k weights[k] y[places[k], h] for some h, in the order of k."""
    for h in range(first, first + count):
        total = np.float32(0.0)
        for k in range(top_k):
            place = load(places, k)
            if place >= 0:
                total += load(weights, k) * load(y, place * hidden + h)
        store(out, h, total)


def _experts_region(block):
    """Arguments: T, K, E, H, I, x, ids, weights, gate_up, down, out, and scratch: integers
    [2 T K + 3 E + 4], gate and up f32 [T K, 2 I], inner [T K, I], y f32 [T K, H].
    """
    num_tokens, top_k, num_experts = argument(block, 0), argument(block, 1), argument(block, 2)
    hidden, inner = argument(block, 3), argument(block, 4)
    x, ids = pointer_like(block, argument(block, 5)), i64_pointer(argument(block, 6))
    weights = f32_pointer(argument(block, 7))
    gate_up = pointer_like(block, argument(block, 8))
    down = pointer_like(block, argument(block, 9))
    out = pointer_like(block, argument(block, 10))
    places = i64_pointer(argument(block, 11))
    products = f32_pointer(argument(block, 12))
    activations = pointer_like(block, argument(block, 13))
    y = f32_pointer(argument(block, 14))
    rows = advance(places, num_tokens * top_k)
    num_active_slot = advance(rows, num_tokens * top_k)
    active = advance(num_active_slot, 1)

    if take(block, 0) == 0:
        count = _group_by_expert(ids, num_tokens, top_k, num_experts, places, rows, active)
        store(num_active_slot, 0, count)
        finish(block, 0)
    wait_for(block, 0, 1)
    num_active = load(num_active_slot, 0)

    per_expert = -(-inner // INNER_PER_ITEM)
    while True:
        item = take(block, 1)
        if item >= num_active * per_expert:
            break
        which, first = item // per_expert, item % per_expert * INNER_PER_ITEM
        expert, start = load(active, 2 * which), load(active, 2 * which + 1)
        num_rows = load(active, 2 * which + 3) - start
        count = min(INNER_PER_ITEM, inner - first)
        gate = advance(gate_up, (expert * 2 * inner + first) * hidden)
        up = advance(gate, inner * hidden)
        target = advance(products, start * 2 * inner + first)
        row_ids, stride = advance(rows, start), 2 * inner
        dot_rows(x, row_ids, hidden, num_rows, gate, hidden, count, hidden, target, stride)
        dot_rows(
            x, row_ids, hidden, num_rows, up, hidden, count, hidden, advance(target, inner), stride
        )
        for r in range(num_rows):
            pair, goal = advance(target, r * stride), advance(activations, (start + r) * inner)
            for i in range(count):
                store(goal, first + i, gated(load(pair, i), load(pair, inner + i)))
        finish(block, 1)
    wait_for(block, 1, num_active * per_expert)

    while True:
        first = take(block, 2) * HIDDEN_PER_ITEM
        if first >= hidden:
            return
        count = min(HIDDEN_PER_ITEM, hidden - first)
        for which in range(num_active):
            expert, start = load(active, 2 * which), load(active, 2 * which + 1)
            num_rows = load(active, 2 * which + 3) - start
            dot_rows(
                advance(activations, start * inner), None, inner, num_rows,
                advance(down, (expert * hidden + first) * inner), inner, count, inner,
                advance(y, start * hidden + first), hidden,
            )  # fmt: skip
        for token in range(num_tokens):
            _add_in_order(
                advance(weights, token * top_k), advance(places, token * top_k), top_k, y, hidden,
                first, count, advance(out, token * hidden),
            )  # fmt: skip


def _combine_region(block):
    """out[t] = sum_k weights[t, k] y[places[t, k]]. Arguments: T, K, H, weights, places, y, out."""
    num_tokens, top_k, hidden = argument(block, 0), argument(block, 1), argument(block, 2)
    weights, places = f32_pointer(argument(block, 3)), i64_pointer(argument(block, 4))
    y, out = pointer_like(block, argument(block, 5)), pointer_like(block, argument(block, 6))
    while True:
        first = take(block, 0) * ROWS_PER_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
            _add_in_order(
                advance(weights, token * top_k), advance(places, token * top_k), top_k, y, hidden,
                0, hidden, advance(out, token * hidden),
            )  # fmt: skip


EXPERTS = Region(_experts_region, "15q")
COMBINE = Region(_combine_region, "7q")
