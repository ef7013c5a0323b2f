"""Gated MLPs in one parallel kernel: all routed experts of a step, or a dense one.

Tokens are grouped by expert, so each weight comes from memory once for all tokens that chose its
expert. Stages: sort, gather the rows, gate and up with SwiGLU, then down with the weighted sum.
"""

from __future__ import annotations

from numba import njit

from whalepod.kernels.cpu.exponentials import gate_group, store_sums
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    BLOCK_ROWS,
    GROUP,
    block_of_sums,
    multiply_block,
)
from whalepod.kernels.cpu.rows import add_row, combine_rows, copy_row
from whalepod.kernels.cpu.simd import advance, f32_pointer, i64_pointer, load, pointer_like, store
from whalepod.kernels.cpu.thread_pool import ParallelKernel, argument, finish, take, wait_for

ROWS_PER_ITEM = 256
"""Rows of a dense MLP that an item takes at once."""

ROWS_PER_COPY = 32
"""Rows that are gathered at once."""


@njit
def group_by_expert(ids, num_tokens, top_k, num_experts, places, rows, active):
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
def gather_rows(block, stage, rows, num_rows, source, width, target):
    """Copy `num_rows` rows, chosen by number, side by side; all threads, one stage."""
    num_items = -(-num_rows // ROWS_PER_COPY)
    while True:
        item = take(block, stage)
        if item >= num_items:
            break
        first = item * ROWS_PER_COPY
        for place in range(first, min(first + ROWS_PER_COPY, num_rows)):
            row = advance(source, load(rows, place) * width)
            copy_row(row, width, advance(target, place * width))
        finish(block, stage)
    wait_for(block, stage, num_items)


@njit
def _gate_up(x, x_stride, num_rows, w, w_stride, num_groups, hidden, tile_rows, sums, out, stride):
    """Set out[r, i] = silu(gate) * up for the 16 or 32 inner features of a block of groups."""
    for row in range(0, num_rows, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, num_rows - row)
        source = advance(x, row * x_stride)
        multiply_block(source, x_stride, rows, w, w_stride, num_groups, hidden, tile_rows, sums)
        for r in range(rows):
            for pair in range(num_groups // 2):
                place = advance(out, (row + r) * stride + pair * GROUP)
                gate_group(advance(sums, r * BLOCK_COLUMNS + 2 * pair * GROUP), place)


@njit
def _down(x, x_stride, num_rows, w, w_stride, num_groups, inner, tile_rows, sums, count, out, step):
    """Set out[r, c] = the product with `down`, for `count` of its columns."""
    for row in range(0, num_rows, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, num_rows - row)
        source = advance(x, row * x_stride)
        multiply_block(source, x_stride, rows, w, w_stride, num_groups, inner, tile_rows, sums)
        for r in range(rows):
            store_sums(advance(sums, r * BLOCK_COLUMNS), count, advance(out, (row + r) * step))


@njit
def combine_tokens(num_tokens, weights, places, top_k, y, count, block, out_address, hidden, column,
                   is_f32):  # fmt: skip
    """Write `count` columns of every token's weighted sum, in f32 or in the model dtype."""
    for token in range(num_tokens):
        token_weights, token_places = (
            advance(weights, token * top_k),
            advance(places, token * top_k),
        )
        place = token * hidden + column
        if is_f32:
            target = advance(f32_pointer(out_address), place)
            combine_rows(token_weights, token_places, top_k, y, BLOCK_COLUMNS, count, target)
        else:
            target_like = advance(pointer_like(block, out_address), place)
            combine_rows(token_weights, token_places, top_k, y, BLOCK_COLUMNS, count, target_like)


def _experts_kernel(block):
    """Arguments: T, K, E, H, I; gate and up: address, strides of E and of groups, groups; down: the
    same; x, ids, weights, out, tile rows, and scratch: integers [2 T K + 3 E + 4], gathered rows
    [T K, H] (unused for one token), inner [T K, 8 * groups of gate and up], y f32 [T K, 64] for
    each thread; whether out is f32.
    """
    num_tokens, top_k, num_experts = argument(block, 0), argument(block, 1), argument(block, 2)
    hidden, inner = argument(block, 3), argument(block, 4)
    gate_up = pointer_like(block, argument(block, 5))
    gate_up_stride, gate_up_step = argument(block, 6), argument(block, 7)
    gate_up_groups = argument(block, 8)
    down = pointer_like(block, argument(block, 9))
    down_stride, down_step, down_groups = (
        argument(block, 10), argument(block, 11), argument(block, 12),
    )  # fmt: skip
    x, ids = pointer_like(block, argument(block, 13)), i64_pointer(argument(block, 14))
    weights, out_address = f32_pointer(argument(block, 15)), argument(block, 16)
    tile_rows = argument(block, 17)
    places = i64_pointer(argument(block, 18))
    gathered, x_stride = pointer_like(block, argument(block, 19)), hidden
    activations, stride = pointer_like(block, argument(block, 20)), gate_up_groups // 2 * GROUP
    num_pairs = num_tokens * top_k
    rows = advance(places, num_pairs)
    num_active_slot = advance(rows, num_pairs)
    active = advance(num_active_slot, 1)
    sums = block_of_sums()
    y_address = argument(block, 21) + take(block, 4) * num_pairs * BLOCK_COLUMNS * 4

    if take(block, 0) == 0:
        count = group_by_expert(ids, num_tokens, top_k, num_experts, places, rows, active)
        store(num_active_slot, 0, count)
        finish(block, 0)
    wait_for(block, 0, 1)
    num_active = load(num_active_slot, 0)

    if num_tokens == 1:
        gathered, x_stride = x, 0
    else:
        num_sorted = load(active, 2 * num_active + 1)
        gather_rows(block, 1, rows, num_sorted, x, hidden, gathered)

    per_expert = -(-gate_up_groups // BLOCK_GROUPS)
    while True:
        item = take(block, 2)
        if item >= num_active * per_expert:
            break
        which, group = item // per_expert, item % per_expert * BLOCK_GROUPS
        expert, start = load(active, 2 * which), load(active, 2 * which + 1)
        _gate_up(
            advance(gathered, start * x_stride), x_stride, load(active, 2 * which + 3) - start,
            advance(gate_up, expert * gate_up_stride + group * gate_up_step), gate_up_step,
            min(BLOCK_GROUPS, gate_up_groups - group), hidden, tile_rows, sums,
            advance(activations, start * stride + group // 2 * GROUP), stride,
        )  # fmt: skip
        finish(block, 2)
    wait_for(block, 2, num_active * per_expert)

    y = f32_pointer(y_address)
    while True:
        group = take(block, 3) * BLOCK_GROUPS
        if group >= down_groups:
            return
        groups, column = min(BLOCK_GROUPS, down_groups - group), group * GROUP
        for which in range(num_active):
            expert, start = load(active, 2 * which), load(active, 2 * which + 1)
            multiply_block(
                advance(activations, start * stride), stride, load(active, 2 * which + 3) - start,
                advance(down, expert * down_stride + group * down_step), down_step, groups, inner,
                tile_rows, advance(y, start * BLOCK_COLUMNS),
            )  # fmt: skip
        combine_tokens(
            num_tokens, weights, places, top_k, y, min(BLOCK_COLUMNS, hidden - column), block,
            out_address, hidden, column, argument(block, 22) != 0,
        )  # fmt: skip


def _gated_mlp_kernel(block):
    """Arguments: T, H, I; gate and up: address, stride of groups, groups; down: the same; x, out,
    tile rows, scratch: inner [T, 8 * groups of gate and up], and what is added, or 0.
    """
    num_tokens, hidden, inner = argument(block, 0), argument(block, 1), argument(block, 2)
    gate_up, gate_up_step = pointer_like(block, argument(block, 3)), argument(block, 4)
    gate_up_groups = argument(block, 5)
    down, down_step = pointer_like(block, argument(block, 6)), argument(block, 7)
    down_groups = argument(block, 8)
    x, out = pointer_like(block, argument(block, 9)), pointer_like(block, argument(block, 10))
    tile_rows = argument(block, 11)
    activations, stride = pointer_like(block, argument(block, 12)), gate_up_groups // 2 * GROUP
    sums = block_of_sums()
    added_address = argument(block, 13)
    added = pointer_like(block, added_address)
    row_items = -(-num_tokens // ROWS_PER_ITEM)

    per_row_item = -(-gate_up_groups // BLOCK_GROUPS)
    while True:
        item = take(block, 0)
        if item >= row_items * per_row_item:
            break
        row, group = item // per_row_item * ROWS_PER_ITEM, item % per_row_item * BLOCK_GROUPS
        _gate_up(
            advance(x, row * hidden), hidden, min(ROWS_PER_ITEM, num_tokens - row),
            advance(gate_up, group * gate_up_step), gate_up_step,
            min(BLOCK_GROUPS, gate_up_groups - group), hidden, tile_rows, sums,
            advance(activations, row * stride + group // 2 * GROUP), stride,
        )  # fmt: skip
        finish(block, 0)
    wait_for(block, 0, row_items * per_row_item)

    per_row_item = -(-down_groups // BLOCK_GROUPS)
    while True:
        item = take(block, 1)
        if item >= row_items * per_row_item:
            return
        row, group = item // per_row_item * ROWS_PER_ITEM, item % per_row_item * BLOCK_GROUPS
        column, rows = group * GROUP, min(ROWS_PER_ITEM, num_tokens - row)
        count = min(BLOCK_COLUMNS, hidden - column)
        target = advance(out, row * hidden + column)
        _down(
            advance(activations, row * stride), stride, rows, advance(down, group * down_step),
            down_step, min(BLOCK_GROUPS, down_groups - group), inner, tile_rows, sums, count,
            target, hidden,
        )  # fmt: skip
        if added_address != 0:
            for r in range(rows):
                place = row * hidden + column + r * hidden
                add_row(advance(added, place), count, advance(out, place))


EXPERTS = ParallelKernel(_experts_kernel, "23q")
GATED_MLP = ParallelKernel(_gated_mlp_kernel, "14q")
