"""Attention in AMX tiles (bfloat16): over the paged cache, and with expanded keys and values.

Over the cache a page of keys is read where it lies, by the heads of one token. For chunks of many
queries, 16 queries of one head share a pass over the keys; keys and values are first laid side by
side per head, in whole pages: in the step's own layout two rows of a head are kilobytes apart.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.cpu.abi import (
    ParallelKernel,
    arguments,
    items,
    kernel_part,
    record,
    thread_number,
    with_operands,
)
from whalepod.kernels.cpu.amx.pages import (
    COLUMN_BLOCK,
    LANES,
    PAGE_SCORES,
    PAGE_TILE_BYTES,
    STEP,
    Memory,
    Pages,
    attend_pages,
    copy_page,
    pack_queries,
    write_pairs,
)
from whalepod.kernels.cpu.amx.tiles import end_tiles, start_tiles
from whalepod.kernels.cpu.attention import (
    ATTENTION,
    MAX_HEADS_PER_ITEM,
    PrefillOperations,
    Reader,
    attend_chunk,
    read_by_vectors,
    start_queries,
    write_row,
)
from whalepod.kernels.cpu.simd import (
    TILE_BF16_POINTER,
    address_of,
    advance,
    f32_pointer,
    i32_pointer,
    i64_pointer,
    load,
    pointer_like,
    store,
)
from whalepod.kernels.cpu.workspace import Workspace, aligned
from whalepod.kernels.interface import BLOCK_TOKENS

PASS_PAGES = 4
"""Pages of keys that 16 queries pass over at once."""

_BLOCK_TOKENS = BLOCK_TOKENS
_TILES = PASS_PAGES * PAGE_TILE_BYTES
_SCORES = 4 * PASS_PAGES * PAGE_SCORES

_LISTS_BYTES = 5 * 4 * LANES
"""Running results and ends of 16 rows, and the address of a page."""


def _fits_tiles(dtype: torch.dtype, width: int, rank: int) -> bool:
    """Return whether rows of `width` values, `rank` of them the values, can be read as tiles."""
    return dtype == torch.bfloat16 and width % STEP == 0 and rank % COLUMN_BLOCK == 0


# -- over the cache --------------------------------------------------------------------------------


def _cache_scratch_bytes(width: int) -> int:
    """Return the scratch of a thread: packed queries, lists, weights, scores, copy of a page."""
    return 2 * LANES * width + _LISTS_BYTES + PAGE_TILE_BYTES + 4 * PAGE_SCORES + 128 * width


def read_by_tiles(dtype: torch.dtype, width: int, rank: int, is_split: bool) -> Reader:
    """Return what `read_by_vectors` does, with tiles where they fit."""
    if not _fits_tiles(dtype, width, rank):
        return read_by_vectors(dtype, width, rank, is_split)
    return Reader(TILE_BF16_POINTER, MAX_HEADS_PER_ITEM, _cache_scratch_bytes(width))


@start_queries.written_for(TILE_BF16_POINTER)
def _pack(q, a, own, num_heads):
    pack_queries(q, a.head_stride, num_heads, a.width // STEP, pointer_like(q, own.start))


@attend_chunk.written_for(TILE_BF16_POINTER)
def _attend_to_cache(q, a, own, num_heads, table, first, end):
    """o is in the order of pairs."""
    start = own.start + 2 * LANES * a.width
    running, pages = f32_pointer(start), i64_pointer(start + 3 * 4 * LANES)
    ends = i32_pointer(start + 4 * 4 * LANES)
    tiles = start + _LISTS_BYTES
    scores_start = tiles + PAGE_TILE_BYTES
    spare = pointer_like(a.cache, scores_start + 4 * PAGE_SCORES)
    memory = Memory(f32_pointer(scores_start), tiles, own.new_o, running)
    first_page, last_page = first // _BLOCK_TOKENS, (end - 1) // _BLOCK_TOKENS
    start_tiles()
    for page in range(first_page, last_page + 1):
        rows = advance(a.cache, np.int64(load(table, page)) * _BLOCK_TOKENS * a.width)
        low, high = first - page * _BLOCK_TOKENS, end - page * _BLOCK_TOKENS
        if low > 0 or high < _BLOCK_TOKENS:  # what is in the rows of others must not be read
            copy_page(rows, low, high, a.width, a.width, spare)
            rows = spare
        store(pages, 0, address_of(rows))
        for lane in range(LANES):
            store(ends, lane, np.int32(high))
        seen = Pages(pages, 2 * a.width, pages, 2 * a.width, 1, max(low, 0), ends)
        attend_pages(
            pointer_like(a.q, own.start), a.width // STEP, seen, a.rank, a.scale,
            page == first_page, memory,
        )  # fmt: skip
    end_tiles()
    for lane in range(LANES):
        store(own.new_stats, 2 * lane, load(running, lane))
        store(own.new_stats, 2 * lane + 1, load(running, LANES + lane))


@write_row.written_for(TILE_BF16_POINTER)
def _write_in_order(q, o, total, rank, out):
    write_pairs(o, total, rank, out)


# -- expanded --------------------------------------------------------------------------------------


def _prefill_scratch_bytes(width: int, value_width: int) -> int:
    """Return the scratch of a thread: weights, scores, queries, o, and small lists."""
    lists_bytes = 4 * 4 * LANES + 2 * 8 * PASS_PAGES
    return _TILES + _SCORES + 2 * LANES * width + 4 * LANES * value_width + lists_bytes


_PrefillArguments = record(
    "num_queries num_keys num_heads width value_width q:values k:values v:values out:values",
    "keys",  # `[N, pages, 64, D]`
    "values",  # `[N, pages, 64, E]`
    "scratch scratch_bytes scale:float",
)
"""q [T, N, D], k [S, N, D], v [S, N, E], out [T, N, E]"""


@kernel_part
def _copy_pages(a, head, first, place):
    """Lay a page of keys and values of a head side by side."""
    count = min(_BLOCK_TOKENS, a.num_keys - first)
    row, value_row = a.num_heads * a.width, a.num_heads * a.value_width
    target = advance(pointer_like(a.q, a.keys), place * a.width)
    copy_page(advance(a.k, first * row + head * a.width), 0, count, row, a.width, target)
    target = advance(pointer_like(a.q, a.values), place * a.value_width)
    source = advance(a.v, first * value_row + head * a.value_width)
    copy_page(source, 0, count, value_row, a.value_width, target)


@kernel_part
def _attend(a, tiles, head, query, num_pages):
    """Attend with 16 queries of a head; `tiles` is the address of the thread's scratch."""
    scores, q_address = f32_pointer(tiles + _TILES), tiles + _TILES + _SCORES
    packed_q, o_address = pointer_like(a.q, q_address), q_address + 2 * LANES * a.width
    o, running_address = f32_pointer(o_address), o_address + 4 * LANES * a.value_width
    running, ends = f32_pointer(running_address), i32_pointer(running_address + 3 * 4 * LANES)
    keys = i64_pointer(running_address + 4 * 4 * LANES)
    values = advance(keys, PASS_PAGES)
    row, value_row = a.num_heads * a.width, a.num_heads * a.value_width
    num_rows = min(LANES, a.num_queries - query)
    first_query = advance(a.q, query * row + head * a.width)
    pack_queries(first_query, row, num_rows, a.width // STEP, packed_q)
    memory = Memory(scores, tiles, o, running)
    first_end = a.num_keys - a.num_queries + query + 1
    last_page = (first_end + num_rows - 2) // _BLOCK_TOKENS
    start_tiles()
    for page in range(0, last_page + 1, PASS_PAGES):
        count = min(PASS_PAGES, last_page + 1 - page)
        for i in range(count):
            place = (head * num_pages + page + i) * _BLOCK_TOKENS
            store(keys, i, a.keys + 2 * place * a.width)
            store(values, i, a.values + 2 * place * a.value_width)
        for lane in range(LANES):
            end = first_end + min(lane, num_rows - 1) - page * _BLOCK_TOKENS
            store(ends, lane, np.int32(end))
        seen = Pages(keys, 2 * a.width, values, 2 * a.value_width, count, 0, ends)
        attend_pages(packed_q, a.width // STEP, seen, a.value_width, a.scale, page == 0, memory)
    end_tiles()
    for lane in range(num_rows):
        target = advance(a.out, (query + lane) * value_row + head * a.value_width)
        total = load(running, LANES + lane)
        write_pairs(advance(o, lane * a.value_width), total, a.value_width, target)


def _prefill_kernel(block):
    a = arguments(block, _PrefillArguments)
    tiles = a.scratch + thread_number(block) * a.scratch_bytes
    num_pages = -(-a.num_keys // _BLOCK_TOKENS)
    for item in items(block, 0, a.num_heads * num_pages):
        first = item % num_pages * _BLOCK_TOKENS
        _copy_pages(a, item // num_pages, first, item * _BLOCK_TOKENS)
    per_head = -(-a.num_queries // LANES)
    for item in items(block, 1, a.num_heads * per_head, is_last=True):
        _attend(a, tiles, item // per_head, item % per_head * LANES, num_pages)


PREFILL_ATTENTION = ParallelKernel(_prefill_kernel, _PrefillArguments)
KERNELS = (with_operands(ATTENTION, TILE_BF16_POINTER), PREFILL_ATTENTION)
"""Of models of bfloat16."""


class TilePrefill(PrefillOperations):
    """Expanded attention, in tiles where rows fit them."""

    def __init__(self, work: Workspace, is_invariant: bool) -> None:
        super().__init__(is_invariant)
        self._work = work

    def _attend(self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float) -> Tensor:
        if not _fits_tiles(q_TND.dtype, q_TND.shape[2], v_SNE.shape[2]):
            return super()._attend(q_TND, k_SND, v_SNE, softmax_scale)
        num_queries, num_heads, width = q_TND.shape
        num_keys, value_width = k_SND.shape[0], v_SNE.shape[2]
        out_TNE = self._work.new((num_queries, num_heads, value_width), q_TND.dtype)
        num_rows = num_heads * -(-num_keys // BLOCK_TOKENS) * BLOCK_TOKENS
        values, own = 2 * num_rows * width, 2 * num_rows * (width + value_width)
        own_bytes = aligned(_prefill_scratch_bytes(width, value_width))
        scratch = self._work.borrow(own + own_bytes * self._work.num_threads)
        prefill = _PrefillArguments(
            num_queries=num_queries, num_keys=num_keys, num_heads=num_heads, width=width,
            value_width=value_width, q=q_TND.data_ptr(), k=k_SND.data_ptr(), v=v_SNE.data_ptr(),
            out=out_TNE.data_ptr(), keys=scratch, values=scratch + values, scratch=scratch + own,
            scratch_bytes=own_bytes, scale=softmax_scale,
        )  # fmt: skip
        self._work.run(PREFILL_ATTENTION, q_TND.dtype, self._work.num_threads, prefill)
        return out_TNE
