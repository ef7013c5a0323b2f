"""What every operation on a CPU needs: kernels to run, memory for results, and scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.cpu.captured_graphs import CapturedGraphs
from whalepod.kernels.cpu.thread_pool import ThreadPool

_ALIGNMENT = 64


class Workspace:
    """Runs kernels on a pool of threads, and owns the memory that they work in."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool, self.num_threads = pool, pool.num_threads
        self._graphs = graphs = CapturedGraphs(pool)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.run, self.new, self.keep = pool.run, graphs.new, graphs.keep
        self.replay, self.eager = graphs.replay, graphs.eager

    def with_dense_rows(self, x: Tensor) -> Tensor:
        """Return the tensor with its last dimension contiguous."""
        if x.stride(-1) == 1:
            return x
        assert not self._graphs.is_capturing, "a copy would not be replayed"
        return x.contiguous()

    def borrow(self, num_bytes: int) -> int:
        """Return the address of scratch memory, valid until the next operation."""
        if self._scratch.numel() < num_bytes + _ALIGNMENT:
            self._scratch = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self.keep(self._scratch)
        return aligned(self._scratch.data_ptr())


def aligned(num_bytes: int) -> int:
    """Return the number of bytes, rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's memory begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
