"""What every operation on a CPU needs: kernels to run, memory for results, and scratch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from whalepod.kernels.cpu import captured_graphs
from whalepod.kernels.cpu.packed import Packer
from whalepod.kernels.cpu.thread_pool import ParallelKernel, ThreadPool
from whalepod.kernels.cpu.tiles import can_use_tiles

MIN_TILE_ROWS = 4
"""AMX wins over AVX512-BF16 from this many rows, where a machine has both."""

NEVER = 1 << 62
_ALIGNMENT = 64


class Operations:
    """Runs kernels on a pool of threads, and owns the memory that they work in.

    is_invariant  a row's bits depend on the row alone, whatever the batch, the chunks, the threads
    code_folder   keeps compiled code for the next process; None: where numba would
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        is_invariant: bool = False,
        code_folder: Path | None = None,
    ) -> None:
        self.name = "cpu, batch-invariant" if is_invariant else "cpu"
        self._is_invariant = is_invariant
        self._pool = ThreadPool(num_threads or torch.get_num_threads(), code_folder)
        self._has_tiles = can_use_tiles()
        # Tiles add in another order: a row's bits would depend on how many rows are beside it.
        self._tile_rows = MIN_TILE_ROWS if not is_invariant and self._has_tiles else NEVER
        self._packer = Packer(self._pool)
        self._graphs = captured_graphs.CapturedGraphs(self._pool)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._ones_S1 = torch.ones(0, 1)

    def _run(
        self, kernel: ParallelKernel, dtype: torch.dtype, num_items: int, *arguments: object
    ) -> None:
        self._pool.run(kernel, dtype, num_items, *arguments)

    def replay(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        return self._graphs.run(key, dtype, compute)

    def eager(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        return self._graphs.eager(compute, like)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for what an operation makes; a captured graph keeps it."""
        return self._graphs.new(shape, dtype)

    def _dense(self, x: Tensor) -> Tensor:
        """Return the tensor with its last dimension contiguous."""
        if x.stride(-1) == 1:
            return x
        assert not self._graphs.is_capturing, "a copy would not be replayed"
        return x.contiguous()

    def _borrow(self, num_bytes: int) -> int:
        """Return the address of scratch memory, valid until the next operation."""
        if self._scratch.numel() < num_bytes + _ALIGNMENT:
            self._scratch = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self._graphs.keep(self._scratch)
        return aligned(self._scratch.data_ptr())


def aligned(num_bytes: int) -> int:
    """Return the number of bytes, rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
