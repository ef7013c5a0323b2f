"""Absorbed attention over the paged latent cache, split over the keys.

A chunk of 512 keys is scored, normalised to its own maximum and mixed; chunks are merged in order
by their log-sum-exp. Chunks start at multiples of 512 whatever the batch, and merging is the same
whether one thread walks all chunks or many compute them apart: the bits depend on the row alone.

With AMX a chunk is walked page by page in tiles (`amx/attention.py`), whatever the batch is: rows
do not see each other there either.

16 heads of 512 + 64, bf16, one query, one core (shared, CPU time, November 2026), us a layer:

keys          64    512   1024   8192
vectors        -      -      -   5037
tiles         12     29     52   1030

At 8,192 keys the rows alone take 690 to 750 us to read.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor

from whalepod.kernels.cpu.abi import (
    ParallelKernel,
    arguments,
    by_operands,
    items,
    kernel_part,
    record,
    thread_number,
    with_operands,
)
from whalepod.kernels.cpu.elementwise import ElementwiseOperations
from whalepod.kernels.cpu.exponentials import exp_f32, exp_of_scores
from whalepod.kernels.cpu.linear import LinearOperations
from whalepod.kernels.cpu.packed import PackedLinear
from whalepod.kernels.cpu.rows import dot_rows, mix_rows
from whalepod.kernels.cpu.simd import (
    BF16_POINTER,
    F32_POINTER,
    advance,
    f32_pointer,
    load,
    pointer_like,
    store,
)
from whalepod.kernels.cpu.vectors import row_max, row_sum
from whalepod.kernels.cpu.workspace import Workspace, aligned
from whalepod.kernels.interface import BLOCK_TOKENS

CHUNK_TOKENS = 512
"""Keys of one item; a multiple of the block."""

MAX_HEADS_PER_ITEM = 16
"""The most heads that share one pass over the keys."""

_BLOCK_TOKENS = BLOCK_TOKENS


_AttentionArguments = record(
    "num_tokens num_heads width rank num_requests table_width",
    "num_chunks",  # Chunks that are computed apart; 0: one thread walks them all
    "first_key heads_per_item q:operands token_stride head_stride cache:values query_start:i32",
    "context_lens:i32 tables:i32 out:values lse:f32",
    "partial_o:f32",  # `[T, N, chunks, R]`
    "partial_stats:f32",  # `[T, N, chunks, 2]`
    # Of each thread: what attends to a chunk, then f32 o `[2, heads per item, R]` and stats `[2,
    # heads per item, 2]`
    "scratch",
    "scratch_bytes bytes_before_o scale:float",
)


_Memory = namedtuple("_Memory", "start o stats new_o new_stats")
"""A thread's own: o unnormalised, stats the maximum and the sum of exponentials; and those of its
newest chunk."""


@kernel_part
def _memory_of(a, thread):
    start = a.scratch + thread * a.scratch_bytes
    o = f32_pointer(start + a.bytes_before_o)
    new_o = advance(o, a.heads_per_item * a.rank)
    stats = advance(new_o, a.heads_per_item * a.rank)
    return _Memory(start, o, stats, new_o, advance(stats, a.heads_per_item * 2))


@kernel_part
def _count_keys(a, token):
    """Return the request of a token and how many keys it sees."""
    for b in range(a.num_requests):
        start, end = np.int64(load(a.query_start, b)), np.int64(load(a.query_start, b + 1))
        if start <= token < end:
            return b, np.int64(load(a.context_lens, b)) - (end - 1 - token)
    return 0, 0


@kernel_part
def _run_of_rows(a, table, position, most):
    """Return where the row of a position lies, and how many (at most `most`) follow each other."""
    offset = position % _BLOCK_TOKENS
    page = np.int64(load(table, position // _BLOCK_TOKENS)) * _BLOCK_TOKENS
    return advance(a.cache, (page + offset) * a.width), min(_BLOCK_TOKENS - offset, most)


@kernel_part
def _score(a, q, num_heads, table, first, num_keys, scores):
    """Set scores[head, key] to the products of queries with keys."""
    done = 0
    while done < num_keys:
        rows, count = _run_of_rows(a, table, first + done, num_keys - done)
        target = advance(scores, done)
        dot_rows(q, a.head_stride, num_heads, rows, a.width, count, a.width, target, CHUNK_TOKENS)
        done += count


@kernel_part
def _mix(a, weights, num_heads, table, first, num_keys, o):
    """Set o[head] to the sum of the values, weighted."""
    done = 0
    while done < num_keys:
        rows, count = _run_of_rows(a, table, first + done, num_keys - done)
        part = advance(weights, done)
        mix_rows(part, CHUNK_TOKENS, num_heads, rows, a.width, count, a.rank, o, a.rank, done > 0)
        done += count


@by_operands
def start_queries(q, a, own, num_heads):
    """Prepare some heads' queries of a token for all its chunks."""
    raise NotImplementedError


