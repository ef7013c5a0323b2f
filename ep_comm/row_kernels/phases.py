"""The phases of the low-latency mode over mapped heaps, one compiled call each.

They do what `whalepod.ep_comm.modes.low_latency` does with a transport and `RowKernels`, with the
same loops in the same order, as long as nothing goes wrong: all ranks are there, and nobody gives a
call up. Where something does they say so and change nothing that a second try would find.

`plan` and `part` are arrays of one record, `PLAN` and `PART`: sizes, and addresses of memory that
stays where it is. What changes from call to call comes as integers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.ep_comm.group import COUNT_BITS, COUNT_MASK, FIRST_ABORT
from whalepod.ep_comm.modes.low_latency_config import NUM_SETS
from whalepod.ep_comm.row_kernels.loops import (
    collect,
    combine as sum_of_rows,
    combine_sums as sum_of_sums,
    destinations,
    pack,
    quantize,
    spread,
    weighted_sums,
)
from whalepod.ep_comm.row_kernels.memory import (
    BYTES,
    f32_at,
    f64_at,
    i32_at,
    i64_at,
    load_acquire,
    row_bytes,
    store_release,
    u8_at,
)
from whalepod.ep_comm.row_kernels.waiting import now_ns, wait_until
from whalepod.kernels.cpu.compile_cache import compiled

ALL_HERE = 0
GIVEN_UP = -1
"""Some rank gave the call up, or is at a later one."""

_WORD_BYTES = 8


def _record(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


PLAN = _record(
    "rank", "num_ranks", "num_local", "num_choices", "hidden", "max_tokens", "max_rows",
    "rows_per_expert", "is_reduced",
    "heaps_R", "sent_bytes_R", "waited_ms_R",
    "there_words", "there_rows", "there_kind", "there_bytes", "at_ids", "at_weights", "at_values",
    "at_scales", "num_weights", "num_scales", "rounds_scale", "has_exponents",
    "back_words", "back_rows", "back_kind", "back_bytes", "at_back_values",
)  # fmt: skip
"""What stays the same: sizes, where parts of records are, offsets in the heap, and the addresses of
three arrays over ranks: heaps in this process (int64), bytes sent (int64), ms waited (f64)."""

PART = _record(
    "counts_R", "num_rows", "row_of_NK", "weights_NW", "count_E", "first_row_E", "ranges_ER",
    "expert_S",
    "rows", "info", "scales", "scale_block_stride", "scale_row_stride", "scale_column_stride",
    "num_scale_columns", "rows_per_block",
)  # fmt: skip
"""The addresses of what a dispatch fills, one for each set of buffers; `num_rows` is one int64, how
many rows of experts there are. `expert_S` may be 0."""


@compiled
def send_dispatch(plan, epoch, num_tokens, x, kind, ids, weights):
    """Write each token's record to every rank that it is for, then the signals.

    `x` is contiguous. Returns False, and has sent nothing, if an id is out of range or comes twice.
    """
    p = plan[0]
    ranks, hidden = p.num_ranks, p.hidden
    is_in = np.empty(num_tokens * ranks, dtype=np.uint8)
    if not destinations(ids, num_tokens, p.num_choices, p.num_local, ranks, is_in.ctypes.data):
        return False
    first = p.there_rows + _place(p, epoch) * p.max_tokens * p.there_bytes
    heaps, sent_bytes = i64_at(p.heaps_R, ranks), i64_at(p.sent_bytes_R, ranks)
    targets, counts = heaps + first, np.zeros(ranks, dtype=np.int64)
    values, value_kind = x, kind
    value_stride, scale_bytes = row_bytes(kind, hidden), p.num_scales * 4
    quantized = np.empty(num_tokens * hidden if p.there_kind == BYTES else 0, dtype=np.uint8)
    scales = np.empty(num_tokens * p.num_scales, dtype=np.float32)
    at_scales = scales.ctypes.data
    if p.there_kind == BYTES:
        values, value_kind, value_stride = quantized.ctypes.data, BYTES, hidden
        quantize(x, kind, num_tokens, hidden, p.rounds_scale != 0, values, at_scales)
        if p.has_exponents:
            scale_bytes = p.num_scales
            _keep_exponents(at_scales, len(scales))
    pack(
        ids, p.num_choices, p.at_ids, weights, p.at_weights, p.num_weights, values, value_stride,
        value_kind, p.at_values, p.there_kind, hidden, at_scales, scale_bytes, p.at_scales,
        p.there_bytes, is_in.ctypes.data, num_tokens, 0, targets, counts,
    )  # fmt: skip
    for rank in range(ranks):
        sent_bytes[rank] += counts[rank] * p.there_bytes
        _signal(p, heaps[rank] + p.there_words, epoch, counts[rank])
    return True


@compiled
def receive_dispatch(plan, part, epoch, until_ns):
    """Wait for all ranks' records and spread them; returns `ALL_HERE`, `GIVEN_UP`, or 1 + the rank
    that has not come until then."""
    p, out = plan[0], part[0]
    ranks, first_place = p.num_ranks, epoch % NUM_SETS * p.num_ranks
    own_heap = i64_at(p.heaps_R, ranks)[p.rank]
    words = own_heap + p.there_words + first_place * _WORD_BYTES
    values = np.empty(ranks, dtype=np.int64)
    found = _wait_for_all(p, words, epoch, until_ns, values)
    if found != ALL_HERE:
        return found
    counts = i64_at(out.counts_R, ranks)
    num_rows = 0
    for rank in range(ranks):
        counts[rank] = values[rank] & COUNT_MASK
        num_rows += counts[rank]
    count_E, count_ER = (
        np.empty(p.num_local, dtype=np.int64),
        np.empty((p.num_local, ranks), dtype=np.int64),
    )
    row_of = i64_at(out.row_of_NK, num_rows * p.num_choices).reshape((num_rows, p.num_choices))
    strides = (out.scale_block_stride, out.scale_row_stride, out.scale_column_stride)
    spread(
        own_heap + p.there_rows + first_place * p.max_tokens * p.there_bytes, p.there_bytes,
        p.max_tokens, p.at_ids, p.num_choices, p.at_weights, p.num_weights, p.at_values,
        row_bytes(p.there_kind, p.hidden), p.at_scales, out.num_scale_columns, np.arange(ranks),
        counts, p.rank * p.num_local, p.rows_per_expert, out.rows, out.info, out.scales, strides,
        out.rows_per_block, row_of, f32_at(out.weights_NW, num_rows * p.num_weights), count_E,
        i64_at(out.first_row_E, p.num_local), count_ER,
    )  # fmt: skip
    _describe_rows(out, count_E, count_ER)
    return ALL_HERE if _is_unchanged(words, values) else GIVEN_UP


@compiled
def send_combine(plan, part, epoch, y, y_stride, y_kind):
    """Write the experts' rows to the ranks that their tokens came from, then the signals."""
    p, out = plan[0], part[0]
    ranks, choices, hidden = p.num_ranks, p.num_choices, p.hidden
    heaps, sent_bytes = i64_at(p.heaps_R, ranks), i64_at(p.sent_bytes_R, ranks)
    counts = i64_at(out.counts_R, ranks)
    block = p.back_rows + _place(p, epoch) * p.max_rows * p.back_bytes + p.at_back_values
    row_of, weights = out.row_of_NK, out.weights_NW
    for rank in range(ranks):
        count, target = counts[rank], heaps[rank] + block
        if p.is_reduced:
            weighted_sums(
                y, y_stride, y_kind, hidden, row_of, weights, count, choices, target, p.back_bytes,
                p.back_kind,
            )  # fmt: skip
            num_sent = count
        else:
            num_sent = collect(
                y, y_stride, y_kind, hidden, row_of, count * choices, target, p.back_bytes,
                p.back_kind,
            )  # fmt: skip
        row_of += 8 * count * choices
        weights += 4 * count * choices
        sent_bytes[rank] += num_sent * p.back_bytes
        _signal(p, heaps[rank] + p.back_words, epoch, num_sent)


