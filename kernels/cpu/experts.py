"""Gated MLPs in one kernel: all routed experts of a step, or a dense one.

Tokens are grouped by expert, so each weight comes from memory once for all tokens that chose its
expert. Stages: sort (and quantise rows for int8), gather the rows, gate and up with SwiGLU, then
down with the weighted sum. A dense MLP is one expert that all tokens go through, in parts of 256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
from whalepod.kernels.cpu.exponentials import gate_group
from whalepod.kernels.cpu.linear import QUANTIZED_PER_ITEM, store_block
from whalepod.kernels.cpu.packed import PackedExperts, WeightFormat
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    GROUP,
    block_of_sums,
    multiply,
)
from whalepod.kernels.cpu.rows import add_row, combine_rows, copy_row
from whalepod.kernels.cpu.simd import (
    EXACT_POINTERS,
    advance,
    f32_pointer,
    load,
    pointer_like,
    store,
)
from whalepod.kernels.cpu.workspace import Workspace, address, aligned

ROWS_PER_PART = 256
"""Rows of a dense MLP that an item takes at once."""

ROWS_PER_COPY = 32
"""Rows that are gathered at once."""


_ExpertsArguments = record(
    "num_tokens top_k num_experts hidden",
    "length inner_length",  # H and I as products read them
    "gate_up:operands gate_up_stride gate_up_step gate_up_groups down:operands",
    "down_stride down_step down_groups x:values",
    "is_routed:bool",  # else one MLP for all tokens
    "ids:i64 weights:f32 out value_bytes is_f32:bool is_added:bool added:values",
    "rows:operands",  # rows that are multiplied, `[T]`: `x` itself, or what it is quantised to
    "row_stride num_quantized",
    "sorted_rows:operands",  # `[T K]`: the rows of the pairs, sorted by expert
    "activations:operands",  # `[T K]`
    "activation_stride num_gate_items",
    "lists:i64",  # places, rows, count and active experts: see `_group_by_expert`
    "y",  # f32 `[T K, 64]` for each thread
    "y_bytes block_rows down_rows tile_rows",
)
"""Strides in elements; of quantised rows in bytes."""


@kernel_part
def _group_by_expert(a, places, rows, active):
    """Sort the (token, k) pairs by expert; return how many experts have any.

    places  [T, K]       of each pair, its index in the sorted list, or -1
    rows    [T * K]      the token of each sorted pair
    active  [2 E + 2]    (expert, first sorted pair) of each active expert, then an end mark
    """
    num_pairs = a.num_tokens * a.top_k
    counts = advance(active, 2 * a.num_experts + 2)
    for e in range(a.num_experts):
        store(counts, e, 0)
    for pair in range(num_pairs):
        expert = load(a.ids, pair)
        if expert >= 0:
            store(counts, expert, load(counts, expert) + 1)
    num_active, start = 0, 0
    for e in range(a.num_experts):
        count = load(counts, e)
        if count > 0:
            store(active, 2 * num_active, e)
            store(active, 2 * num_active + 1, start)
            num_active += 1
        store(counts, e, start)
        start += count
    store(active, 2 * num_active + 1, start)
    for pair in range(num_pairs):
        expert = load(a.ids, pair)
        store(places, pair, -1)
        if expert >= 0:
            place = load(counts, expert)
            store(counts, expert, place + 1)
            store(places, pair, place)
            store(rows, place, pair // a.top_k)
    return num_active


@kernel_part
def _part(a, active, which):
    """Return the expert of a part, and where its rows begin and end."""
    if a.is_routed:
        return load(active, 2 * which), load(active, 2 * which + 1), load(active, 2 * which + 3)
    start = which * ROWS_PER_PART
    return np.int64(0), start, min(start + ROWS_PER_PART, a.num_tokens)


@by_operands
def prepare_row(weight, x, length, record):
    """Quantise a row; nothing where rows are multiplied as they are."""
    raise NotImplementedError


@prepare_row.written_for(*EXACT_POINTERS)
def _leave_row(weight, x, length, record):
    pass


@kernel_part
def _gather_rows(block, a, rows, num_rows):
    """Copy `num_rows` rows, chosen by number, side by side; all threads, one stage."""
    for item in items(block, 1, -(-num_rows // ROWS_PER_COPY)):
        first = item * ROWS_PER_COPY
        for place in range(first, min(first + ROWS_PER_COPY, num_rows)):
            row = advance(a.rows, load(rows, place) * a.row_stride)
            copy_row(row, a.row_stride, advance(a.sorted_rows, place * a.row_stride))


@by_operands
def keep_gated(weight, sums, num_rows, num_pairs, block, length, out, stride):
    """Write silu(gate) * up of a block of 32 inner features, of which there are 16 per pair."""
    raise NotImplementedError


@keep_gated.written_for(*EXACT_POINTERS)
def _store_gated(weight, sums, num_rows, num_pairs, block, length, out, stride):
    for r in range(num_rows):
        for pair in range(num_pairs):
            source = advance(sums, r * BLOCK_COLUMNS + 2 * pair * GROUP)
            gate_group(source, advance(out, r * stride + 2 * block * GROUP + pair * GROUP))


@kernel_part
def _gate_up(a, rows, row_stride, part, item, sums):
    """Set 32 inner features of a part's activations."""
    expert, start, end = part
    group = item * BLOCK_GROUPS
    # a quantised row may end with a block of zeros
    groups = max(0, min(BLOCK_GROUPS, a.gate_up_groups - group))
    weight = advance(a.gate_up, expert * a.gate_up_stride + group * a.gate_up_step)
    for row in range(start, end, a.block_rows):
        num_rows = min(a.block_rows, end - row)
        multiply(
            weight, a.gate_up_step, groups, advance(rows, row * row_stride), row_stride, num_rows,
            a.length, a.tile_rows, sums,
        )  # fmt: skip
        out = advance(a.activations, row * a.activation_stride)
        keep_gated(
            weight, sums, num_rows, groups // 2, item, a.inner_length, out, a.activation_stride
        )