@by_operands
def attend_chunk(q, a, own, num_heads, table, first, end):
    """Attend to keys first .. end of one chunk: set `new_o` and `new_stats`."""
    raise NotImplementedError


@by_operands
def write_row(q, o, total, rank, out):
    """Set out[c] = o[c] / total."""
    raise NotImplementedError


@start_queries.written_for(F32_POINTER, BF16_POINTER)
def _take_queries(q, a, own, num_heads):
    pass


@attend_chunk.written_for(F32_POINTER, BF16_POINTER)
def _attend_by_vectors(q, a, own, num_heads, table, first, end):
    num_keys = end - first
    scores = f32_pointer(own.start)
    weights = pointer_like(a.q, own.start + a.heads_per_item * CHUNK_TOKENS * 4)
    _score(a, q, num_heads, table, first, num_keys, scores)
    for head in range(num_heads):
        row = advance(scores, head * CHUNK_TOKENS)
        largest = row_max(row, num_keys) * a.scale
        exp_of_scores(row, num_keys, a.scale, largest, advance(weights, head * CHUNK_TOKENS))
        store(own.new_stats, 2 * head, largest)
        store(own.new_stats, 2 * head + 1, row_sum(row, num_keys))
    _mix(a, weights, num_heads, table, first, num_keys, own.new_o)


@write_row.written_for(F32_POINTER, BF16_POINTER)
def _write_columns(q, o, total, rank, out):
    for i in range(rank):
        store(out, i, load(o, i) / total)


@kernel_part
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


@kernel_part
def _copy(o, stats, new_o, new_stats, rank):
    for i in range(rank):
        store(o, i, load(new_o, i))
    store(stats, 0, load(new_stats, 0))
    store(stats, 1, load(new_stats, 1))


@kernel_part
def _keep_chunk(a, own, row, num_heads, chunk, is_first):
    """Merge the newest chunk into those before, or store it apart."""
    for head in range(num_heads):
        source, source_stats = advance(own.new_o, head * a.rank), advance(own.new_stats, 2 * head)
        target, target_stats = advance(own.o, head * a.rank), advance(own.stats, 2 * head)
        if a.num_chunks > 0:
            place = (row + head) * a.num_chunks + chunk
            target = advance(a.partial_o, place * a.rank)
            target_stats = advance(a.partial_stats, place * 2)
        if is_first:
            _copy(target, target_stats, source, source_stats, a.rank)
        else:
            _merge(target, target_stats, source, source_stats, a.rank)


@kernel_part
def _write_head(a, row, o, stats, has_keys):
    """Normalise what was summed for one head of a token, row `[T, N]` of the results."""
    out, lse = advance(a.out, row * a.rank), advance(a.lse, row)
    if not has_keys:
        for i in range(a.rank):
            store(out, i, np.float32(0.0))
        store(lse, 0, np.float32(-np.inf))
        return
    total = load(stats, 1)
    write_row(a.q, o, total, a.rank, out)
    store(lse, 0, load(stats, 0) + np.float32(np.log(total)))


