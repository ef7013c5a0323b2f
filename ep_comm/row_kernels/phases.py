"""The phases of an exchange by expert over mapped heaps, one compiled call each.

They do what `whalepod.ep_comm.transport_phases` does with a transport and `RowKernels`, with the
same loops in the same order, as long as nothing goes wrong: all ranks are there, and no one gives a
call up. Where something does they say so and change nothing that a second try would find.

`plan` and `out` are addresses of a `PLAN` and a `SPREAD`: sizes, and addresses of memory that stays
where it is. What changes from call to call comes as integers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.ep_comm.group import COUNT_BITS, COUNT_MASK, FIRST_ABORT
from whalepod.ep_comm.row_kernels.loops import (
    collect,
    combine as sum_of_rows,
    destinations,
    pack,
    quantize,
    spread,
)
from whalepod.ep_comm.row_kernels.memory import (
    BYTES,
    f64_at,
    fence_acquire,
    i64_at,
    load_acquire,
    row_bytes,
    store_release,
)
from whalepod.ep_comm.row_kernels.records import format_at, plan_at, spread_at
from whalepod.ep_comm.row_kernels.waiting import now_ns, wait_until
from whalepod.ep_comm.slots import NUM_SETS
from whalepod.kernels.cpu.compile_cache import compiled

ALL_HERE = 0
GIVEN_UP = -1
"""Some rank gave the call up, or is at a later one."""

_SIGNAL_BYTES = 8


@compiled
def send_dispatch(plan, epoch, num_tokens, x, kind, ids):
    """Write each token's record to every rank that it is for, then the signals.

    `x` is contiguous. Returns False, and has sent nothing, if an id is out of range or comes twice.
    """
    p = plan_at(plan)
    f, ranks = format_at(p.dispatch_format), p.num_ranks
    is_in = np.empty(num_tokens * ranks, dtype=np.uint8)
    if not destinations(ids, num_tokens, f.num_ids, p.num_local, ranks, is_in.ctypes.data):
        return False
    first = p.dispatch_rows + _place(p, epoch) * p.max_tokens * f.num_bytes
    heaps, sent_bytes = i64_at(p.heaps_R, ranks), i64_at(p.sent_bytes_R, ranks)
    targets, counts = heaps + first, np.zeros(ranks, dtype=np.int64)
    values, stride, value_kind = x, row_bytes(kind, f.hidden), kind
    quantized = np.empty(num_tokens * f.hidden if f.kind == BYTES else 0, dtype=np.uint8)
    scales = np.empty(num_tokens * f.num_scales, dtype=np.float32)
    if f.kind == BYTES:
        values, stride, value_kind = quantized.ctypes.data, f.hidden, BYTES
        quantize(x, kind, num_tokens, f.hidden, values, scales.ctypes.data)
    pack(
        p.dispatch_format, values, stride, value_kind, scales.ctypes.data, ids, 0,
        is_in.ctypes.data, num_tokens, 0, targets, counts,
    )  # fmt: skip
    for rank in range(ranks):
        sent_bytes[rank] += counts[rank] * f.num_bytes
        _signal(p, heaps[rank] + p.dispatch_signals, epoch, counts[rank])
    return True


@compiled
def receive_dispatch(plan, out, epoch, until_ns):
    """Wait for all ranks' records and spread them; returns `ALL_HERE`, `GIVEN_UP`, or 1 + the rank
    that has not come until then."""
    p = plan_at(plan)
    ranks, first_place = p.num_ranks, epoch % NUM_SETS * p.num_ranks
    own_heap = i64_at(p.heaps_R, ranks)[p.rank]
    signals = own_heap + p.dispatch_signals + first_place * _SIGNAL_BYTES
    values = np.empty(ranks, dtype=np.int64)
    found = _wait_for_all(p, signals, epoch, until_ns, values)
    if found != ALL_HERE:
        return found
    i64_at(spread_at(out).counts_R, ranks)[:] = values & COUNT_MASK
    block_bytes = p.max_tokens * format_at(p.dispatch_format).num_bytes
    spread(
        p.dispatch_format, own_heap + p.dispatch_rows + first_place * block_bytes, p.max_tokens,
        ranks, p.rank * p.num_local, p.num_local, p.rows_per_expert, out,
    )  # fmt: skip
    return ALL_HERE if _is_unchanged(signals, values) else GIVEN_UP


@compiled
def send_combine(plan, out, epoch, y, y_stride, y_kind):
    """Write the experts' rows to the ranks that their tokens came from, then the signals."""
    p, spread_rows = plan_at(plan), spread_at(out)
    f, ranks = format_at(p.combine_format), p.num_ranks
    top_k = format_at(p.dispatch_format).num_ids
    heaps, sent_bytes = i64_at(p.heaps_R, ranks), i64_at(p.sent_bytes_R, ranks)
    counts = i64_at(spread_rows.counts_R, ranks)
    block = p.combine_rows + _place(p, epoch) * p.max_returned * f.num_bytes + f.at_values
    row_of = spread_rows.row_of_NK
    for rank in range(ranks):
        num_sent = collect(
            y, y_stride, y_kind, f.hidden, row_of, counts[rank] * top_k, heaps[rank] + block,
            f.num_bytes, f.kind,
        )  # fmt: skip
        row_of += 8 * counts[rank] * top_k
        sent_bytes[rank] += num_sent * f.num_bytes
        _signal(p, heaps[rank] + p.combine_signals, epoch, num_sent)


