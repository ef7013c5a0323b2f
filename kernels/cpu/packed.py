"""Weights as the kernels read them: groups of 16 columns, all of k for one group after the other.

    bfloat16   [groups, ceil(K / 2), 16, 2]   two neighbouring k side by side (VNNI)
    f32        [groups, K, 16]

Columns and k are filled up with zeros. The layout is the same for every machine, so that packed
weights can be kept in files. An address is only valid while its tensor lives: each object keeps the
tensor beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.cpu import packing
from whalepod.kernels.cpu.packing import GROUP
from whalepod.kernels.cpu.thread_pool import ThreadPool


class PackedLinear:
    """A weight `[N, K]`, or one per head `[L, N, K]`, and its sizes as plain integers."""

    __slots__ = (
        "address", "dtype", "group_stride", "length", "num_columns", "num_groups", "num_weights",
        "tensor", "weight_stride",
    )  # fmt: skip

    def __init__(self, panels: Tensor, num_columns: int, length: int) -> None:
        self.tensor = panels
        self.dtype = panels.dtype
        self.num_columns, self.length = num_columns, length
        self.num_weights, self.num_groups = panels.shape[:2]
        self.weight_stride, self.group_stride = panels.stride()[:2]
        self.address = panels.data_ptr()


class PackedExperts:
    """Gated MLPs side by side: gate and up `[E, 2 I', H]` interleaved, down `[E, H, I]`."""

    __slots__ = ("down", "gate_up", "hidden", "inner", "num_experts")

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self.gate_up, self.down = gate_up, down
        self.num_experts = gate_up.num_weights
        self.hidden, self.inner = gate_up.length, down.length


class Packer:
    """Packs weights on the threads of a pool."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def linear(self, weight_LNK: Tensor) -> PackedLinear:
        """Pack weights `[L, N, K]`."""
        _, num_columns, length = weight_LNK.shape
        shape = tile_shape(weight_LNK.shape, weight_LNK.dtype)
        panels = torch.empty(shape, dtype=weight_LNK.dtype)
        self._fill(weight_LNK, panels, 0, 1)
        return PackedLinear(panels, num_columns, length)

    def gated_mlp(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> PackedExperts:
        """Pack gated MLPs `[E, 2 I, H]` (gate rows, then up rows) and `[E, H, I]`."""
        num_experts, double, hidden = gate_up_EJH.shape
        gate, up = gate_up_EJH[:, : double // 2], gate_up_EJH[:, double // 2 :]
        num_groups = -(-double // 2 // GROUP)
        shape = tile_shape((num_experts, 2 * num_groups * GROUP, hidden), gate.dtype)
        panels = torch.empty(shape, dtype=gate.dtype)
        self._fill(gate, panels, 0, 2)
        self._fill(up, panels, 1, 2)
        gate_up = PackedLinear(panels, 2 * num_groups * GROUP, hidden)
        return PackedExperts(gate_up, self.linear(down_EHI))

    def _fill(self, weight_LNK: Tensor, panels: Tensor, first_group: int, every: int) -> None:
        """Pack into the groups `first_group`, `first_group + every`, ..."""
        if not weight_LNK.numel():
            return
        value_bytes = weight_LNK.element_size()
        per_unit = 4 // value_bytes
        if (
            weight_LNK.shape[2] % per_unit
            or weight_LNK.stride(2) != 1
            or weight_LNK.data_ptr() % 4
            or any(stride % per_unit for stride in weight_LNK.stride()[:2])
        ):
            weight_LNK = F.pad(weight_LNK, (0, -weight_LNK.shape[2] % per_unit)).contiguous()
        target = panels[:, first_group::every]
        num_weights, num_columns, length = weight_LNK.shape
        self._pool.run(
            packing.PACK, torch.float32, num_weights * -(-num_columns // GROUP), num_weights,
            num_columns, length // per_unit, weight_LNK.data_ptr(),
            weight_LNK.stride(0) // per_unit, weight_LNK.stride(1) // per_unit, target.data_ptr(),
            target.stride(0) // per_unit, target.stride(1) // per_unit,
        )  # fmt: skip


def tile_shape(shape_LNK: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of weights `[L, N, K]` once packed."""
    num_weights, num_columns, length = shape_LNK
    num_groups = -(-num_columns // GROUP)
    if dtype == torch.bfloat16:
        return num_weights, num_groups, -(-length // 2), GROUP, 2
    return num_weights, num_groups, length, GROUP