@compiled
def receive_combine(plan, epoch, until_ns, ids, weights, num_tokens, out, kind):
    """Wait for all owners and add up their rows; returns as `receive_dispatch` does."""
    p = plan[0]
    ranks, first_place = p.num_ranks, epoch % NUM_SETS * p.num_ranks
    own_heap = i64_at(p.heaps_R, ranks)[p.rank]
    words = own_heap + p.back_words + first_place * _WORD_BYTES
    values = np.empty(ranks, dtype=np.int64)
    found = _wait_for_all(p, words, epoch, until_ns, values)
    if found != ALL_HERE:
        return found
    owner_stride = p.max_rows * p.back_bytes
    returned = own_heap + p.back_rows + first_place * owner_stride + p.at_back_values
    has_answered = np.ones(ranks, dtype=np.bool_)
    if p.is_reduced:
        sum_of_sums(
            returned, owner_stride, p.back_bytes, p.back_kind, p.hidden, has_answered, ids,
            num_tokens, p.num_choices, p.num_local, out, kind,
        )  # fmt: skip
    else:
        sum_of_rows(
            returned, owner_stride, p.back_bytes, p.back_kind, p.hidden, has_answered, ids,
            weights, num_tokens, p.num_choices, p.num_local, out, kind,
        )  # fmt: skip
    return ALL_HERE if _is_unchanged(words, values) else GIVEN_UP


