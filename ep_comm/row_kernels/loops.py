"""The loops of `CompiledRows`. Arguments are addresses, counts, strides in bytes, kinds of rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from whalepod.ep_comm.row_kernels.memory import (
    F32,
    add_scaled_row,
    bits_to_f32,
    copy_bytes,
    copy_row,
    f32_at,
    i32_at,
    i64_at,
    row_bytes,
    to_e4m3,
    u8_at,
)
from whalepod.ep_comm.row_kernels.records import format_at, spread_at
from whalepod.kernels.cpu.compile_cache import compiled

_GROUP = 128
_E4M3_MAX = np.float32(448.0)
_LEAST_AMAX_BITS = np.float32(1e-4).view(np.int32)


@compiled
def destinations(ids, num_tokens, top_k, num_local, num_ranks, is_in):
    """Fill `[T, R]` flags; return False at an id that is out of range or comes twice."""
    ids, is_in = i64_at(ids, num_tokens * top_k), u8_at(is_in, num_tokens * num_ranks)
    is_in[:] = 0
    for token in range(num_tokens):
        first = token * top_k
        for k in range(top_k):
            expert = ids[first + k]
            if expert < -1 or expert >= num_local * num_ranks:
                return False
            if expert < 0:
                continue
            for earlier in range(k):
                if ids[first + earlier] == expert:
                    return False
            is_in[token * num_ranks + expert // num_local] = 1
    return True


@compiled
def pack(
    row_format, values, stride, kind, scales, ids, weights, is_for, num_tokens, first_token,
    targets, counts,
):  # fmt: skip
    """Write each token's record to every destination that it is for; count them in `counts`.

    `targets` and `counts` are arrays over destinations; target 0: it gets nothing.
    """
    f = format_at(row_format)
    num_targets = len(targets)
    is_for = u8_at(is_for, num_tokens * num_targets)
    for index in range(num_tokens):
        token = first_token + index
        for d in range(num_targets):
            if not is_for[index * num_targets + d] or targets[d] == 0:
                continue
            record = targets[d] + counts[d] * f.num_bytes
            counts[d] += 1
            i32_at(record, 1)[0] = token
            choices = i64_at(ids + 8 * token * f.num_ids, f.num_ids)
            written = i32_at(record + f.at_ids, f.num_ids)
            for k in range(f.num_ids):
                written[k] = choices[k]
            copy_bytes(
                record + f.at_weights, weights + 4 * token * f.num_weights, 4 * f.num_weights
            )
            copy_row(record + f.at_values, f.kind, values + token * stride, kind, f.hidden)
            copy_bytes(record + f.at_scales, scales + 4 * token * f.num_scales, 4 * f.num_scales)


@compiled
def spread(
    row_format, records, max_tokens, num_ranks, first_expert, num_local, rows_per_expert, out
):
    """Copy each record once per local expert that it selects; counts by source are in `out`."""
    f, out = format_at(row_format), spread_at(out)
    counts = i64_at(out.counts_R, num_ranks)
    count_ER = np.zeros((num_local, num_ranks), dtype=np.int64)
    for source in range(num_ranks):
        for slot in range(counts[source]):
            record = records + (source * max_tokens + slot) * f.num_bytes
            ids = i32_at(record + f.at_ids, f.num_ids)
            for k in range(f.num_ids):
                expert = ids[k] - first_expert
                if 0 <= expert < num_local:
                    count_ER[expert, source] += 1
    next_row = _place_experts(out, count_ER, rows_per_expert)
    row_of = i64_at(out.row_of_NK, counts.sum() * f.num_ids)
    selection = 0
    for source in range(num_ranks):
        for slot in range(counts[source]):
            record = records + (source * max_tokens + slot) * f.num_bytes
            ids = i32_at(record + f.at_ids, f.num_ids)
            for k in range(f.num_ids):
                expert = ids[k] - first_expert
                row_of[selection] = -1
                if 0 <= expert < num_local:
                    row = next_row[expert]
                    next_row[expert] += 1
                    row_of[selection] = row
                    values = out.rows_SH + row * f.value_bytes
                    copy_bytes(values, record + f.at_values, f.value_bytes)
                    i32_at(out.info_S + 4 * row, 1)[0] = i32_at(record, 1)[0]
                    scales = out.scales_SG + 4 * row * f.num_scales
                    copy_bytes(scales, record + f.at_scales, 4 * f.num_scales)
                selection += 1


@njit
def _place_experts(out, count_ER, rows_per_expert):
    """Write what there is of each expert and where; return every expert's first row."""
    num_local, num_ranks = count_ER.shape
    count_E, first_row_E = i32_at(out.count_E, num_local), i64_at(out.first_row_E, num_local)
    ranges_ER = i64_at(out.ranges_ER, num_local * num_ranks)
    next_row = np.empty(num_local, dtype=np.int64)
    total = 0
    for e in range(num_local):
        begin = 0
        for source in range(num_ranks):
            ranges_ER[e * num_ranks + source] = (begin << 32) | count_ER[e, source]
            begin += count_ER[e, source]
        count_E[e] = begin
        first_row_E[e] = e * rows_per_expert if rows_per_expert else total
        next_row[e] = first_row_E[e]
        if out.expert_S:
            i64_at(out.expert_S + 8 * total, begin)[:] = e
        total += begin
    i64_at(out.num_rows, 1)[0] = total
    return next_row