@kernel_part
def _attend(a, own, apart, token, head):
    """Attend with some heads of a token to all its chunks, or to the one of number `apart`."""
    num_heads = min(a.heads_per_item, a.num_heads - head)
    request, num_keys = _count_keys(a, token)
    table = advance(a.tables, request * a.table_width)
    q, row = advance(a.q, token * a.token_stride + head * a.head_stride), token * a.num_heads + head
    chunk, last_chunk = a.first_key // CHUNK_TOKENS, (num_keys - 1) // CHUNK_TOKENS
    if num_keys <= a.first_key:
        chunk, last_chunk = 0, -1
    if a.num_chunks > 0:
        chunk, last_chunk = max(chunk, apart), min(last_chunk, apart)
    if chunk <= last_chunk:
        start_queries(q, a, own, num_heads)
    is_first = True
    while chunk <= last_chunk:
        first = max(a.first_key, chunk * CHUNK_TOKENS)
        end = min(num_keys, (chunk + 1) * CHUNK_TOKENS)
        attend_chunk(q, a, own, num_heads, table, first, end)
        _keep_chunk(a, own, row, num_heads, chunk, is_first)
        is_first = False
        chunk += 1
    if a.num_chunks == 0:
        for h in range(num_heads):
            o, stats = advance(own.o, h * a.rank), advance(own.stats, 2 * h)
            _write_head(a, row + h, o, stats, num_keys > a.first_key)