@compiled
def combine(
    plan, part, epoch, y, y_stride, y_kind, until_ns, ids, weights, num_tokens, out, kind
):  # fmt: skip
    """Send, wait, and add up."""
    send_combine(plan, part, epoch, y, y_stride, y_kind)
    return receive_combine(plan, epoch, until_ns, ids, weights, num_tokens, out, kind)


@njit
def _place(p, epoch):
    """Return where this rank's part of a call is among those of all ranks and sets."""
    return epoch % NUM_SETS * p.num_ranks + p.rank


@njit
def _signal(p, words, epoch, count):
    store_release(words + _place(p, epoch) * _WORD_BYTES, (epoch << COUNT_BITS) | count)


@njit
def _wait_for_all(p, words, epoch, until_ns, values):
    """Fill `values` with the words of all ranks; returns as `receive_dispatch` does."""
    waited_ms = f64_at(p.waited_ms_R, p.num_ranks)
    at_least = epoch << COUNT_BITS
    for rank in range(p.num_ranks):
        word = words + rank * _WORD_BYTES
        values[rank] = load_acquire(word)
        if values[rank] < at_least:
            start_ns = now_ns()
            values[rank] = wait_until(word, at_least, until_ns)
            waited_ms[rank] += 1e-6 * (now_ns() - start_ns)
            if values[rank] < at_least:
                return 1 + rank
    for value in values:
        if value >> COUNT_BITS != epoch or value & COUNT_MASK >= FIRST_ABORT:
            return GIVEN_UP
    return ALL_HERE


@njit
def _is_unchanged(words, values):
    """Return whether no rank wrote again while this one was reading. (A later call that is given up
    brings no rows; the next wait finds it.)"""
    for rank in range(len(values)):
        value = load_acquire(words + rank * _WORD_BYTES)
        if value != values[rank] and value & COUNT_MASK < FIRST_ABORT:
            return False
    return True


@njit
def _describe_rows(out, count_E, count_ER):
    """Write counts and ranges as those who use the rows want them."""
    num_local, ranks = count_ER.shape
    written, ranges = i32_at(out.count_E, num_local), i64_at(out.ranges_ER, num_local * ranks)
    row = 0
    for e in range(num_local):
        written[e] = count_E[e]
        begin = 0
        for rank in range(ranks):
            ranges[e * ranks + rank] = (begin << 32) | count_ER[e, rank]
            begin += count_ER[e, rank]
        if out.expert_S:
            i64_at(out.expert_S + 8 * row, count_E[e])[:] = e
        row += count_E[e]
    i64_at(out.num_rows, 1)[0] = row


@njit
def _keep_exponents(scales, count):
    """Replace f32 powers of two by their exponent bytes, one behind the other."""
    bits, exponents = i32_at(scales, count), u8_at(scales, count)
    for i in range(count):
        exponents[i] = (bits[i] >> 23) & 0xFF
