"""The kernels of a model whose weights are int8: linear layers, gated MLPs and experts."""

from __future__ import annotations

from numba import njit

from whalepod.kernels.cpu.experts import combine_tokens, gather_rows, group_by_expert
from whalepod.kernels.cpu.exponentials import gate_group, store_sums
from whalepod.kernels.cpu.int8 import BLOCK, BLOCK_ROWS, STEP, quantize_blocks
from whalepod.kernels.cpu.int8_tiles import multiply_bytes
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    GROUP,
    block_of_sums,
)
from whalepod.kernels.cpu.rows import add_row
from whalepod.kernels.cpu.simd import (
    advance,
    f32_pointer,
    i64_pointer,
    load,
    pointer_like,
    store,
    u8_pointer,
)
from whalepod.kernels.cpu.thread_pool import ParallelKernel, argument, finish, take, wait_for

ROWS_PER_ITEM = 8
"""Rows that are quantised at once."""

ROW_BLOCK = 256
"""Rows that an item multiplies."""


def _linear_kernel(block):
    """out[T, L, N] = x[T, L, K] w[L, N, K], in the model dtype or f32.

    Arguments: L, T, N, K, groups, groups per item, x, its strides of T and L, w, its strides of L
    and of groups, out, its strides of T and L, whether out is f32, records of rows [L, T] and the
    bytes of one, tile rows.
    """
    num_heads, num_rows, num_columns = argument(block, 0), argument(block, 1), argument(block, 2)
    length, num_groups, groups_per_item = argument(block, 3), argument(block, 4), argument(block, 5)
    x, row_stride = pointer_like(block, argument(block, 6)), argument(block, 7)
    head_stride, w = argument(block, 8), u8_pointer(argument(block, 9))
    weight_stride, group_stride = argument(block, 10), argument(block, 11)
    out_address, out_row_stride = argument(block, 12), argument(block, 13)
    out_head_stride, is_f32 = argument(block, 14), argument(block, 15) != 0
    records, record_stride = u8_pointer(argument(block, 16)), argument(block, 17)
    tile_rows = argument(block, 18)
    padded = -(-length // STEP) * STEP
    num_items = -(-num_heads * num_rows // ROWS_PER_ITEM)
    while True:
        item = take(block, 0)
        if item >= num_items:
            break
        first = item * ROWS_PER_ITEM
        for place in range(first, min(first + ROWS_PER_ITEM, num_heads * num_rows)):
            row = advance(x, place % num_rows * row_stride + place // num_rows * head_stride)
            record = advance(records, place * record_stride)
            quantize_blocks(row, length, 0, padded // BLOCK, padded, record)
        finish(block, 0)
    wait_for(block, 0, num_items)

    sums = block_of_sums()
    column_items = -(-num_groups // groups_per_item)
    row_items = -(-num_rows // ROW_BLOCK)
    num_items = num_heads * row_items * column_items
    while True:
        item = take(block, 1)
        if item >= num_items:
            return
        head, rest = item // (row_items * column_items), item % (row_items * column_items)
        first_row, first = rest // column_items * ROW_BLOCK, rest % column_items * groups_per_item
        for group in range(first, min(first + groups_per_item, num_groups), BLOCK_GROUPS):
            panel = advance(w, head * weight_stride + group * group_stride)
            groups, column = min(BLOCK_GROUPS, num_groups - group), group * GROUP
            count = min(BLOCK_COLUMNS, num_columns - column)
            for row in range(first_row, min(first_row + ROW_BLOCK, num_rows), BLOCK_ROWS):
                rows = min(BLOCK_ROWS, num_rows - row)
                place = (head * num_rows + row) * record_stride
                multiply_bytes(
                    advance(records, place), record_stride, rows, panel, group_stride, groups,
                    padded, tile_rows, sums,
                )  # fmt: skip
                for r in range(rows):
                    place, source = (row + r) * out_row_stride, advance(sums, r * BLOCK_COLUMNS)
                    place += head * out_head_stride + column
                    if is_f32:
                        store_sums(source, count, advance(f32_pointer(out_address), place))
                    else:
                        out = pointer_like(block, out_address)
                        store_sums(source, count, advance(out, place))


@njit
def _everything(num_tokens, places, rows, active):
    """Write the lists of `group_by_expert` for one MLP that every token goes through."""
    for token in range(num_tokens):
        store(places, token, token)
        store(rows, token, token)
    store(active, 0, 0)
    store(active, 1, 0)
    store(active, 3, num_tokens)
    return 1


@njit
def _gate_up(records, stride, num_rows, w, w_stride, num_groups, padded, tile_rows, sums, gated,
             inner_block, inner_padded, out, out_stride):  # fmt: skip
    """Quantise silu(gate) * up of 32 inner features of some rows."""
    for row in range(0, num_rows, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, num_rows - row)
        source = advance(records, row * stride)
        multiply_bytes(source, stride, rows, w, w_stride, num_groups, padded, tile_rows, sums)
        for r in range(rows):
            source, pairs = advance(sums, r * BLOCK_COLUMNS), num_groups // 2
            for pair in range(pairs):
                gate_group(advance(source, 2 * pair * GROUP), advance(gated, pair * GROUP))
            quantize_blocks(
                gated, pairs * GROUP, inner_block, 1, inner_padded,
                advance(out, (row + r) * out_stride),
            )  # fmt: skip


def _experts_kernel(block):
    """Arguments: T, K, E, H, I; gate and up: address, strides of E and of groups, groups; down: the
    same; x, ids (0: one MLP for all), weights, out, what is added (0: nothing), and scratch:
    integers [2 T K + 3 E + 4], records [T] and the bytes of one, records of sorted pairs [T K]
    (unused for one token or one MLP), records [T K] of the inner features and the bytes of one, y
    f32 [T K, 64] for each thread; whether out is f32 (experts), tile rows.
    """
    num_tokens, top_k, num_experts = argument(block, 0), argument(block, 1), argument(block, 2)
    hidden, inner = argument(block, 3), argument(block, 4)
    gate_up, gate_up_stride = u8_pointer(argument(block, 5)), argument(block, 6)
    gate_up_step, gate_up_groups = argument(block, 7), argument(block, 8)
    down, down_stride = u8_pointer(argument(block, 9)), argument(block, 10)
    down_step, down_groups = argument(block, 11), argument(block, 12)
    x, ids_address = pointer_like(block, argument(block, 13)), argument(block, 14)
    weights, out_address = f32_pointer(argument(block, 15)), argument(block, 16)
    added_address, places = argument(block, 17), i64_pointer(argument(block, 18))
    records, record_stride = u8_pointer(argument(block, 19)), argument(block, 20)
    sorted_address, inners, inner_stride = (
        argument(block, 21), u8_pointer(argument(block, 22)), argument(block, 23),
    )  # fmt: skip
    num_pairs, tile_rows = num_tokens * top_k, argument(block, 26)
    y = f32_pointer(argument(block, 24) + take(block, 5) * num_pairs * BLOCK_COLUMNS * 4)
    rows = advance(places, num_pairs)
    num_active_slot = advance(rows, num_pairs)
    active = advance(num_active_slot, 1)
    padded, inner_padded = -(-hidden // STEP) * STEP, -(-inner // STEP) * STEP
    sums, gated = block_of_sums(), block_of_sums()

    num_items = 1 + -(-num_tokens // ROWS_PER_ITEM)
    while True:
        item = take(block, 0)
        if item >= num_items:
            break
        if item == 0:
            if ids_address == 0:
                count = _everything(num_tokens, places, rows, active)
            else:
                ids = i64_pointer(ids_address)
                count = group_by_expert(ids, num_tokens, top_k, num_experts, places, rows, active)
            store(num_active_slot, 0, count)
        else:
            first = (item - 1) * ROWS_PER_ITEM
            for token in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
                row, record = advance(x, token * hidden), advance(records, token * record_stride)
                quantize_blocks(row, hidden, 0, padded // BLOCK, padded, record)
        finish(block, 0)
    wait_for(block, 0, num_items)
    num_active = load(num_active_slot, 0)

    stride = record_stride
    if num_tokens == 1:
        stride = 0
    elif ids_address != 0:
        num_sorted, source = load(active, 2 * num_active + 1), f32_pointer(argument(block, 19))
        gather_rows(block, 1, rows, num_sorted, source, stride // 4, f32_pointer(sorted_address))
        records = u8_pointer(sorted_address)

    # 32 inner features are one scale; a step of 64 may end with a block of zeros
    per_expert = inner_padded // BLOCK
    while True:
        item = take(block, 2)
        if item >= num_active * per_expert:
            break
        which, group = item // per_expert, item % per_expert * BLOCK_GROUPS
        expert, start = load(active, 2 * which), load(active, 2 * which + 1)
        _gate_up(
            advance(records, start * stride), stride, load(active, 2 * which + 3) - start,
            advance(gate_up, expert * gate_up_stride + group * gate_up_step), gate_up_step,
            max(0, min(BLOCK_GROUPS, gate_up_groups - group)), padded, tile_rows, sums, gated,
            item % per_expert, inner_padded, advance(inners, start * inner_stride), inner_stride,
        )  # fmt: skip
        finish(block, 2)
    wait_for(block, 2, num_active * per_expert)

    while True:
        group = take(block, 3) * BLOCK_GROUPS
        if group >= down_groups:
            return
        groups, column = min(BLOCK_GROUPS, down_groups - group), group * GROUP
        for which in range(num_active):
            expert, start = load(active, 2 * which), load(active, 2 * which + 1)
            end = load(active, 2 * which + 3)
            panel = advance(down, expert * down_stride + group * down_step)
            for row in range(start, end, BLOCK_ROWS):
                multiply_bytes(
                    advance(inners, row * inner_stride), inner_stride, min(BLOCK_ROWS, end - row),
                    panel, down_step, groups, inner_padded, tile_rows,
                    advance(y, row * BLOCK_COLUMNS),
                )  # fmt: skip
        count = min(BLOCK_COLUMNS, hidden - column)
        if ids_address != 0:
            combine_tokens(
                num_tokens, weights, places, top_k, y, count, block, out_address, hidden, column,
                argument(block, 25) != 0,
            )  # fmt: skip
            continue
        out = pointer_like(block, out_address)
        for token in range(num_tokens):
            target = advance(out, token * hidden + column)
            store_sums(advance(y, token * BLOCK_COLUMNS), count, target)
            if added_address != 0:
                added = pointer_like(block, added_address)
                add_row(advance(added, token * hidden + column), count, target)


LINEAR_INT8 = ParallelKernel(_linear_kernel, "19q")
EXPERTS_INT8 = ParallelKernel(_experts_kernel, "27q")
