"""Routed experts on one rank: no communication."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.interface import Kernels, Packed


class LocalPlacement:
    """An `ExpertPlacement` without other ranks: `owned` experts are here (None: all of them).

    Those of nobody add nothing.
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
        self.owns_all = owned == range(num_experts)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._kernels.experts(x_TH, self._local_ids(ids_TK), weights_TK, self._packed)

    def _local_ids(self, ids_TK: Tensor) -> Tensor:
        if self.owns_all:
            return ids_TK
        is_owned = (ids_TK >= self._owned.start) & (ids_TK < self._owned.stop)
        return (ids_TK - self._owned.start).masked_fill(~is_owned, -1)
