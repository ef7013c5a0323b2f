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
    next_power_of_two,
    row_bytes,
    to_e4m3,
    u8_at,
)
from whalepod.kernels.cpu.compile_cache import compiled

_GROUP = 128
_E4M3_MAX = np.float32(448.0)
_LEAST_AMAX_BITS = np.float32(1e-4).view(np.int32)


@compiled
def destinations(ids, num_tokens, num_choices, num_local, num_ranks, is_in):
    """Fill `[T, R]` flags; return False at an id that is out of range or comes twice."""
    ids, is_in = i64_at(ids, num_tokens * num_choices), u8_at(is_in, num_tokens * num_ranks)
    is_in[:] = 0
    for token in range(num_tokens):
        first = token * num_choices
        for k in range(num_choices):
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
    ids,
    num_choices,
    at_ids,
    weights,
    at_weights,
    num_weights,
    values,
    values_stride,
    values_kind,
    at_values,
    record_kind,
    hidden,
    scales,
    scale_bytes,
    at_scales,
    record_bytes,
    is_for,
    num_tokens,
    first_token,
    targets,
    counts,
):
    """Write each token's record to every destination that it is for; count them in `counts`.

    `targets` and `counts` are arrays over destinations; target 0: it gets nothing.
    """
    num_targets = len(targets)
    is_for = u8_at(is_for, num_tokens * num_targets)
    for index in range(num_tokens):
        token = first_token + index
        for d in range(num_targets):
            if not is_for[index * num_targets + d] or targets[d] == 0:
                continue
            record = targets[d] + counts[d] * record_bytes
            counts[d] += 1
            i32_at(record, 1)[0] = token
            choices = i64_at(ids + 8 * token * num_choices, num_choices)
            written = i32_at(record + at_ids, num_choices)
            for k in range(num_choices):
                written[k] = choices[k]
            copy_bytes(record + at_weights, weights + 4 * token * num_weights, 4 * num_weights)
            copy_row(
                record + at_values, record_kind, values + token * values_stride, values_kind, hidden
            )
            copy_bytes(record + at_scales, scales + token * scale_bytes, scale_bytes)


@compiled
def spread(
    records,
    record_bytes,
    max_tokens,
    at_ids,
    num_choices,
    at_weights,
    num_weights,
    at_values,
    value_bytes,
    at_scales,
    num_columns,
    sources,
    counts,
    first_expert,
    rows_per_expert,
    rows,
    info,
    scales,
    scale_strides,
    rows_per_block,
    row_of,
    weights,
    count_E,
    first_row_E,
    count_ER,
):
    """Copy each record once per local expert that it selects. Arrays are numpy's, filled here.

    sources, counts   `[C]`
    scale_strides     of blocks, rows and columns, in bytes; a column is 4 bytes
    row_of, weights   `[N, K]`, `[N, num_weights]`
    """
    num_local = len(count_ER)
    count_ER[:] = 0
    for c in range(len(sources)):
        for slot in range(counts[c]):
            record = records + (sources[c] * max_tokens + slot) * record_bytes
            ids = i32_at(record + at_ids, num_choices)
            for k in range(num_choices):
                expert = ids[k] - first_expert
                if 0 <= expert < num_local:
                    count_ER[expert, sources[c]] += 1
    next_row = np.empty(num_local, dtype=np.int64)
    total = 0
    for e in range(num_local):
        count_E[e] = count_ER[e].sum()
        first_row_E[e] = e * rows_per_expert if rows_per_expert else total
        next_row[e] = first_row_E[e]
        total += count_E[e]
    n = 0
    for c in range(len(sources)):
        for slot in range(counts[c]):
            record = records + (sources[c] * max_tokens + slot) * record_bytes
            ids = i32_at(record + at_ids, num_choices)
            copy_bytes(
                weights.ctypes.data + 4 * n * num_weights, record + at_weights, 4 * num_weights
            )
            for k in range(num_choices):
                expert = ids[k] - first_expert
                row_of[n, k] = -1
                if not 0 <= expert < num_local:
                    continue
                row = next_row[expert]
                next_row[expert] += 1
                row_of[n, k] = row
                copy_bytes(rows + row * value_bytes, record + at_values, value_bytes)
                i32_at(info + 4 * row, 1)[0] = i32_at(record, 1)[0]
                target = scales + row // rows_per_block * scale_strides[0]
                target += row % rows_per_block * scale_strides[1]
                for column in range(num_columns):
                    found = i32_at(record + at_scales + 4 * column, 1)[0]
                    i32_at(target + column * scale_strides[2], 1)[0] = found
            n += 1


