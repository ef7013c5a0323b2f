"""What the model asks of its routed experts, wherever they live, and those of one rank alone.

Suffix letters as in `whalepod.kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
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


LoadExpert = Callable[[int], Packed]
"""Reads one expert of a layer again, from where the model came from."""


class ExpertPlacement(Protocol):
    """Where the routed experts of every layer live."""

    @property
    def owned(self) -> Sequence[int]:
        """Return the global ids of the experts that this rank loads, in order."""
        ...

    def routed(self, packed: Packed, layer: str, load_expert: LoadExpert) -> RoutedExperts:
        """Return all experts of a layer, of which `packed` are this rank's.

        `layer` names it to people ("model.layers.3.mlp"). Called for one layer after the other.
        """
        ...


class LocalPlacement:
    """An `ExpertPlacement` without other ranks: `owned` experts are here (None: all of them).

    The others add nothing.
    """

    def __init__(
        self, kernels: Kernels, num_experts: int, owned: Sequence[int] | None = None
    ) -> None:
        self.owned = range(num_experts) if owned is None else owned
        self._kernels = kernels
        self._num_experts = num_experts

    def routed(self, packed: Packed, layer: str, load_expert: LoadExpert) -> LocalExperts:
        """Return the experts of a layer."""
        return LocalExperts(self._kernels, packed, self.owned, self._num_experts)


class LocalExperts:
    """Runs the experts `owned` (global ids); a selection of any other expert adds nothing."""

    def __init__(
        self, kernels: Kernels, packed: Packed, owned: Sequence[int], num_experts: int
    ) -> None:
        self._kernels = kernels
        self._packed = packed
        self.is_replayable = list(owned) == list(range(num_experts))
        # the last row is that of id -1
        self._local_of_E = torch.full((num_experts + 1,), -1)
        self._local_of_E[list(owned)] = torch.arange(len(owned))

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        local_TK = ids_TK if self.is_replayable else self._local_of_E[ids_TK]
        return self._kernels.experts(x_TH, local_TK, weights_TK, self._packed)