@kernel_part
def _down(a, part, group, y):
    """Set y[r, c], 64 columns of a part's rows times `down`."""
    expert, start, end = part
    weight = advance(a.down, expert * a.down_stride + group * a.down_step)
    for row in range(start, end, a.down_rows):
        multiply(
            weight, a.down_step, min(BLOCK_GROUPS, a.down_groups - group),
            advance(a.activations, row * a.activation_stride), a.activation_stride,
            min(a.down_rows, end - row), a.inner_length, a.tile_rows,
            advance(y, (row - start) * BLOCK_COLUMNS),
        )  # fmt: skip


@kernel_part
def _combine_tokens(a, places, y, column, count):
    """Write `count` columns of every token's weighted sum, in f32 or in the model dtype."""
    for token in range(a.num_tokens):
        first = token * a.top_k
        weights, token_places = advance(a.weights, first), advance(places, first)
        out = a.out + (token * a.hidden + column) * a.value_bytes
        if a.is_f32:
            target = f32_pointer(out)
            combine_rows(weights, token_places, a.top_k, y, BLOCK_COLUMNS, count, target)
        else:
            target_like = pointer_like(a.x, out)
            combine_rows(weights, token_places, a.top_k, y, BLOCK_COLUMNS, count, target_like)


@kernel_part
def _store_part(a, part, y, column, count):
    """Write `count` columns of a part of a dense MLP."""
    _, start, end = part
    out = a.out + (start * a.hidden + column) * a.value_bytes
    store_block(y, end - start, count, out, a.is_f32, a.hidden, a.x)
    if a.is_added:
        target = pointer_like(a.x, out)
        for r in range(end - start):
            added = advance(a.added, (start + r) * a.hidden + column)
            add_row(added, count, advance(target, r * a.hidden))


