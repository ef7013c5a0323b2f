"""Low-latency dispatch and combine on a GPU: pack, put and signal; wait, spread, and sum.

The protocol is that of `whalepod.ep_comm.expert_exchange`, word for word: a rank may run these
kernels while another runs that Python. One launch packs records, the next puts them, a third one
completes the puts and signals: that a launch has ended is all the order there is among programs.
None waits for another one of its own launch, so nothing need be resident at the same time.

Offsets are in bytes from the start of the symmetric heap. The same heap is passed as int32, as
values of the rows, and as an address for NVSHMEM.

Suffix letters: T tokens, K choices, H hidden, R ranks, M most tokens of a rank, E local experts,
S selections.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalepod.kernels.triton.nvshmem import (
    put_block,
    quiet,
    signal_fetch,
    signal_op,
    signal_wait_until,
)

COUNT_BITS = tl.constexpr(17)
COUNT_MASK = tl.constexpr((1 << 17) - 1)
MOST_COUNT = tl.constexpr((1 << 17) - 4096)
"""Counts from here on are aborts."""

_SET = tl.constexpr(9)
_GE = tl.constexpr(5)


@triton.jit
def _count(found, rank, epoch):
    """Return how many records of a rank are here; 0 if its signal says anything else."""
    value = tl.load(found + rank)
    count = value & COUNT_MASK
    is_here = ((value >> COUNT_BITS) == epoch) & (count < MOST_COUNT)
    return tl.where(is_here, count, 0)


@triton.jit
def _copy_row(target, source, H, BLOCK_H: tl.constexpr):
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        tl.store(target + h, tl.load(source + h, mask=h < H), mask=h < H)


@triton.jit
def dispatch_pack(
    x_TH,
    ids_TK,
    slots_TR,
    heap_i32,
    heap_values,
    staging,
    staging_stride,
    K,
    H,
    RECORD: tl.constexpr,
    AT_IDS: tl.constexpr,
    AT_VALUES: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write one token's record for one rank to the staging region. Grid: (T, R).

    slots_TR  a token's place among those for a rank, -1: it does not go there
    """
    token, rank = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_TR + token * tl.num_programs(1) + rank)
    if slot >= 0:
        record = staging + rank * staging_stride + slot * RECORD
        tl.store(heap_i32 + record // 4, token)
        k = tl.arange(0, BLOCK_K)
        ids_K = tl.load(ids_TK + token * K + k, mask=k < K, other=-1)
        tl.store(heap_i32 + (record + AT_IDS) // 4 + k, ids_K.to(tl.int32), mask=k < K)
        _copy_row(heap_values + (record + AT_VALUES) // ITEM, x_TH + token * H, H, BLOCK_H)


@triton.jit
def put(
    counts_R, heap_address, staging, staging_stride, rows, RECORD: tl.constexpr
):  # fmt: skip
    """Begin to put a part of what was packed for a rank. Grid: (parts, R).

    counts_R  records for each rank
    rows      this rank's block on every receiver
    """
    part, rank = tl.program_id(0), tl.program_id(1)
    num_bytes = tl.load(counts_R + rank) * RECORD
    share = tl.cdiv(num_bytes, tl.num_programs(0) * 16) * 16
    start = part * share
    size = tl.minimum(share, num_bytes - start)
    if size > 0:
        source = heap_address + staging + rank * staging_stride + start
        put_block(heap_address + rows + start, source, size, rank)


@triton.jit
def signal(counts_R, heap_address, word, epoch):
    """Complete this rank's puts, then tell one rank how many records it has got. Grid: (R,).

    Runs after the launch that put: quiet completes all puts of the rank, of every kernel.
    """
    rank = tl.program_id(0)
    quiet()
    value = (epoch.to(tl.int64) << COUNT_BITS) + tl.load(counts_R + rank)
    signal_op(heap_address + word, value, _SET, rank)


@triton.jit
def wait(found_R, heap_address, words, epoch, max_polls):
    """Wait for one rank's word to come to a call, at most `max_polls` looks. Grid: (R,).

    found_R  the word's value: whether it came is for the reader to see
    """
    rank = tl.program_id(0)
    at_least = epoch.to(tl.int64) << COUNT_BITS
    word = heap_address + words + 8 * rank
    value = signal_fetch(word)
    polls = 0
    while (value < at_least) & (polls < max_polls):
        value = signal_fetch(word)
        polls += 1
    if value >= at_least:
        signal_wait_until(word, _GE, at_least)  # returns at once, and orders the reads after it
    tl.store(found_R + rank, value)


@triton.jit
def count_rows(
    count_ER,
    found_R,
    heap_i32,
    rows,
    epoch,
    first_expert,
    K,
    M,
    RECORD: tl.constexpr,
    AT_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Count one source's rows for one expert. Grid: (E, R)."""
    expert, rank = tl.program_id(0), tl.program_id(1)
    count = _count(found_R, rank, epoch)
    slot, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)[None, :]
    places = (rows + (rank * M + slot) * RECORD + AT_IDS) // 4 + k
    ids_MK = tl.load(heap_i32 + places, mask=(slot < count) & (k < K), other=-1)
    hits = tl.sum(tl.sum((ids_MK == first_expert + expert).to(tl.int32), axis=1), axis=0)
    tl.store(count_ER + expert * tl.num_programs(1) + rank, hits)


@triton.jit
def spread(
    out_SH,
    info_S,
    row_of_RMK,
    count_ER,
    found_R,
    heap_i32,
    heap_values,
    rows,
    epoch,
    first_expert,
    E,
    K,
    H,
    RECORD: tl.constexpr,
    AT_IDS: tl.constexpr,
    AT_VALUES: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Copy one record to each local expert that it selects. Grid: (R, M).

    Expert e has the rows e * R * M and on, by source, then as they were sent.
    """
    rank, slot = tl.program_id(0), tl.program_id(1)
    num_ranks, M = tl.num_programs(0), tl.num_programs(1)
    count = _count(found_R, rank, epoch)
    record = rows + (rank * M + slot) * RECORD
    slots, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)[None, :]
    places = (rows + (rank * M + slots) * RECORD + AT_IDS) // 4 + k
    ids_MK = tl.load(heap_i32 + places, mask=(slots < count) & (k < K), other=-1)
    others = tl.arange(0, BLOCK_R)
    for choice in range(0, K):
        place = row_of_RMK + (rank * M + slot) * K + choice
        tl.store(place, -1)
        if slot < count:
            expert = tl.load(heap_i32 + (record + AT_IDS) // 4 + choice) - first_expert
            if (expert >= 0) & (expert < E):
                of_others = tl.load(
                    count_ER + expert * num_ranks + others, mask=others < rank, other=0
                )
                is_earlier = (ids_MK == expert + first_expert) & (slots < slot)
                earlier = tl.sum(tl.sum(is_earlier.to(tl.int32), axis=1), axis=0)
                row = expert.to(tl.int64) * num_ranks * M + tl.sum(of_others, axis=0) + earlier
                tl.store(place, row)
                tl.store(info_S + row, tl.load(heap_i32 + record // 4))
                source = heap_values + (record + AT_VALUES) // ITEM
                _copy_row(out_SH + row * H, source, H, BLOCK_H)


@triton.jit
def combine_pack(
    y_SH,
    row_of_RMK,
    heap_values,
    staging,
    staging_stride,
    H,
    RECORD: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write one expert's row for its source to the staging region. Grid: (M * K, R).

    A source's rows lie in the order of its tokens and their choices, without gaps.
    """
    selection, rank = tl.program_id(0), tl.program_id(1)
    num_selections = tl.num_programs(0)
    row = tl.load(row_of_RMK + rank * num_selections + selection)
    if row >= 0:
        s = tl.arange(0, BLOCK_S)
        rows_S = tl.load(row_of_RMK + rank * num_selections + s, mask=s < selection, other=-1)
        index = tl.sum((rows_S >= 0).to(tl.int32), axis=0)
        record = staging + rank * staging_stride + index * RECORD
        _copy_row(heap_values + record // ITEM, y_SH + row * H, H, BLOCK_H)


@triton.jit
def combine_sum(
    y_TH,
    ids_TK,
    weights_TK,
    found_R,
    heap_values,
    rows,
    rows_stride,
    epoch,
    E,
    K,
    H,
    RECORD: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum what the owners of a token's experts sent, in k order. Grid: (T, blocks of H).

    An owner that did not answer counts as zero.
    """
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK_H
    num_selections = tl.num_programs(0) * K
    s = tl.arange(0, BLOCK_S)
    ids_S = tl.load(ids_TK + s, mask=s < num_selections, other=-1)
    owners_S = tl.where(ids_S >= 0, ids_S // E, -1)
    h = first + tl.arange(0, BLOCK_H)
    sum_H = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for k in range(0, K):
        selection = token * K + k
        expert = tl.load(ids_TK + selection)
        if expert >= 0:
            owner = expert // E
            index = tl.sum(((owners_S == owner) & (s < selection)).to(tl.int32), axis=0)
            value = tl.load(found_R + owner)
            if ((value >> COUNT_BITS) == epoch) & ((value & COUNT_MASK) < MOST_COUNT):
                record = rows + owner * rows_stride + index * RECORD
                y_H = tl.load(heap_values + record // ITEM + h, mask=h < H, other=0.0)
                sum_H += y_H.to(tl.float32) * tl.load(weights_TK + selection)
    tl.store(y_TH + token * H + h, sum_H.to(y_TH.dtype.element_ty), mask=h < H)
