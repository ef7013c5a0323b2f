"""Weights as the kernels read them: groups of 16 columns, all of k for one group after the other.

    bfloat16   [groups, ceil(K / 2), 16, 2]   two neighbouring k side by side (VNNI)
    f32        [groups, K, 16]
    int8       [groups, ceil(K / 64), 1088]   see `int8.py`

Columns and k are filled up with zeros. The layout is the same for every machine, so that packed
weights can be kept in files. An address is only valid while its tensor lives: each object keeps the
tensor beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from numba import njit, types
from torch import Tensor

from whalepod.kernels.cpu.abi import ParallelKernel, arguments, items, record
from whalepod.kernels.cpu.packed_tiles import BLOCK_ROWS, GROUP
from whalepod.kernels.cpu.simd import BF16_POINTER, F32_POINTER, advance, load, store
from whalepod.kernels.cpu.workspace import Workspace


class PackedLinear:
    """A weight `[N, K]`, or one per head `[L, N, K]`, and its sizes as plain integers."""

    __slots__ = (
        "address", "format", "group_stride", "length", "num_columns", "num_groups", "num_weights",
        "tensor", "weight_stride",
    )  # fmt: skip

    def __init__(self, tiles: Tensor, num_columns: int, length: int, format_: WeightFormat) -> None:
        self.tensor, self.format = tiles, format_
        self.num_columns, self.length = num_columns, length
        self.num_weights, self.num_groups = tiles.shape[:2]
        self.weight_stride, self.group_stride = tiles.stride()[:2]
        self.address = tiles.data_ptr()


class PackedExperts:
    """Gated MLPs side by side: gate and up `[E, 2 I', H]` interleaved, down `[E, H, I]`."""

    __slots__ = ("down", "format", "gate_up", "hidden", "inner", "num_experts")

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self.gate_up, self.down, self.format = gate_up, down, gate_up.format
        self.num_experts = gate_up.num_weights
        self.hidden, self.inner = gate_up.length, down.length


class WeightFormat(ABC):
    """How weights are packed, and the rows that they multiply prepared."""

    layout: str
    quantizes_rows: bool
    pack_kernel: ParallelKernel
    pack_dtype: torch.dtype | None
    """What the kernel is compiled for; None: the model dtype."""
    block_rows: int
    """Rows of one product."""
    down_rows: int
    """Rows of one product of `down`, whose sums have room for all."""
    tile_rows: int
    """Matrix tiles multiply from this many rows on, in formats that are for them."""

    def pack(self, weight_LNK: Tensor) -> PackedLinear:
        """Pack weights `[L, N, K]`."""
        num_weights, num_columns, length = weight_LNK.shape
        tiles = self._new_tiles(num_weights, num_columns, length, weight_LNK.dtype)
        self._fill(weight_LNK, tiles)
        return PackedLinear(tiles, num_columns, length, self)

    def pack_gated(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> PackedExperts:
        """Pack gated MLPs `[E, 2 I, H]` (gate rows, then up rows) and `[E, H, I]`."""
        num_experts, double, hidden = gate_up_EJH.shape
        num_columns = 2 * GROUP * -(-double // 2 // GROUP)
        tiles = self._new_tiles(num_experts, num_columns, hidden, gate_up_EJH.dtype)
        self._fill(gate_up_EJH[:, : double // 2], tiles[:, 0::2])
        self._fill(gate_up_EJH[:, double // 2 :], tiles[:, 1::2])
        gate_up = PackedLinear(tiles, num_columns, hidden, self)
        return PackedExperts(gate_up, self.pack(down_EHI))

    @abstractmethod
    def operands(self, dtype: torch.dtype) -> types.CPointer:
        """Return the type of pointer that kernels for this model dtype get to packed weights."""

    @abstractmethod
    def padded(self, length: int) -> int:
        """Return the values of a row of `length` that products read."""

    @abstractmethod
    def record_bytes(self, length: int) -> int:
        """Return the bytes between prepared rows of `length`; 0: rows are read as they are."""

    @abstractmethod
    def _new_tiles(
        self, num_weights: int, num_columns: int, length: int, dtype: torch.dtype
    ) -> Tensor:
        """Return uninitialised memory for packed weights `[L, N, K]`, `[L, groups, ...]`."""

    @abstractmethod
    def _fill(self, weight_LNK: Tensor, tiles: Tensor) -> None:
        """Pack into the groups of `tiles`, which may be every second one."""


_PackArguments = record(
    "num_matrices num_rows num_units source:i32 matrix_stride row_stride out:i32",
    "out_matrix_stride out_group_stride",
)
"""Sizes and strides are in units of 4 bytes: an f32, or two bfloat16."""


@njit
def _pack_group(source, row_stride, num_rows, num_units, out):
    """Set out[u, r] = source[r, u], 0 for rows at or past `num_rows`: 16 rows side by side."""
    if num_rows == GROUP:
        for u in range(num_units):
            for r in range(GROUP):
                store(out, u * GROUP + r, load(source, r * row_stride + u))
        return
    for u in range(num_units):
        for r in range(GROUP):
            value = 0
            if r < num_rows:
                value = load(source, r * row_stride + u)
            store(out, u * GROUP + r, value)


def _pack_kernel(block):
    a = arguments(block, _PackArguments)
    num_groups = -(-a.num_rows // GROUP)
    for item in items(block, 0, a.num_matrices * num_groups, is_last=True):
        matrix, group = item // num_groups, item % num_groups
        first = group * GROUP
        _pack_group(
            advance(a.source, matrix * a.matrix_stride + first * a.row_stride), a.row_stride,
            min(GROUP, a.num_rows - first), a.num_units,
            advance(a.out, matrix * a.out_matrix_stride + group * a.out_group_stride),
        )  # fmt: skip


PACK = ParallelKernel(_pack_kernel, _PackArguments)


class ExactWeights(WeightFormat):
    """Weights and rows in the model dtype."""

    layout = "panels-1"
    quantizes_rows = False
    pack_kernel, pack_dtype = PACK, torch.float32
    block_rows = BLOCK_ROWS
    down_rows = 1 << 40

    tile_rows = 0

    def __init__(self, work: Workspace) -> None:
        self._work = work

    def operands(self, dtype: torch.dtype) -> types.CPointer:
        return BF16_POINTER if dtype == torch.bfloat16 else F32_POINTER

    def padded(self, length: int) -> int:
        return length

    def record_bytes(self, length: int) -> int:
        return 0

    def _new_tiles(
        self, num_weights: int, num_columns: int, length: int, dtype: torch.dtype
    ) -> Tensor:
        row = (-(-length // 2), GROUP, 2) if dtype == torch.bfloat16 else (length, GROUP)
        return torch.empty((num_weights, -(-num_columns // GROUP), *row), dtype=dtype)

    def _fill(self, weight_LNK: Tensor, tiles: Tensor) -> None:
        if not weight_LNK.numel():
            return
        per_unit = 4 // weight_LNK.element_size()
        if (
            weight_LNK.shape[2] % per_unit
            or weight_LNK.stride(2) != 1
            or weight_LNK.data_ptr() % 4
            or any(stride % per_unit for stride in weight_LNK.stride()[:2])
        ):
            weight_LNK = F.pad(weight_LNK, (0, -weight_LNK.shape[2] % per_unit)).contiguous()
        num_weights, num_columns, length = weight_LNK.shape
        pack = _PackArguments(
            num_weights, num_columns, length // per_unit, weight_LNK.data_ptr(),
            weight_LNK.stride(0) // per_unit, weight_LNK.stride(1) // per_unit, tiles.data_ptr(),
            tiles.stride(0) // per_unit, tiles.stride(1) // per_unit,
        )  # fmt: skip
        self._work.run(PACK, torch.float32, num_weights * -(-num_columns // GROUP), pack)