@compiled
def unpack(
    row_format, records, num_records, first_expert, num_local, values, scales, ids, weights, info,
    counts,
):  # fmt: skip
    """Copy the parts of each record to rows, and number its choices as this rank's experts."""
    f = format_at(row_format)
    counts, info = i64_at(counts, num_local), i32_at(info, num_records)
    for n in range(num_records):
        record = records + n * f.num_bytes
        info[n] = i32_at(record, 1)[0]
        copy_bytes(values + n * f.value_bytes, record + f.at_values, f.value_bytes)
        copy_bytes(scales + 4 * n * f.num_scales, record + f.at_scales, 4 * f.num_scales)
        chosen = i32_at(record + f.at_ids, f.num_ids)
        given = f32_at(record + f.at_weights, f.num_ids)
        local = i64_at(ids + 8 * n * f.num_ids, f.num_ids)
        kept = f32_at(weights + 4 * n * f.num_ids, f.num_ids)
        for k in range(f.num_ids):
            expert = chosen[k] - first_expert
            if 0 <= expert < num_local:
                local[k], kept[k] = expert, given[k]
                counts[expert] += 1
            else:
                local[k], kept[k] = -1, np.float32(0.0)


@compiled
def collect(rows, row_stride, kind, hidden, row_of, num_selections, out, out_stride, out_kind):
    """Copy the rows of the selections that have one, one after the other; return how many."""
    row_of = i64_at(row_of, num_selections)
    count = 0
    for selection in range(num_selections):
        row = row_of[selection]
        if row >= 0:
            copy_row(out + count * out_stride, out_kind, rows + row * row_stride, kind, hidden)
            count += 1
    return count


@compiled
def combine(
    returned, row_stride, kind, owner_stride, hidden, has_answered, ids, weights, num_tokens, top_k,
    num_local, out,
):  # fmt: skip
    """Sum over choices; an owner's rows lie in the order of (token, choice) of its experts.

    out  address and kind of the sums, contiguous
    """
    ids, weights = i64_at(ids, num_tokens * top_k), f32_at(weights, num_tokens * top_k)
    next_row = np.zeros(len(has_answered), dtype=np.int64)
    sums = np.empty(hidden, dtype=np.float32)
    at_sums = sums.ctypes.data
    for token in range(num_tokens):
        sums[:] = 0
        for selection in range(token * top_k, (token + 1) * top_k):
            if ids[selection] < 0:
                continue
            owner = ids[selection] // num_local
            row = returned + owner * owner_stride + next_row[owner] * row_stride
            next_row[owner] += 1
            if has_answered[owner]:
                add_scaled_row(at_sums, row, kind, weights[selection], hidden)
        copy_row(out[0] + token * row_bytes(out[1], hidden), out[1], at_sums, F32, hidden)


@compiled
def add_rows(rows, row_stride, kind, num_rows, is_for, num_tokens, hidden, sums):
    """Add a row to each of the flagged tokens; return how many these are."""
    is_for = u8_at(is_for, num_tokens)
    row = 0
    for token in range(num_tokens):
        if is_for[token]:
            if row < num_rows:
                source, target = rows + row * row_stride, sums + 4 * token * hidden
                add_scaled_row(target, source, kind, np.float32(1.0), hidden)
            row += 1
    return row


@compiled
def quantize(x, kind, num_tokens, hidden, values, scales):
    """Round rows to e4m3, with a scale per 128 channels; see `rows.quantize_rows`."""
    row = np.empty(hidden, dtype=np.float32)
    bits = row.view(np.int32)
    num_groups = hidden // _GROUP
    for token in range(num_tokens):
        copy_row(row.ctypes.data, F32, x + token * row_bytes(kind, hidden), kind, hidden)
        out = u8_at(values + token * hidden, hidden)
        scales_G = f32_at(scales + 4 * token * num_groups, num_groups)
        for g in range(num_groups):
            first = g * _GROUP
            amax = _largest(bits[first : first + _GROUP])
            scale, factor = amax / _E4M3_MAX, _E4M3_MAX / amax
            scales_G[g] = scale
            for i in range(first, first + _GROUP):
                out[i] = to_e4m3(row[i] * factor)


@njit
def _largest(bits):
    """Return max(|x|, the floor) of f32 given by their bits; NaN if one is: it has most bits."""
    largest = _LEAST_AMAX_BITS
    for value in bits:
        largest = max(largest, np.int32(value & np.int32(0x7FFFFFFF)))
    return bits_to_f32(largest)
