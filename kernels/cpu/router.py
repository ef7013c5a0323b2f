"""The router: scores, group limit, stable top-k and weights of each token, in f32."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from whalepod.kernels.cpu.abi import ParallelKernel, arguments, items, kernel_part, record
from whalepod.kernels.cpu.exponentials import exp_f32, store_sums
from whalepod.kernels.cpu.packed import PackedLinear, WeightFormat
from whalepod.kernels.cpu.packed_tiles import (
    BLOCK_COLUMNS,
    BLOCK_GROUPS,
    GROUP,
    block_of_sums,
    multiply,
)
from whalepod.kernels.cpu.rows import widen_row
from whalepod.kernels.cpu.simd import advance, load, store
from whalepod.kernels.cpu.workspace import Workspace, address, aligned
from whalepod.kernels.interface import GateConfig

ROWS_PER_ITEM, ROWS_PER_PRODUCT = 8, 16


@njit
def _score(logits, num_experts, is_sigmoid, scores):
    if is_sigmoid:
        for e in range(num_experts):
            store(scores, e, np.float32(1.0) / (np.float32(1.0) + exp_f32(-load(logits, e))))
        return
    largest = load(logits, 0)
    for e in range(1, num_experts):
        largest = max(largest, load(logits, e))
    total = np.float32(0.0)
    for e in range(num_experts):
        value = exp_f32(load(logits, e) - largest)
        store(scores, e, value)
        total += value
    for e in range(num_experts):
        store(scores, e, load(scores, e) / total)


@njit
def _best(values, count, taken):
    """Return the index of the largest value whose `taken` is 0; the lowest index wins ties."""
    best = -1
    best_value = np.float32(-np.inf)
    for i in range(count):
        value = load(values, i)
        if load(taken, i) == np.float32(0.0) and (best < 0 or value > best_value):
            best, best_value = i, value
    return best


@njit
def _score_groups(choice, num_groups, group_size, is_top2, group_scores):
    for group in range(num_groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(group * group_size, (group + 1) * group_size):
            value = load(choice, e)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        is_sum = is_top2 and group_size > 1
        store(group_scores, group, first + second if is_sum else first)


@njit
def _mask_groups(choice, num_groups, num_selected, group_size, is_top2, scratch):
    """Set the experts outside the best groups to -inf."""
    group_scores, taken = scratch, advance(scratch, num_groups)
    _score_groups(choice, num_groups, group_size, is_top2, group_scores)
    for group in range(num_groups):
        store(taken, group, np.float32(0.0))
    for _ in range(num_selected):
        store(taken, _best(group_scores, num_groups, taken), np.float32(1.0))
    for group in range(num_groups):
        if load(taken, group) == np.float32(0.0):
            for e in range(group * group_size, (group + 1) * group_size):
                store(choice, e, np.float32(-np.inf))


_GateArguments = record(
    "num_tokens num_experts top_k num_groups num_selected is_sigmoid:bool is_top2:bool",
    "is_normalized:bool factor:float has_bias:bool bias:f32 logits:f32 ids:i64 weights:f32",
    "scratch:f32",  # 3 E + 2 groups for each token
    "is_routing:bool",  # Whether the logits are still to be computed; the rest is for that
    "hidden x:values router:f32 group_stride column_groups",
    "wide:f32",  # Room for `x` in f32
)


@kernel_part
def _choose(a, token):
    """Choose the experts of one token."""
    scores = advance(a.scratch, token * (3 * a.num_experts + 2 * a.num_groups))
    choice, taken = advance(scores, a.num_experts), advance(scores, 2 * a.num_experts)
    ids, weights = advance(a.ids, token * a.top_k), advance(a.weights, token * a.top_k)
    _score(advance(a.logits, token * a.num_experts), a.num_experts, a.is_sigmoid, scores)
    for e in range(a.num_experts):
        value = load(scores, e)
        store(choice, e, value + load(a.bias, e) if a.has_bias else value)
        store(taken, e, np.float32(0.0))
    if a.num_selected < a.num_groups:
        groups = advance(scores, 3 * a.num_experts)
        size = a.num_experts // a.num_groups
        _mask_groups(choice, a.num_groups, a.num_selected, size, a.is_top2, groups)
    total = np.float32(0.0)
    for k in range(a.top_k):
        expert = _best(choice, a.num_experts, taken)
        store(taken, expert, np.float32(1.0))
        store(ids, k, expert)
        total += load(scores, expert)
        store(weights, k, load(scores, expert))
    divisor = total + np.float32(1e-20) if a.is_normalized else np.float32(1.0)
    for k in range(a.top_k):
        store(weights, k, load(weights, k) / divisor * a.factor)


@kernel_part
def _route(block, a, num_items):
    """Compute the logits, in two stages."""
    for item in items(block, 0, num_items):
        first = item * ROWS_PER_ITEM
        for token in range(first, min(first + ROWS_PER_ITEM, a.num_tokens)):
            start = token * a.hidden
            widen_row(advance(a.x, start), a.hidden, advance(a.wide, start))
    sums = block_of_sums()
    column_items = -(-a.column_groups // BLOCK_GROUPS)
    for item in items(block, 1, -(-a.num_tokens // ROWS_PER_PRODUCT) * column_items):
        row, group = item // column_items * ROWS_PER_PRODUCT, item % column_items * BLOCK_GROUPS
        rows, column = min(ROWS_PER_PRODUCT, a.num_tokens - row), group * GROUP
        multiply(
            advance(a.router, group * a.group_stride), a.group_stride,
            min(BLOCK_GROUPS, a.column_groups - group), advance(a.wide, row * a.hidden), a.hidden,
            rows, a.hidden, 0, sums,
        )  # fmt: skip
        for r in range(rows):
            target = advance(a.logits, (row + r) * a.num_experts + column)
            count = min(BLOCK_COLUMNS, a.num_experts - column)
            store_sums(advance(sums, r * BLOCK_COLUMNS), count, target)


def _gate_kernel(block):
    a = arguments(block, _GateArguments)
    num_items = -(-a.num_tokens // ROWS_PER_ITEM)
    if a.is_routing:
        _route(block, a, num_items)
    for item in items(block, 2, num_items, is_last=True):
        first = item * ROWS_PER_ITEM
        for token in range(first, min(first + ROWS_PER_ITEM, a.num_tokens)):
            _choose(a, token)


GATE = ParallelKernel(_gate_kernel, _GateArguments)


class RouterOperations:
    """The part of `Kernels` that chooses experts."""

    def __init__(self, work: Workspace, weights: WeightFormat) -> None:
        self._work, self._weights = work, weights

    def gate(
        self, logits_TE: Tensor, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        return self._gate(logits_TE, None, None, bias_E, config)

    def pack_router(self, weight_EH: Tensor) -> PackedLinear:
        return self._weights.pack(weight_EH.unsqueeze(0))

    def route(
        self, x_TH: Tensor, router: PackedLinear, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        logits_TE = self._work.new((x_TH.shape[0], router.num_columns), torch.float32)
        return self._gate(logits_TE, x_TH, router, bias_E, config)

    def _gate(
        self,
        logits_TE: Tensor,
        x_TH: Tensor | None,
        router: PackedLinear | None,
        bias_E: Tensor | None,
        config: GateConfig,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = logits_TE.shape
        top_k, num_groups = config.num_experts_per_token, config.num_groups
        ids_TK = self._work.new((num_tokens, top_k), torch.int64)
        weights_TK = self._work.new((num_tokens, top_k), torch.float32)
        wide = aligned(4 * num_tokens * (3 * num_experts + 2 * num_groups))
        scratch = self._work.borrow(wide + 4 * (0 if x_TH is None else x_TH.numel()))
        gate = _GateArguments(
            num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, num_groups=num_groups,
            num_selected=config.num_selected_groups, is_sigmoid=config.scoring == "sigmoid",
            is_top2=config.group_score == "top2_sum", is_normalized=config.normalize_weights,
            factor=config.scaling_factor, has_bias=bias_E is not None, bias=address(bias_E),
            logits=logits_TE.data_ptr(), ids=ids_TK.data_ptr(), weights=weights_TK.data_ptr(),
            scratch=scratch, is_routing=x_TH is not None,
            hidden=0 if x_TH is None else x_TH.shape[1], x=address(x_TH),
            router=0 if router is None else router.address,
            group_stride=0 if router is None else router.group_stride,
            column_groups=0 if router is None else router.num_groups, wide=scratch + wide,
        )  # fmt: skip
        dtype = torch.float32 if x_TH is None else x_TH.dtype
        self._work.run(GATE, dtype, self._work.num_threads if num_tokens else 0, gate)
        return ids_TK, weights_TK
