"""What the model asks of its routed experts, wherever they live.

Suffix letters as in `whalepod.kernels.interface`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from whalepod.kernels.interface import Packed


class RoutedExperts(Protocol):
    """The routed experts of one layer, on this rank or spread over a group."""

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
