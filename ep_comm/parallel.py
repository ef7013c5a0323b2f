"""Routed experts spread over the ranks of a group: dispatch, this rank's experts, combine.

All ranks call the same layers in the same order, also without tokens of their own (T = 0). A call
that ends without all ranks raises `CallFailed`: text must not lack an expert. The owner of the step
then calls `Dispatcher.abort`, so that the other ranks hear of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import CallFailed, CallStatus, Group
from whalepod.ep_comm.interface import RoutedExperts
from whalepod.ep_comm.local import LocalExperts
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.kernels.interface import Kernels, Packed

COMBINE_PATIENCE = 2.0
"""A combine waits longer than a dispatch: a rank may come to it only after its own dispatch has
run into the timeout, and must not be taken for the dead one."""

Note: TypeAlias = Callable[[str, str], None]
"""(layer, operation): called at the start of each operation, so that a stuck rank can be named."""


@dataclass(slots=True)
class Patience:
    """How long a dispatch waits. Shared by all layers; whoever runs the steps may change it between
    two of them, on all ranks alike."""

    dispatch_ms: float

    @property
    def combine_ms(self) -> float:
        return COMBINE_PATIENCE * self.dispatch_ms


ModeName = Literal["low_latency", "throughput"]
ExpertMode: TypeAlias = LowLatency | Throughput
M = TypeVar("M", LowLatency, Throughput)


def note_nothing(layer: str, operation: str) -> None:
    """Be the `Note` of those who watch nothing."""


class _ExpertsOver(Generic[M]):
    """This rank's experts of one layer, and the mode that brings rows to them and back.

    mode     several layers share it
    packed   this rank's experts of the layer
    """

    def __init__(
        self,
        mode: M,
        kernels: Kernels,
        packed: Packed,
        *,
        patience: Patience,
        layer: str = "",
        note: Note = note_nothing,
    ) -> None:
        if mode.config.dispatch_dtype == "float8":
            raise ValueError(
                "the experts take float32 or bfloat16 rows, the mode gives float8: "
                "change its dispatch_dtype"
            )
        self._mode: M = mode
        self._kernels = kernels
        self._packed = packed
        self._patience = patience
        self._layer = layer
        self._note = note


class LowLatencyExperts(_ExpertsOver[LowLatency]):
    """`RoutedExperts` over the low-latency mode: every choice is computed as a row of its own.

    With f32 rows on the way back and no `pre_reduce`, the owner of a token sums its unrounded
    expert rows in k order, as one rank with all experts does: the bits are the same (DESIGN:
    batch-invariant mode). The mode's output is packed.
    """

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        mode, note, layer = self._mode, self._note, self._layer
        assert mode.config.output == "packed", mode.config
        note(layer, "dispatch, sending")
        weights_sent = weights_TK if mode.config.pre_reduce else None
        deadline_ms = mode.group.deadline(self._patience.dispatch_ms)
        flight = mode.send_dispatch(x_TH, ids_TK, weights_sent)
        note(layer, "dispatch, receiving")
        result = flight.receive(deadline_ms - mode.group.transport.now_ms())
        _raise_unless_ok(result.status, layer)
        note(layer, "experts")
        ids_S = result.expert_S
        assert ids_S is not None, "the mode's output is packed"
        x_SH = result.rows[: len(ids_S)].to(x_TH.dtype)
        y_SH = self._kernels.expert_rows(x_SH, ids_S, self._packed)
        note(layer, "combine")
        y_TH, status = mode.combine(y_SH, result.handle, weights_TK, self._patience.combine_ms)
        _raise_unless_ok(status, layer)
        note(layer, "")
        return y_TH


class ThroughputExperts(_ExpertsOver[Throughput]):
    """`RoutedExperts` over the throughput mode: a rank sums its own experts of a token.

    Fewer bytes than one row per choice; sums are formed in another order than on one rank.
    """

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._note(self._layer, "dispatch")
        received = self._mode.dispatch(x_TH, ids_TK, weights_TK, self._patience.dispatch_ms)
        _raise_unless_ok(received.status, self._layer)
        self._note(self._layer, "experts")
        y_NH = self._kernels.experts(
            received.x_NH.to(x_TH.dtype), received.ids_NK, received.weights_NK, self._packed
        )
        self._note(self._layer, "combine")
        y_TH, _, status = self._mode.combine(y_NH, received.routing, self._patience.combine_ms)
        _raise_unless_ok(status, self._layer)
        self._note(self._layer, "")
        return y_TH.to(x_TH.dtype)


def _raise_unless_ok(status: CallStatus, layer: str) -> None:
    if not status.ok:
        raise CallFailed(status, layer)


class Dispatcher:
    """An `ExpertPlacement` over a group of ranks: one for all layers of a rank.

    Each step has one mode, on all ranks. Before the group is there (warm-up), a rank works "alone",
    with its own experts only: such results mean nothing.

    modes  what "low_latency" and "throughput" are here; both may be `LowLatency` of two sizes
    note   hears of every operation of every layer
    """

    def __init__(
        self,
        group: Group,
        kernels: Kernels,
        modes: Mapping[ModeName, ExpertMode],
        *,
        num_experts: int,
        patience: Patience,
        note: Note = note_nothing,
    ) -> None:
        num_local = layout.split_experts(num_experts, group.num_ranks)
        self.owned = range(group.rank * num_local, (group.rank + 1) * num_local)
        self.group = group
        self._kernels = kernels
        self._modes = modes
        self._num_experts = num_experts
        self.patience = patience
        self._note = note
        self._num_calls: dict[ModeName, int] = {"low_latency": 0, "throughput": 0}
        self.current: ModeName | None = None

    def routed(self, packed: Packed, layer: str) -> SpreadExperts:
        """Return all experts of a layer; `packed` are those of this rank."""
        alone = LocalExperts(self._kernels, packed, self.owned, self._num_experts)
        return SpreadExperts(
            self, alone, {name: self._over(mode, packed, layer) for name, mode in self._items()}
        )

    def enter(self, mode: ModeName | None) -> None:
        """Take the mode of the step that begins; None: alone."""
        self.current = mode

    def count_call(self, mode: ModeName) -> None:
        """Note that a dispatch begins."""
        self._num_calls[mode] += 1

    @property
    def num_calls(self) -> tuple[int, int]:
        """Return how far the calls of both modes are numbered: equal on all ranks between steps
        that went well."""
        return self._num_calls["low_latency"], self._num_calls["throughput"]

    def abort(self) -> None:
        """Give up the step: peers that wait for this rank hear of it at once."""
        if self.current is not None:
            self._modes[self.current].abort()
            self._num_calls[self.current] += 1

    def resume(self, num_calls: tuple[int, int]) -> None:
        """Number the next calls above `num_calls`, the most of any rank, after a failed step."""
        for (name, mode), number in zip(self._items(), num_calls, strict=True):
            # the throughput mode may have used one number more than it was called
            mode.resume(number + 2)
            self._num_calls[name] = number + 1

    def _items(self) -> tuple[tuple[ModeName, ExpertMode], tuple[ModeName, ExpertMode]]:
        low, bulk = self._modes["low_latency"], self._modes["throughput"]
        return ("low_latency", low), ("throughput", bulk)

    def _over(self, mode: ExpertMode, packed: Packed, layer: str) -> RoutedExperts:
        kernels, patience, note = self._kernels, self.patience, self._note
        if isinstance(mode, LowLatency):
            return LowLatencyExperts(
                mode, kernels, packed, patience=patience, layer=layer, note=note
            )
        return ThroughputExperts(mode, kernels, packed, patience=patience, layer=layer, note=note)


class SpreadExperts:
    """`RoutedExperts` of one layer in whichever mode the step has."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        alone: RoutedExperts,
        by_mode: Mapping[ModeName, RoutedExperts],
    ) -> None:
        self._dispatcher = dispatcher
        self._alone = alone
        self._by_mode = by_mode

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        mode = self._dispatcher.current
        if mode is None:
            return self._alone(x_TH, ids_TK, weights_TK)
        self._dispatcher.count_call(mode)
        return self._by_mode[mode](x_TH, ids_TK, weights_TK)
