"""Routed experts spread over the ranks of a group: dispatch, this rank's experts, combine.

All ranks call the same layers in the same order, also without tokens of their own (T = 0). A call
that ends without all ranks raises `CallFailed`: text must not lack an expert. The owner of the step
then calls `Dispatcher.abort`, so that the other ranks hear of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from whalepod.ep_comm.dispatched import Dispatched
from whalepod.ep_comm.eplb.balancer import BalancedLayer, ExpertBalancer
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import CallFailed, CallStatus, Group
from whalepod.ep_comm.routed_experts import LoadExpert, LocalExperts
from whalepod.kernels.interface import Kernels, Packed

COMBINE_FACTOR = 2.0
"""A combine waits longer than a dispatch: a rank may come to it only after its own dispatch has
run into the timeout, and must not be taken for the dead one."""

OnProgress: TypeAlias = Callable[[str, str], None]
"""(layer, operation): called at the start of each operation, so that a stuck rank can be named."""

ModeName = Literal["low_latency", "throughput"]


@dataclass(slots=True)
class Timeouts:
    """How long calls wait. Shared by all layers; the owner of the steps may change it between two
    of them, on all ranks alike."""

    dispatch_ms: float

    @property
    def combine_ms(self) -> float:
        return COMBINE_FACTOR * self.dispatch_ms


def ignore_progress(layer: str, operation: str) -> None:
    """The `OnProgress` of a group that is not watched."""


class Dispatcher:
    """An `ExpertPlacement` over a group of ranks: one for all layers of a rank.

    Each step has one mode, on all ranks. Before the group is there (warm-up), a rank works "alone",
    with its own experts only: such results mean nothing.

    exchanges    of the modes: what differs is how many tokens fit, and the layout
    on_progress  hears of every operation of every layer
    balancer     where experts have replicas that move: the exchanges are between its slots
    """

    def __init__(
        self,
        group: Group,
        kernels: Kernels,
        exchanges: Mapping[ModeName, ExpertExchange],
        *,
        timeouts: Timeouts,
        on_progress: OnProgress = ignore_progress,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        config = exchanges["low_latency"].config
        for mode, one in exchanges.items():
            if one.config.dispatch_dtype == "float8":
                raise ValueError(
                    f"the experts take float32 or bfloat16 rows, the exchange for {mode} steps "
                    f"gives float8: change its dispatch_dtype"
                )
        first = group.rank * config.num_local
        self.owned: Sequence[int] = range(first, first + config.num_local)
        self._num_experts = config.num_experts
        if balancer is not None:
            self.owned, self._num_experts = balancer.owned, balancer.slots.num_experts
        self.balancer = balancer
        self.group = group
        self.kernels = kernels
        self.timeouts = timeouts
        self.on_progress = on_progress
        self._exchanges = exchanges
        self.exchange: ExpertExchange | None = None
        """What the step in hand goes over; None: alone."""

    def routed(self, packed: Packed, layer: str, load_expert: LoadExpert) -> SpreadExperts:
        """Return all experts of a layer; `packed` are those of this rank."""
        alone = LocalExperts(self.kernels, packed, self.owned, self._num_experts)
        balancer = self.balancer
        balanced = None if balancer is None else balancer.add_layer(packed, load_expert)
        return SpreadExperts(self, alone, packed, layer, balanced)

    def enter(self, mode: ModeName | None) -> None:
        """Take the mode of the step that begins; None: alone."""
        self.exchange = None if mode is None else self._exchanges[mode]

    @property
    def num_calls(self) -> tuple[int, int]:
        """Return how far the calls of both modes are numbered: equal on all ranks between steps
        that went well."""
        return self._exchanges["low_latency"].last_call, self._exchanges["throughput"].last_call

    def abort(self) -> None:
        """Give up the step: peers that wait for this rank hear of it at once."""
        if self.exchange is not None:
            self.exchange.abort()

    def resume(self, num_calls: tuple[int, int]) -> None:
        """Number the next calls above `num_calls`, the most of any rank, after a failed step."""
        self._exchanges["low_latency"].resume(num_calls[0] + 1)
        self._exchanges["throughput"].resume(num_calls[1] + 1)


class SpreadExperts:
    """`RoutedExperts` of one layer, over the exchange that the step has.

    By expert with f32 rows on the way back, the owner of a token sums its unrounded expert rows in
    k order, as one rank with all experts does: the bits are the same (ARCHITECTURE: batch-invariant
    mode). Per token a rank sums its own experts of a token: fewer bytes, another order of sums.
    """

    is_replayable = False

    def __init__(
        self,
        dispatcher: Dispatcher,
        alone: LocalExperts,
        packed: Packed,
        layer: str,
        balanced: BalancedLayer | None,
    ) -> None:
        self._balanced = balanced
        self._dispatcher = dispatcher
        self._alone = alone
        self._packed = packed
        self._layer = layer

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        exchange, timeouts = self._dispatcher.exchange, self._dispatcher.timeouts
        if exchange is None:
            return self._alone(x_TH, ids_TK, weights_TK)
        if self._balanced is not None:
            ids_TK = self._balanced.slots_of(ids_TK)
        on_progress, layer = self._dispatcher.on_progress, self._layer
        on_progress(layer, "dispatch, sending")
        deadline_ms = exchange.group.deadline(timeouts.dispatch_ms)
        flight = exchange.send_dispatch(x_TH, ids_TK, weights_TK)
        on_progress(layer, "dispatch, receiving")
        result = flight.receive(deadline_ms - exchange.group.transport.now_ms())
        self._raise_unless_whole(result.status)
        if self._balanced is not None:
            self._balanced.count(result.count_E)
        on_progress(layer, "experts")
        y = self._compute(result, x_TH.dtype)
        on_progress(layer, "combine")
        y_TH, status = exchange.combine(y, result.handle, timeouts.combine_ms)
        self._raise_unless_whole(status)
        on_progress(layer, "")
        return y_TH

    def _compute(self, result: Dispatched, dtype: torch.dtype) -> Tensor:
        """Return what this rank's experts make of the rows: f32 rows, or sums in `dtype`."""
        kernels = self._dispatcher.kernels
        if result.ids_NK is not None and result.weights_NK is not None:
            x_NH = result.rows.to(dtype)
            return kernels.experts(x_NH, result.ids_NK, result.weights_NK, self._packed)
        assert result.ranges is not None
        ids_S = result.ranges.expert_S
        assert ids_S is not None, "the layout is packed or per_token"
        return kernels.expert_rows(result.rows[: len(ids_S)].to(dtype), ids_S, self._packed)

    def _raise_unless_whole(self, status: CallStatus) -> None:
        """Raise CallFailed if an expert is missing: a lost rank without any of them is not."""
        balancer = self._dispatcher.balancer
        absent = frozenset() if balancer is None else balancer.dead
        if not status.ok and (status.must_stop or not absent.issuperset(status.missing)):
            raise CallFailed(status, self._layer)
