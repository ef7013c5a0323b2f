"""Attention with keys and values of each head, for chunks of many queries, in AMX tiles.

16 queries of one head share a pass over the keys. Keys and values are first laid side by side per
head, in whole pages: in the step's own layout two rows of a head are kilobytes apart.
"""

from __future__ import annotations

import numpy as np

from whalepod.kernels.cpu.attention_tiles import (
    LANES,
    PAGE_SCORES,
    PAGE_TILE_BYTES,
    STEP,
    attend_pages,
    copy_page,
    pack_queries,
    write_pairs,
)
from whalepod.kernels.cpu.simd import (
    advance,
    f32_pointer,
    i32_pointer,
    i64_pointer,
    load,
    pointer_like,
    store,
)
from whalepod.kernels.cpu.thread_pool import (
    ParallelKernel,
    argument,
    argument_f64,
    finish,
    take,
    wait_for,
)
from whalepod.kernels.cpu.tiles import end_tiles, has_tiles, start_tiles
from whalepod.kernels.interface import BLOCK_TOKENS

PASS_PAGES = 4
"""Pages of keys that 16 queries pass over at once."""

_BLOCK_TOKENS = BLOCK_TOKENS
_HEAD_BYTES = 3 * 4 * LANES + 4 * LANES + 2 * 8 * PASS_PAGES
_TILES = PASS_PAGES * PAGE_TILE_BYTES
_SCORES = 4 * PASS_PAGES * PAGE_SCORES


def scratch_bytes(width: int, value_width: int) -> int:
    """Return the scratch of a thread: weights, scores, queries, o, and small lists."""
    return _TILES + _SCORES + 2 * LANES * width + 4 * LANES * value_width + _HEAD_BYTES


def _expanded_kernel(block):
    """Arguments: T, S, N, D, E, q [T, N, D], k [S, N, D], v [S, N, E], out [T, N, E]; scratch: keys
    [N, pages, 64, D], values [N, pages, 64, E], memory of each thread and its bytes; softmax scale.
    """
    num_queries, num_keys, num_heads = argument(block, 0), argument(block, 1), argument(block, 2)
    width, value_width = argument(block, 3), argument(block, 4)
    q, k = pointer_like(block, argument(block, 5)), pointer_like(block, argument(block, 6))
    v, out = pointer_like(block, argument(block, 7)), pointer_like(block, argument(block, 8))
    keys_address, values_address = argument(block, 9), argument(block, 10)
    tiles = argument(block, 11) + take(block, 2) * argument(block, 12)
    scale = np.float32(argument_f64(block, 13))
    scores, panel_address = f32_pointer(tiles + _TILES), tiles + _TILES + _SCORES
    panel, o_address = pointer_like(block, panel_address), panel_address + 2 * LANES * width
    o, running_address = f32_pointer(o_address), o_address + 4 * LANES * value_width
    running, ends = f32_pointer(running_address), i32_pointer(running_address + 3 * 4 * LANES)
    keys = i64_pointer(running_address + 4 * 4 * LANES)
    values = advance(keys, PASS_PAGES)
    if not has_tiles(q):
        return

    num_pages = -(-num_keys // _BLOCK_TOKENS)
    row, value_row = num_heads * width, num_heads * value_width
    while True:
        item = take(block, 0)
        if item >= num_heads * num_pages:
            break
        head, first = item // num_pages, item % num_pages * _BLOCK_TOKENS
        count, place = min(_BLOCK_TOKENS, num_keys - first), item * _BLOCK_TOKENS
        target = advance(pointer_like(block, keys_address), place * width)
        copy_page(advance(k, first * row + head * width), 0, count, row, width, target)
        target = advance(pointer_like(block, values_address), place * value_width)
        source = advance(v, first * value_row + head * value_width)
        copy_page(source, 0, count, value_row, value_width, target)
        finish(block, 0)
    wait_for(block, 0, num_heads * num_pages)

    per_head = -(-num_queries // LANES)
    while True:
        item = take(block, 1)
        if item >= num_heads * per_head:
            return
        head, query = item // per_head, item % per_head * LANES
        count = min(LANES, num_queries - query)
        pack_queries(advance(q, query * row + head * width), row, count, width // STEP, panel)
        first_end = num_keys - num_queries + query + 1
        last_page = (first_end + count - 2) // _BLOCK_TOKENS
        start_tiles()
        for page in range(0, last_page + 1, PASS_PAGES):
            pages = min(PASS_PAGES, last_page + 1 - page)
            for i in range(pages):
                place = (head * num_pages + page + i) * _BLOCK_TOKENS
                store(keys, i, keys_address + 2 * place * width)
                store(values, i, values_address + 2 * place * value_width)
            for lane in range(LANES):
                end = first_end + min(lane, count - 1) - page * _BLOCK_TOKENS
                store(ends, lane, np.int32(end))
            attend_pages(
                panel, width // STEP, keys, 2 * width, values, 2 * value_width, pages, value_width,
                0, ends, scale, scores, tiles, page == 0, o, running,
            )  # fmt: skip
        end_tiles()
        for lane in range(count):
            target = advance(out, (query + lane) * value_row + head * value_width)
            write_pairs(
                advance(o, lane * value_width), load(running, LANES + lane), value_width, target
            )


PREFILL_ATTENTION = ParallelKernel(_expanded_kernel, "13qd")
