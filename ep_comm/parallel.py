"""Routed experts spread over the ranks of a group: dispatch, this rank's experts, combine.

All ranks call the same layers in the same order, also without tokens of their own (T = 0). A call
that ends without all ranks raises `CallFailed`: text must not lack an expert. The owner of the step
then calls `abort` on the mode, so that the other ranks hear of it at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.ep_comm.group import CallFailed, CallStatus
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.kernels.interface import Kernels, Packed

COMBINE_PATIENCE = 2.0
"""A combine waits longer than a dispatch: a rank may come to it only after its own dispatch has
run into the timeout, and must not be taken for the dead one."""


class LowLatencyExperts:
    """`RoutedExperts` over the low-latency mode: every choice is computed as a row of its own.

    With f32 rows both ways and no `pre_reduce`, the owner of a token sums its unrounded expert rows
    in k order, as one rank with all experts does: the bits are the same (DESIGN: batch-invariant
    mode). A model in another dtype rounds each expert's row once more than one rank would.

    mode     with packed output; several layers share it
    packed   this rank's experts of one layer
    """

    def __init__(
        self, mode: LowLatency, kernels: Kernels, packed: Packed, *, timeout_ms: float
    ) -> None:
        if mode.config.output != "packed" or mode.config.dispatch_dtype == "float8":
            raise ValueError(
                f"the experts take packed float32 or bfloat16 rows, the mode gives "
                f"{mode.config.output} {mode.config.dispatch_dtype}: change its configuration"
            )
        self._mode = mode
        self._kernels = kernels
        self._packed = packed
        self._timeout_ms = timeout_ms

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        weights_sent = weights_TK if self._mode.config.pre_reduce else None
        result = self._mode.dispatch(x_TH, ids_TK, self._timeout_ms, weights_sent)
        _raise_unless_ok(result.status)
        count_E = result.count_E.long()
        ids_S1 = torch.arange(len(count_E)).repeat_interleave(count_E)[:, None]
        x_SH = result.rows[: len(ids_S1)].to(x_TH.dtype)
        y_SH = self._kernels.experts(x_SH, ids_S1, torch.ones(ids_S1.shape), self._packed)
        y_TH, status = self._mode.combine(
            y_SH, result.handle, weights_TK, COMBINE_PATIENCE * self._timeout_ms
        )
        _raise_unless_ok(status)
        return y_TH


class ThroughputExperts:
    """`RoutedExperts` over the throughput mode: a rank sums its own experts of a token.

    Fewer bytes than one row per choice; sums are formed in another order than on one rank.
    """

    def __init__(
        self, mode: Throughput, kernels: Kernels, packed: Packed, *, timeout_ms: float
    ) -> None:
        if mode.config.dispatch_dtype == "float8":
            raise ValueError(
                "the experts take float32 or bfloat16 rows, the mode gives float8: "
                "change its dispatch_dtype"
            )
        self._mode = mode
        self._kernels = kernels
        self._packed = packed
        self._timeout_ms = timeout_ms

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        received = self._mode.dispatch(x_TH, ids_TK, weights_TK, self._timeout_ms)
        _raise_unless_ok(received.status)
        y_NH = self._kernels.experts(
            received.x_NH.to(x_TH.dtype), received.ids_NK, received.weights_NK, self._packed
        )
        y_TH, _, status = self._mode.combine(
            y_NH, received.routing, COMBINE_PATIENCE * self._timeout_ms
        )
        _raise_unless_ok(status)
        return y_TH.to(x_TH.dtype)


def _raise_unless_ok(status: CallStatus) -> None:
    if not status.ok:
        raise CallFailed(status)
