"""What the model asks of its routed experts, wherever they live, and those of one rank alone.

Suffix letters as in `whalepod.kernels.interface`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from whalepod.kernels.interface import Kernels, Packed


class RoutedExperts(Protocol):
    """The routed experts of one layer, on this rank or spread over a group."""

    @property
    def is_replayable(self) -> bool:
        """Whether a call does nothing but call `Kernels`: a captured graph can repeat it."""
        ...

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return sum_k weights[t, k] * expert[ids[t, k]](x[t]), `[T, H]` model dtype.

        ids_TK     [T, K] int64, global expert ids; -1 is no selection
        weights_TK [T, K] f32
        """
        ...


class ExpertPlacement(Protocol):
    """Where the routed experts of every layer live."""

    @property
    def owned(self) -> range:
        """Return the global ids of the experts that this rank loads."""
        ...

    def routed(self, packed: Packed, layer: str) -> RoutedExperts:
        """Return all experts of a layer, of which `packed` are this rank's.

        `layer` names it to people ("model.layers.3.mlp").
        """
        ...


class LocalPlacement:
    """An `ExpertPlacement` without other ranks: `owned` experts are here (None: all of them).

    The others add nothing.
    """

    def __init__(self, kernels: Kernels, num_experts: int, owned: range | None = None) -> None:
        self.owned = range(num_experts) if owned is None else owned
        self._kernels = kernels
        self._num_experts = num_experts

    def routed(self, packed: Packed, layer: str) -> LocalExperts:
        """Return the experts of a layer."""
        return LocalExperts(self._kernels, packed, self.owned, self._num_experts)


class LocalExperts:
    """Runs the experts `owned` (global ids); a selection of any other expert adds nothing."""

    def __init__(self, kernels: Kernels, packed: Packed, owned: range, num_experts: int) -> None:
        self._kernels = kernels
        self._packed = packed
        self._owned = owned
        self.is_replayable = owned == range(num_experts)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._kernels.experts(x_TH, self._local_ids(ids_TK), weights_TK, self._packed)

    def _local_ids(self, ids_TK: Tensor) -> Tensor:
        if self.is_replayable:  # all are here
            return ids_TK
        is_owned = (ids_TK >= self._owned.start) & (ids_TK < self._owned.stop)
        return (ids_TK - self._owned.start).masked_fill(~is_owned, -1)