def _experts_kernel(block):
    a = arguments(block, _ExpertsArguments)
    places, rows = a.lists, advance(a.lists, a.num_tokens * a.top_k)
    num_active_slot = advance(rows, a.num_tokens * a.top_k)
    active = advance(num_active_slot, 1)
    sums = block_of_sums()
    y = f32_pointer(a.y + thread_number(block) * a.y_bytes)

    num_sorts = 1 if a.is_routed else 0
    for item in items(block, 0, num_sorts - (-a.num_quantized // QUANTIZED_PER_ITEM)):
        if item < num_sorts:
            store(num_active_slot, 0, _group_by_expert(a, places, rows, active))
            continue
        first = (item - num_sorts) * QUANTIZED_PER_ITEM
        for token in range(first, min(first + QUANTIZED_PER_ITEM, a.num_quantized)):
            record = advance(a.rows, token * a.row_stride)
            prepare_row(a.gate_up, advance(a.x, token * a.hidden), a.hidden, record)

    num_parts, source, stride = -(-a.num_tokens // ROWS_PER_PART), a.rows, a.row_stride
    if a.is_routed:
        num_parts = load(num_active_slot, 0)
        if a.num_tokens == 1:
            stride = 0
        else:
            _gather_rows(block, a, rows, load(active, 2 * num_parts + 1))
            source = a.sorted_rows

    for item in items(block, 2, num_parts * a.num_gate_items):
        part = _part(a, active, item // a.num_gate_items)
        _gate_up(a, source, stride, part, item % a.num_gate_items, sums)

    column_items = -(-a.down_groups // BLOCK_GROUPS)
    num_alone = 1 if a.is_routed else num_parts
    for item in items(block, 3, num_alone * column_items, is_last=True):
        group = item % column_items * BLOCK_GROUPS
        column = group * GROUP
        count = min(BLOCK_COLUMNS, a.hidden - column)
        if a.is_routed:
            for which in range(num_parts):
                part = _part(a, active, which)
                _down(a, part, group, advance(y, part[1] * BLOCK_COLUMNS))
            _combine_tokens(a, places, y, column, count)
        else:
            part = _part(a, active, item // column_items)
            _down(a, part, group, y)
            _store_part(a, part, y, column, count)


EXPERTS = ParallelKernel(_experts_kernel, _ExpertsArguments)


class ExpertOperations:
    """The part of `Kernels` where weights are gated."""

    def __init__(self, work: Workspace, weights: WeightFormat) -> None:
        self._work, self.pack_experts = work, weights.pack_gated
        self._weights = weights
        self._ones_S1 = torch.ones(0, 1)

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> PackedExperts:
        return self._weights.pack_gated(gate_up_JH.unsqueeze(0), down_HI.unsqueeze(0))

    def experts(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts
    ) -> Tensor:
        return self._compute(x_TH, packed, x_TH.dtype, ids_TK=ids_TK, weights_TK=weights_TK)

    def expert_rows(self, x_SH: Tensor, ids_S: Tensor, packed: PackedExperts) -> Tensor:
        if len(ids_S) > len(self._ones_S1):
            self._ones_S1 = torch.ones(2 * len(ids_S), 1)
        self._work.keep(self._ones_S1)
        # the sum of one, with weight one
        ids_SK, weights_SK = ids_S[:, None], self._ones_S1
        return self._compute(x_SH, packed, torch.float32, ids_TK=ids_SK, weights_TK=weights_SK)

    def gated_mlp(
        self, x_TH: Tensor, packed: PackedExperts, add_to_TH: Tensor | None = None
    ) -> Tensor:
        return self._compute(x_TH, packed, x_TH.dtype, add_to_TH=add_to_TH)

    def _compute(
        self,
        x_TH: Tensor,
        packed: PackedExperts,
        out_dtype: torch.dtype,
        *,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        out_TH = self._work.new(x_TH.shape, out_dtype)
        num_tokens, top_k = x_TH.shape[0], 1 if ids_TK is None else ids_TK.shape[1]
        if not num_tokens:
            return out_TH
        gate_up, down, format_ = packed.gate_up, packed.down, packed.format
        experts = _ExpertsArguments(
            num_tokens=num_tokens, top_k=top_k, num_experts=packed.num_experts,
            hidden=packed.hidden, length=format_.padded(packed.hidden),
            inner_length=format_.padded(packed.inner), gate_up=gate_up.address,
            gate_up_stride=gate_up.weight_stride, gate_up_step=gate_up.group_stride,
            gate_up_groups=gate_up.num_groups, down=down.address, down_stride=down.weight_stride,
            down_step=down.group_stride, down_groups=down.num_groups, x=x_TH.data_ptr(),
            is_routed=ids_TK is not None, ids=address(ids_TK), weights=address(weights_TK),
            out=out_TH.data_ptr(), value_bytes=out_TH.element_size(),
            is_f32=out_dtype == torch.float32, is_added=add_to_TH is not None,
            added=address(add_to_TH), block_rows=format_.block_rows,
            down_rows=format_.down_rows if ids_TK is not None else format_.block_rows,
            tile_rows=format_.tile_rows,
            **self._lay_out_scratch(x_TH, packed, num_tokens * top_k, ids_TK is not None),
        )  # fmt: skip
        kernel = with_operands(EXPERTS, format_.operands(x_TH.dtype))
        self._work.run(kernel, x_TH.dtype, self._work.num_threads, experts)
        return out_TH

    def _lay_out_scratch(
        self, x_TH: Tensor, packed: PackedExperts, num_pairs: int, is_routed: bool
    ) -> dict[str, Any]:
        """Return the arguments that are memory between stages, and its strides."""
        format_, num_tokens, num_groups = packed.format, x_TH.shape[0], packed.gate_up.num_groups
        lists = aligned(8 * (2 * num_pairs + 3 * packed.num_experts + 4) * is_routed)
        is_sorted = is_routed and num_tokens > 1
        y_bytes = 4 * BLOCK_COLUMNS * (num_pairs if is_routed else min(num_pairs, ROWS_PER_PART))
        if format_.quantizes_rows:
            row_bytes, inner_bytes, value_bytes = (
                aligned(format_.record_bytes(packed.hidden)),
                aligned(format_.record_bytes(packed.inner)), 1,
            )  # fmt: skip
            num_quantized, num_gate_items = num_tokens, format_.padded(packed.inner) // 32
        else:
            value_bytes = x_TH.element_size()
            row_bytes, inner_bytes = value_bytes * packed.hidden, value_bytes * num_groups * 8
            num_quantized, num_gate_items = 0, -(-num_groups // BLOCK_GROUPS)
        sorted_rows = lists + num_quantized * row_bytes
        activations = aligned(sorted_rows + num_pairs * row_bytes * is_sorted)
        y = aligned(activations + num_pairs * inner_bytes)
        scratch = self._work.borrow(y + y_bytes * self._work.num_threads)
        return {
            "rows": scratch + lists if num_quantized else x_TH.data_ptr(),
            "row_stride": row_bytes // value_bytes,
            "num_quantized": num_quantized,
            "sorted_rows": scratch + sorted_rows,
            "activations": scratch + activations,
            "activation_stride": inner_bytes // value_bytes,
            "num_gate_items": num_gate_items,
            "lists": scratch,
            "y": scratch + y,
            "y_bytes": y_bytes,
        }