@compiled
def receive_combine(plan, epoch, until_ns, ids, weights, num_tokens, sums, kind):
    """Wait for all owners and add up their rows; returns as `receive_dispatch` does."""
    p = plan_at(plan)
    f, ranks = format_at(p.combine_format), p.num_ranks
    first_place = epoch % NUM_SETS * ranks
    own_heap = i64_at(p.heaps_R, ranks)[p.rank]
    signals = own_heap + p.combine_signals + first_place * _SIGNAL_BYTES
    values = np.empty(ranks, dtype=np.int64)
    found = _wait_for_all(p, signals, epoch, until_ns, values)
    if found != ALL_HERE:
        return found
    owner_stride = p.max_returned * f.num_bytes
    sum_of_rows(
        own_heap + p.combine_rows + first_place * owner_stride + f.at_values, f.num_bytes, f.kind,
        owner_stride, f.hidden, np.ones(ranks, dtype=np.bool_), ids, weights, num_tokens,
        format_at(p.dispatch_format).num_ids, p.num_local, (sums, kind),
    )  # fmt: skip
    return ALL_HERE if _is_unchanged(signals, values) else GIVEN_UP


@compiled
def combine(plan, out, epoch, y, y_stride, y_kind, until_ns, ids, weights, num_tokens, sums, kind):
    """Send, wait, and add up."""
    send_combine(plan, out, epoch, y, y_stride, y_kind)
    return receive_combine(plan, epoch, until_ns, ids, weights, num_tokens, sums, kind)


@njit
def _place(p, epoch):
    """Return where this rank's part of a call is among those of all ranks and sets."""
    return epoch % NUM_SETS * p.num_ranks + p.rank


@njit
def _signal(p, signals, epoch, count):
    store_release(signals + _place(p, epoch) * _SIGNAL_BYTES, (epoch << COUNT_BITS) | count)


@njit
def _wait_for_all(p, signals, epoch, until_ns, values):
    """Fill `values` with the signals of all ranks; returns as `receive_dispatch` does."""
    waited_ms = f64_at(p.waited_ms_R, p.num_ranks)
    at_least = epoch << COUNT_BITS
    for rank in range(p.num_ranks):
        signal = signals + rank * _SIGNAL_BYTES
        values[rank] = load_acquire(signal)
        if values[rank] < at_least:
            start_ns = now_ns()
            values[rank] = wait_until(signal, at_least, until_ns)
            waited_ms[rank] += 1e-6 * (now_ns() - start_ns)
            if values[rank] < at_least:
                return 1 + rank
    for value in values:
        if value >> COUNT_BITS != epoch or value & COUNT_MASK >= FIRST_ABORT:
            return GIVEN_UP
    return ALL_HERE


@njit
def _is_unchanged(signals, values):
    """Return whether no rank wrote again while this one was reading. (A later call that is given up
    brings no rows; the next wait finds it.)"""
    fence_acquire()
    for rank in range(len(values)):
        value = load_acquire(signals + rank * _SIGNAL_BYTES)
        if value != values[rank] and value & COUNT_MASK < FIRST_ABORT:
            return False
    return True