@compiled
def unpack(
    records, record_bytes, num_records, at_ids, num_choices, at_weights, at_values, value_bytes,
    at_scales, scale_bytes, first_expert, num_local, values, scales, ids, weights, tokens, counts,
):  # fmt: skip
    """Copy the parts of each record to rows, and number its choices as this rank's experts."""
    counts, tokens = i64_at(counts, num_local), i64_at(tokens, num_records)
    for n in range(num_records):
        record = records + n * record_bytes
        tokens[n] = i32_at(record, 1)[0]
        copy_bytes(values + n * value_bytes, record + at_values, value_bytes)
        copy_bytes(scales + n * scale_bytes, record + at_scales, scale_bytes)
        chosen = i32_at(record + at_ids, num_choices)
        given = f32_at(record + at_weights, num_choices)
        local = i64_at(ids + 8 * n * num_choices, num_choices)
        kept = f32_at(weights + 4 * n * num_choices, num_choices)
        for k in range(num_choices):
            expert = chosen[k] - first_expert
            if 0 <= expert < num_local:
                local[k], kept[k] = expert, given[k]
                counts[expert] += 1
            else:
                local[k], kept[k] = -1, np.float32(0.0)


@compiled
def collect(rows, row_stride, kind, hidden, row_of, num_selections, out, out_stride, out_kind):
    """Copy the rows of the selections that have one, one behind the other; return how many."""
    row_of = i64_at(row_of, num_selections)
    count = 0
    for selection in range(num_selections):
        row = row_of[selection]
        if row >= 0:
            copy_row(out + count * out_stride, out_kind, rows + row * row_stride, kind, hidden)
            count += 1
    return count


@compiled
def weighted_sums(
    rows, row_stride, kind, hidden, row_of, weights, num_rows, num_choices, out, out_stride,
    out_kind,
):  # fmt: skip
    """Write the weighted sum of the rows of each of `num_rows` lists of `num_choices`."""
    row_of = i64_at(row_of, num_rows * num_choices)
    weights = f32_at(weights, num_rows * num_choices)
    sums = np.empty(hidden, dtype=np.float32)
    at_sums = sums.ctypes.data
    for n in range(num_rows):
        sums[:] = 0
        for selection in range(n * num_choices, (n + 1) * num_choices):
            if row_of[selection] >= 0:
                row = rows + row_of[selection] * row_stride
                add_scaled_row(at_sums, row, kind, weights[selection], hidden)
        copy_row(out + n * out_stride, out_kind, at_sums, F32, hidden)


@compiled
def combine(
    returned, owner_stride, row_stride, kind, hidden, has_answered, ids, weights, num_tokens,
    num_choices, num_local, out, out_kind,
):  # fmt: skip
    """Sum over choices; an owner's rows lie in the order of (token, choice) of its experts."""
    ids, weights = i64_at(ids, num_tokens * num_choices), f32_at(weights, num_tokens * num_choices)
    next_row = np.zeros(len(has_answered), dtype=np.int64)
    sums = np.empty(hidden, dtype=np.float32)
    at_sums = sums.ctypes.data
    for token in range(num_tokens):
        sums[:] = 0
        for selection in range(token * num_choices, (token + 1) * num_choices):
            if ids[selection] < 0:
                continue
            owner = ids[selection] // num_local
            row = returned + owner * owner_stride + next_row[owner] * row_stride
            next_row[owner] += 1
            if has_answered[owner]:
                add_scaled_row(at_sums, row, kind, weights[selection], hidden)
        copy_row(out + token * row_bytes(out_kind, hidden), out_kind, at_sums, F32, hidden)


@compiled
def combine_sums(
    returned, owner_stride, row_stride, kind, hidden, has_answered, ids, num_tokens, num_choices,
    num_local, out, out_kind,
):  # fmt: skip
    """Sum over owners in order; an owner has a row for each token that it was sent."""
    ids = i64_at(ids, num_tokens * num_choices)
    num_ranks = len(has_answered)
    next_row = np.zeros(num_ranks, dtype=np.int64)
    is_hit = np.empty(num_ranks, dtype=np.bool_)
    sums = np.empty(hidden, dtype=np.float32)
    at_sums = sums.ctypes.data
    for token in range(num_tokens):
        sums[:] = 0
        is_hit[:] = False
        for k in range(num_choices):
            if ids[token * num_choices + k] >= 0:
                is_hit[ids[token * num_choices + k] // num_local] = True
        for owner in range(num_ranks):
            if is_hit[owner]:
                row = returned + owner * owner_stride + next_row[owner] * row_stride
                next_row[owner] += 1
                if has_answered[owner]:
                    add_scaled_row(at_sums, row, kind, np.float32(1.0), hidden)
        copy_row(out + token * row_bytes(out_kind, hidden), out_kind, at_sums, F32, hidden)


@compiled
def add_rows(
    rows, row_stride, kind, num_rows, weights, weights_stride, is_for, num_tokens, hidden,
    num_choices, sums, weight_sums,
):  # fmt: skip
    """Add a row and its weights to each of the flagged tokens; return how many these are."""
    is_for = u8_at(is_for, num_tokens)
    row = 0
    for token in range(num_tokens):
        if is_for[token]:
            if row < num_rows:
                source, target = rows + row * row_stride, sums + 4 * token * hidden
                add_scaled_row(target, source, kind, np.float32(1.0), hidden)
                target = weight_sums + 4 * token * num_choices
                source = weights + row * weights_stride
                add_scaled_row(target, source, F32, np.float32(1.0), num_choices)
            row += 1
    return row


@compiled
def quantize(x, kind, num_tokens, hidden, round_scale, values, scales):
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
            if round_scale:
                scale = next_power_of_two(scale)
                factor = np.float32(1.0) / scale
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