@kernel_part
def _merge_chunks(a, row):
    """Merge what was computed apart for one head of a token."""
    _, num_keys = _count_keys(a, row // a.num_heads)
    first = row * a.num_chunks + a.first_key // CHUNK_TOKENS
    o, stats = advance(a.partial_o, first * a.rank), advance(a.partial_stats, 2 * first)
    for place in range(first + 1, row * a.num_chunks - (-num_keys // CHUNK_TOKENS)):
        chunk_o = advance(a.partial_o, place * a.rank)
        _merge(o, stats, chunk_o, advance(a.partial_stats, place * 2), a.rank)
    _write_head(a, row, o, stats, num_keys > a.first_key)


def _attention_kernel(block):
    a = arguments(block, _AttentionArguments)
    own = _memory_of(a, thread_number(block))
    head_groups = -(-a.num_heads // a.heads_per_item)
    per_chunk = a.num_tokens * head_groups  # items of a chunk side by side: it is in the caches
    for item in items(block, 0, per_chunk * max(a.num_chunks, 1), is_last=a.num_chunks == 0):
        apart, rest = item // per_chunk, item % per_chunk
        _attend(a, own, apart, rest // head_groups, rest % head_groups * a.heads_per_item)
    if a.num_chunks == 0:
        return
    for row in items(block, 1, a.num_tokens * a.num_heads, is_last=True):
        _merge_chunks(a, row)


ATTENTION = ParallelKernel(_attention_kernel, _AttentionArguments)


class Reader(NamedTuple):
    """How attention of some shape reads the cache."""

    operands: types.CPointer
    """Of the queries: the code that is written for them."""
    heads_per_item: int
    """Heads that share one pass over the keys."""
    scratch_bytes: int
    """Memory of a thread for `start_queries` and `attend_chunk`."""


def read_by_vectors(dtype: torch.dtype, width: int, rank: int, is_split: bool) -> Reader:
    """Return the reader for rows of `width` values; `is_split`: chunks are computed apart."""
    heads_per_item = MAX_HEADS_PER_ITEM // (2 if is_split else 1)
    operands = BF16_POINTER if dtype == torch.bfloat16 else F32_POINTER
    return Reader(operands, heads_per_item, 8 * heads_per_item * CHUNK_TOKENS)


class AttentionOperations:
    """The part of `Kernels` that attends over the cache."""

    def __init__(
        self,
        work: Workspace,
        rows: ElementwiseOperations,
        products: LinearOperations,
        choose_reader: Callable[[torch.dtype, int, int, bool], Reader],
    ) -> None:
        self._work, self._choose_reader = work, choose_reader
        self._rows, self._products = rows, products

    def absorb_queries(
        self, q_TND: Tensor, w_uk: PackedLinear, positions_T: Tensor, cos_sin_SD: Tensor
    ) -> Tensor:
        num_tokens, num_heads, width = q_TND.shape
        rope, rank = cos_sin_SD.shape[1], w_uk.num_columns
        q_TNC = self._work.new((num_tokens, num_heads, rank + rope), q_TND.dtype)
        latent_TNR, turned_TND = q_TNC[..., :rank], q_TNC[..., rank:]
        self._products.linear_into(q_TND[..., : width - rope], w_uk, latent_TNR)
        self._rows.rope_into(q_TND[..., width - rope :], positions_T, cos_sin_SD, turned_TND)
        return q_TNC

    def mla_attention(
        self,
        q_TNC: Tensor,
        cache_PBC: Tensor,
        query_start_B1: Tensor,
        context_lens_B: Tensor,
        block_tables_BM: Tensor,
        softmax_scale: float,
        latent_rank: int,
        first_key: int = 0,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads, width = q_TNC.shape
        num_requests, table_width = block_tables_BM.shape
        out_TNR = self._work.new((num_tokens, num_heads, latent_rank), q_TNC.dtype)
        lse_TN = self._work.new((num_tokens, num_heads), torch.float32)
        num_threads = self._work.num_threads
        is_split = num_tokens < 4 * num_threads and num_tokens * num_threads > 1
        num_chunks = -(-table_width * BLOCK_TOKENS // CHUNK_TOKENS) if is_split else 0
        operands, heads_per_item, bytes_before_o = self._choose_reader(
            q_TNC.dtype, width, latent_rank, is_split
        )
        own_bytes = aligned(bytes_before_o + 8 * heads_per_item * (latent_rank + 2))
        num_partial = num_tokens * num_heads * num_chunks
        partial_bytes = aligned(4 * num_partial * (latent_rank + 2))
        partial = self._work.borrow(partial_bytes + own_bytes * num_threads)
        attention = _AttentionArguments(
            num_tokens=num_tokens, num_heads=num_heads, width=width, rank=latent_rank,
            num_requests=num_requests, table_width=table_width, num_chunks=num_chunks,
            first_key=first_key, heads_per_item=heads_per_item, q=q_TNC.data_ptr(),
            token_stride=q_TNC.stride(0), head_stride=q_TNC.stride(1), cache=cache_PBC.data_ptr(),
            query_start=query_start_B1.data_ptr(), context_lens=context_lens_B.data_ptr(),
            tables=block_tables_BM.data_ptr(), out=out_TNR.data_ptr(), lse=lse_TN.data_ptr(),
            partial_o=partial, partial_stats=partial + 4 * num_partial * latent_rank,
            scratch=partial + partial_bytes, scratch_bytes=own_bytes, bytes_before_o=bytes_before_o,
            scale=softmax_scale,
        )  # fmt: skip
        num_items = num_tokens * -(-num_heads // heads_per_item) * max(num_chunks, 1)
        kernel = with_operands(ATTENTION, operands)
        self._work.run(kernel, q_TNC.dtype, num_items, attention)
        return out_TNR, lse_TN


class PrefillOperations:
    """The part of `Kernels` that attends with expanded keys and values."""

    def __init__(self, is_invariant: bool) -> None:
        self._is_invariant = is_invariant

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        if self._is_invariant:
            raise NotImplementedError(
                "batch-invariant kernels attend absorbed only: expanded attention sums in another "
                "order (set absorbed_max_query_tokens to at least max_num_batched_tokens)"
            )
        return self._attend(q_TND, k_SND, v_SNE, softmax_scale)

    def _attend(self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float) -> Tensor:
        # values as wide as the keys reach torch's flash kernel: 5 to 8 times faster than without
        num_queries, num_keys = q_TND.shape[0], k_SND.shape[0]
        v_SND = F.pad(v_SNE, (0, q_TND.shape[2] - v_SNE.shape[2]))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_SND, v_SND))
        mask = None
        if num_keys != num_queries:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=softmax_scale
        )
        return o[0, :, :, : v_SNE.shape[2]].transpose(0, 1).contiguous()
