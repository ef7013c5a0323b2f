"""Attention with keys and values of each head, for chunks of many queries, in AMX tiles.

16 queries of one head share a pass over the keys. Keys and values are first laid side by side per
head, in whole pages: in the step's own layout two rows of a head are kilobytes apart.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.cpu.abi import (
    ParallelKernel,
    arguments,
    items,
    kernel_part,
    record,
    thread_number,
)
from whalepod.kernels.cpu.attention import fits_tiles
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
from whalepod.kernels.cpu.tiles import end_tiles, has_tiles, start_tiles
from whalepod.kernels.cpu.workspace import Workspace, aligned
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
    packed_q, o_address = (
        pointer_like(a.q, q_address),
        q_address + 2 * LANES * a.width,
    )
    o, running_address = f32_pointer(o_address), o_address + 4 * LANES * a.value_width
    running, ends = f32_pointer(running_address), i32_pointer(running_address + 3 * 4 * LANES)
    keys = i64_pointer(running_address + 4 * 4 * LANES)
    values = advance(keys, PASS_PAGES)
    row, value_row = a.num_heads * a.width, a.num_heads * a.value_width
    count = min(LANES, a.num_queries - query)
    pack_queries(advance(a.q, query * row + head * a.width), row, count, a.width // STEP, packed_q)
    first_end = a.num_keys - a.num_queries + query + 1
    last_page = (first_end + count - 2) // _BLOCK_TOKENS
    start_tiles()
    for page in range(0, last_page + 1, PASS_PAGES):
        pages = min(PASS_PAGES, last_page + 1 - page)
        for i in range(pages):
            place = (head * num_pages + page + i) * _BLOCK_TOKENS
            store(keys, i, a.keys + 2 * place * a.width)
            store(values, i, a.values + 2 * place * a.value_width)
        for lane in range(LANES):
            end = first_end + min(lane, count - 1) - page * _BLOCK_TOKENS
            store(ends, lane, np.int32(end))
        attend_pages(
            packed_q, a.width // STEP, keys, 2 * a.width, values, 2 * a.value_width, pages,
            a.value_width, 0, ends, a.scale, scores, tiles, page == 0, o, running,
        )  # fmt: skip
    end_tiles()
    for lane in range(count):
        target = advance(a.out, (query + lane) * value_row + head * a.value_width)
        total = load(running, LANES + lane)
        write_pairs(advance(o, lane * a.value_width), total, a.value_width, target)


def _prefill_kernel(block):
    a = arguments(block, _PrefillArguments)
    if not has_tiles(a.q):
        return
    tiles = a.scratch + thread_number(block) * a.scratch_bytes
    num_pages = -(-a.num_keys // _BLOCK_TOKENS)
    for item in items(block, 0, a.num_heads * num_pages):
        first = item % num_pages * _BLOCK_TOKENS
        _copy_pages(a, item // num_pages, first, item * _BLOCK_TOKENS)
    per_head = -(-a.num_queries // LANES)
    for item in items(block, 1, a.num_heads * per_head, is_last=True):
        _attend(a, tiles, item // per_head, item % per_head * LANES, num_pages)


PREFILL_ATTENTION = ParallelKernel(_prefill_kernel, _PrefillArguments)


class PrefillOperations:
    """The part of `Kernels` that attends with expanded keys and values."""

    def __init__(self, work: Workspace, has_tiles: bool, is_invariant: bool) -> None:
        self._work, self._has_tiles, self._is_invariant = work, has_tiles, is_invariant

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        if self._is_invariant:
            raise NotImplementedError(
                "batch-invariant kernels attend absorbed only: expanded attention sums in another "
                "order (set absorbed_max_query_tokens to at least max_num_batched_tokens)"
            )
        is_fit = fits_tiles(q_TND.shape[2], v_SNE.shape[2])
        if self._has_tiles and q_TND.dtype == torch.bfloat16 and is_fit:
            return self._prefill_by_tiles(q_TND, k_SND, v_SNE, softmax_scale)
        return _prefill_by_torch(q_TND, k_SND, v_SNE, softmax_scale)

    def _prefill_by_tiles(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        num_queries, num_heads, width = q_TND.shape
        num_keys, value_width = k_SND.shape[0], v_SNE.shape[2]
        out_TNE = self._work.new((num_queries, num_heads, value_width), q_TND.dtype)
        num_rows = num_heads * -(-num_keys // BLOCK_TOKENS) * BLOCK_TOKENS
        values, own = 2 * num_rows * width, 2 * num_rows * (width + value_width)
        own_bytes = aligned(scratch_bytes(width, value_width))
        scratch = self._work.borrow(own + own_bytes * self._work.num_threads)
        prefill = _PrefillArguments(
            num_queries=num_queries, num_keys=num_keys, num_heads=num_heads, width=width,
            value_width=value_width, q=q_TND.data_ptr(), k=k_SND.data_ptr(), v=v_SNE.data_ptr(),
            out=out_TNE.data_ptr(), keys=scratch, values=scratch + values, scratch=scratch + own,
            scratch_bytes=own_bytes, scale=softmax_scale,
        )  # fmt: skip
        self._work.run(PREFILL_ATTENTION, q_TND.dtype, self._work.num_threads, prefill)
        return out_TNE


def _prefill_by_torch(q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float) -> Tensor:
    # Values as wide as the keys reach torch's flash kernel: 5 to 8 times faster than without.
    num_queries, num_keys = q_TND.shape[0], k_SND.shape[0]
    padding = q_TND.shape[2] - v_SNE.shape[2]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_SND, F.pad(v_SNE, (0, padding))))
    mask = None
    if num_keys != num_queries:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=softmax_scale)
    return o[0, :, :, : v_SNE.shape[2]].transpose(0, 1).contiguous()
