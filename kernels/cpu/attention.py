"""Absorbed attention over the paged latent cache, split over the keys.

A chunk of 512 keys is scored, normalised to its own maximum and mixed; chunks are merged in order
by their log-sum-exp. Chunks start at multiples of 512 whatever the batch, and merging is the same
whether one thread walks all chunks or many compute them apart: the bits depend on the row alone.

With AMX a chunk is walked page by page in tiles (`attention_tiles.py`), whatever the batch is: rows
do not see each other there either.

16 heads of 512 + 64, bf16, one query, one core (shared, CPU time, November 2026), us a layer:

keys          64    512   1024   8192
vectors        -      -      -   5037
tiles         12     29     52   1030

At 8,192 keys the rows alone take 690 to 750 us to read.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.kernels.cpu.attention_tiles import (
    COLUMN_BLOCK,
    LANES,
    PAGE_SCORES,
    PAGE_TILE_BYTES,
    STEP,
    attend_pages,
    copy_page,
    pack_queries,
    write_pairs,
)
from whalepod.kernels.cpu.exponentials import exp_f32, exp_of_scores
from whalepod.kernels.cpu.rows import dot_rows, mix_rows
from whalepod.kernels.cpu.simd import (
    address_of,
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
from whalepod.kernels.cpu.vectors import row_max, row_sum
from whalepod.kernels.interface import BLOCK_TOKENS

CHUNK_TOKENS = 512
"""Keys of one item; a multiple of the block."""

MAX_HEADS_PER_ITEM = 16
"""The most heads that share one pass over the keys."""

_BLOCK_TOKENS = BLOCK_TOKENS

PASS_PAGES = 1
"""Pages that are scored, exponentiated and mixed together: they stay in the second-level cache."""

_TILE_HEAD_BYTES = 5 * 4 * LANES
_TILE_SCORES = _TILE_HEAD_BYTES + PASS_PAGES * PAGE_TILE_BYTES
_TILE_SPARE = _TILE_SCORES + PASS_PAGES * 4 * PAGE_SCORES


def fits_tiles(width: int, rank: int) -> bool:
    """Return whether rows of `width` values, `rank` of them the values, can be read as tiles."""
    return width % STEP == 0 and rank % COLUMN_BLOCK == 0


def tile_scratch_bytes(width: int) -> int:
    """Return the scratch of a thread that attends in tiles, but for o and stats.

    Packed queries; running results, pages and ends; weights and scores; copies of pages.
    """
    return 2 * LANES * width + _TILE_SPARE + PASS_PAGES * 2 * BLOCK_TOKENS * width


@njit
def _count_keys(token, query_start, context_lens, num_requests):
    """Return the request of a token and how many keys it sees."""
    for b in range(num_requests):
        start, end = np.int64(load(query_start, b)), np.int64(load(query_start, b + 1))
        if start <= token < end:
            return b, np.int64(load(context_lens, b)) - (end - 1 - token)
    return 0, 0


@njit
def _run_of_rows(cache, width, table, position, most):
    """Return where the row of a position lies, and how many (at most `most`) follow each other."""
    offset = position % _BLOCK_TOKENS
    page = np.int64(load(table, position // _BLOCK_TOKENS)) * _BLOCK_TOKENS
    return advance(cache, (page + offset) * width), min(_BLOCK_TOKENS - offset, most)


@njit
def _attend_chunk(
    q,
    head_stride,
    num_heads,
    cache,
    width,
    rank,
    table,
    first,
    num_keys,
    scale,
    scores,
    p,
    o,
    stats,
):
    """Attend to keys first .. first + num_keys; o [heads, R] unnormalised, stats [heads, 2].

    stats holds the maximum and the sum of exponentials of each head.
    """
    done = 0
    while done < num_keys:
        rows, count = _run_of_rows(cache, width, table, first + done, num_keys - done)
        target = advance(scores, done)
        dot_rows(q, None, head_stride, num_heads, rows, width, count, width, target, CHUNK_TOKENS)
        done += count
    for head in range(num_heads):
        row, weights = advance(scores, head * CHUNK_TOKENS), advance(p, head * CHUNK_TOKENS)
        largest = row_max(row, num_keys) * scale
        exp_of_scores(row, num_keys, scale, largest, weights)
        store(stats, 2 * head, largest)
        store(stats, 2 * head + 1, row_sum(row, num_keys))
    done = 0
    while done < num_keys:
        rows, count = _run_of_rows(cache, width, table, first + done, num_keys - done)
        weights = advance(p, done)
        mix_rows(weights, CHUNK_TOKENS, num_heads, rows, width, count, rank, o, rank, done > 0)
        done += count


@njit
def _attend_by_tiles(
    panel, cache, width, rank, table, first, end, scale, own_address, o, stats, block
):  # fmt: skip
    """Attend to keys first .. end of one chunk, see `_attend_chunk`; o is in the order of pairs.

    The scratch at `own_address` is that of `tile_scratch_bytes`, without the panel.
    """
    running, pages = f32_pointer(own_address), i64_pointer(own_address + 3 * 4 * LANES)
    ends = i32_pointer(own_address + 4 * 4 * LANES)
    tiles, scores = own_address + _TILE_HEAD_BYTES, f32_pointer(own_address + _TILE_SCORES)
    spares = pointer_like(block, own_address + _TILE_SPARE)
    page_values = _BLOCK_TOKENS * width
    first_page, last_page = first // _BLOCK_TOKENS, (end - 1) // _BLOCK_TOKENS
    start_tiles()
    for page in range(first_page, last_page + 1, PASS_PAGES):
        count, start = min(PASS_PAGES, last_page + 1 - page), page * _BLOCK_TOKENS
        for i in range(count):
            rows = advance(cache, np.int64(load(table, page + i)) * page_values)
            low, high = first - start - i * _BLOCK_TOKENS, end - start - i * _BLOCK_TOKENS
            if low > 0 or high < _BLOCK_TOKENS:  # what is in the rows of others must not be read
                spare = advance(spares, i * page_values)
                copy_page(rows, low, high, width, width, spare)
                rows = spare
            store(pages, i, address_of(rows))
        for lane in range(LANES):
            store(ends, lane, np.int32(end - start))
        attend_pages(
            panel, width // STEP, pages, 2 * width, pages, 2 * width, count, rank,
            max(first - start, 0), ends, scale, scores, tiles, page == first_page, o, running,
        )  # fmt: skip
    end_tiles()
    for lane in range(LANES):
        store(stats, 2 * lane, load(running, lane))
        store(stats, 2 * lane + 1, load(running, LANES + lane))


@njit
def _merge(o, stats, new_o, new_stats, rank):
    """Merge a chunk into what the chunks before it gave, for one head."""
    old_max, new_max = load(stats, 0), load(new_stats, 0)
    largest = max(old_max, new_max)
    old_scale, new_scale = exp_f32(old_max - largest), exp_f32(new_max - largest)
    for i in range(rank):
        store(o, i, load(o, i) * old_scale + load(new_o, i) * new_scale)
    total = load(stats, 1) * old_scale + load(new_stats, 1) * new_scale
    store(stats, 0, largest)
    store(stats, 1, total)


@njit
def _copy(o, stats, new_o, new_stats, rank):
    for i in range(rank):
        store(o, i, load(new_o, i))
    store(stats, 0, load(new_stats, 0))
    store(stats, 1, load(new_stats, 1))


@njit
def _write_head(o, stats, rank, has_keys, is_paired, out, lse):
    if not has_keys:
        for i in range(rank):
            store(out, i, np.float32(0.0))
        store(lse, 0, np.float32(-np.inf))
        return
    total = load(stats, 1)
    if is_paired:
        write_pairs(o, total, rank, out)
    else:
        for i in range(rank):
            store(out, i, load(o, i) / total)
    store(lse, 0, load(stats, 0) + np.float32(np.log(total)))


def _attention_kernel(block):
    """Arguments: T, N, C, R, B, M, chunks that are computed apart (0: one thread walks them all),
    first key, heads per item, q, its strides of T and N, cache, query_start, context_lens,
    block_tables, out, lse, and scratch: partial o f32 [T, N, chunks, R], partial stats f32
    [T, N, chunks, 2], memory of each thread, its bytes, and those before its o; whether tiles are
    used; softmax scale.

    A thread's memory: what attends to a chunk, then f32 o [2, heads per item, R] and stats
    [2, heads per item, 2].
    """
    num_tokens, num_heads = argument(block, 0), argument(block, 1)
    width, rank, num_requests = argument(block, 2), argument(block, 3), argument(block, 4)
    table_width, num_chunks, first_key = argument(block, 5), argument(block, 6), argument(block, 7)
    heads_per_item = argument(block, 8)
    q = pointer_like(block, argument(block, 9))
    token_stride, head_stride = argument(block, 10), argument(block, 11)
    cache = pointer_like(block, argument(block, 12))
    query_start, context_lens = i32_pointer(argument(block, 13)), i32_pointer(argument(block, 14))
    tables = i32_pointer(argument(block, 15))
    out, lse = pointer_like(block, argument(block, 16)), f32_pointer(argument(block, 17))
    partial_o, partial_stats = f32_pointer(argument(block, 18)), f32_pointer(argument(block, 19))
    own_address = argument(block, 20) + take(block, 3) * argument(block, 21)
    uses_tiles = has_tiles(q) and argument(block, 23) != 0
    scores = f32_pointer(own_address)
    p = pointer_like(block, own_address + heads_per_item * CHUNK_TOKENS * 4)
    panel, after_panel = pointer_like(block, own_address), own_address + 2 * LANES * width
    o = f32_pointer(own_address + argument(block, 22))
    new_o = advance(o, heads_per_item * rank)
    stats = advance(new_o, heads_per_item * rank)
    new_stats = advance(stats, heads_per_item * 2)
    scale = np.float32(argument_f64(block, 24))

    head_groups = -(-num_heads // heads_per_item)
    per_chunk = num_tokens * head_groups  # items of a chunk side by side: it is in the caches
    while True:
        item = take(block, 0)
        if item >= per_chunk * max(num_chunks, 1):
            break
        apart, token, group = (
            item // per_chunk, item % per_chunk // head_groups, item % head_groups,
        )  # fmt: skip
        head = group * heads_per_item
        heads = min(heads_per_item, num_heads - head)
        request, num_keys = _count_keys(token, query_start, context_lens, num_requests)
        table = advance(tables, request * table_width)
        queries = advance(q, token * token_stride + head * head_stride)
        row = token * num_heads + head
        chunk, last_chunk = first_key // CHUNK_TOKENS, (num_keys - 1) // CHUNK_TOKENS
        if num_keys <= first_key:
            chunk, last_chunk = 0, -1
        if num_chunks > 0:
            chunk, last_chunk = max(chunk, apart), min(last_chunk, apart)
        if uses_tiles and chunk <= last_chunk:
            pack_queries(queries, head_stride, heads, width // STEP, panel)
        is_first = True
        while chunk <= last_chunk:
            first = max(first_key, chunk * CHUNK_TOKENS)
            end = min(num_keys, (chunk + 1) * CHUNK_TOKENS)
            if uses_tiles:
                _attend_by_tiles(
                    panel, cache, width, rank, table, first, end, scale, after_panel, new_o,
                    new_stats, block,
                )  # fmt: skip
            else:
                _attend_chunk(
                    queries, head_stride, heads, cache, width, rank, table, first, end - first,
                    scale, scores, p, new_o, new_stats,
                )  # fmt: skip
            for h in range(heads):
                target, source = advance(o, h * rank), advance(new_o, h * rank)
                target_stats, source_stats = advance(stats, 2 * h), advance(new_stats, 2 * h)
                if num_chunks > 0:
                    place = (row + h) * num_chunks + chunk
                    target = advance(partial_o, place * rank)
                    target_stats = advance(partial_stats, place * 2)
                if is_first:
                    _copy(target, target_stats, source, source_stats, rank)
                else:
                    _merge(target, target_stats, source, source_stats, rank)
            is_first = False
            chunk += 1
        if num_chunks == 0:
            for h in range(heads):
                target, target_lse = advance(out, (row + h) * rank), advance(lse, row + h)
                own_o, own_stats, has_keys = (
                    advance(o, h * rank), advance(stats, 2 * h), num_keys > first_key,
                )  # fmt: skip
                _write_head(own_o, own_stats, rank, has_keys, uses_tiles, target, target_lse)
        finish(block, 0)
    if num_chunks == 0:
        return
    wait_for(block, 0, per_chunk * num_chunks)
    while True:
        row = take(block, 1)
        if row >= num_tokens * num_heads:
            return
        _, num_keys = _count_keys(row // num_heads, query_start, context_lens, num_requests)
        first = row * num_chunks + first_key // CHUNK_TOKENS
        first_o = advance(partial_o, first * rank)
        first_stats = advance(partial_stats, 2 * first)
        for place in range(first + 1, row * num_chunks - (-num_keys // CHUNK_TOKENS)):
            chunk_o, chunk_stats = (
                advance(partial_o, place * rank),
                advance(partial_stats, place * 2),
            )
            _merge(first_o, first_stats, chunk_o, chunk_stats, rank)
        target, target_lse, has_keys = (
            advance(out, row * rank), advance(lse, row), num_keys > first_key,
        )  # fmt: skip
        _write_head(first_o, first_stats, rank, has_keys, uses_tiles, target, target_lse)


ATTENTION = ParallelKernel(_attention_kernel, "24qd")
