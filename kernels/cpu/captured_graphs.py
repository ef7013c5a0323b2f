"""Captured graphs: the kernels of a whole forward pass, captured once and replayed without Python.

A kernel started from Python costs 10 us, and three times as much once a step's weights have swept
the interpreter out of the caches; a decode step has two hundred of them. Addresses, shapes and
weights are the same from step to step, so they are kept: replaying costs about 1 us per kernel.
(CUDA graphs are the same idea.) What other ranks have a part in cannot be captured: there a graph
calls Python, which reads and writes memory that stays where it is.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.cpu.simd import i64_pointer, load, store
from whalepod.kernels.cpu.thread_pool import (
    BLOCK_BYTES,
    HEADER,
    CapturedCall,
    ParallelKernel,
    ThreadPool,
    argument,
    call_for_count,
    call_kernel,
    finish,
    take,
    wait_patiently,
)

MAX_GRAPHS = 256
MAX_REMEMBERED = 1024
"""Shapes of steps are many: a batch that drains, times the drafts of each step."""
SMALLEST_PIECE_BYTES = 4096


def _replay_kernel(block):
    """Run kernels in turn, each when all threads have left the one before.

    Arguments: kernels, table of (machine code, argument block) addresses, address of
    `omp_get_num_threads` (0: there is one thread).
    """
    num_kernels, table = argument(block, 0), i64_pointer(argument(block, 1))
    num_threads = call_for_count(argument(block, 2)) if argument(block, 2) else 1
    thread = take(block, 0)
    for i in range(num_kernels):
        call_kernel(load(table, 2 * i), load(table, 2 * i + 1))
        finish(block, 1)
        wait_patiently(block, 1, (i + 1) * num_threads)
        if thread == 0:  # no thread looks at it until the graph runs again
            header = i64_pointer(load(table, 2 * i + 1))
            for counter in range(HEADER):
                store(header, counter, 0)


REPLAY = ParallelKernel(_replay_kernel, "3q")


class _KernelRun:
    """Captured kernels that follow one another."""

    def __init__(self, calls: Sequence[tuple[int, bytes]]) -> None:
        memory = np.zeros((len(calls) + 1) * BLOCK_BYTES, dtype=np.uint8)
        first = -memory.ctypes.data % BLOCK_BYTES
        self._memory = memory
        self._table = np.zeros((len(calls), 2), dtype=np.int64)
        for i, (code, arguments) in enumerate(calls):
            start = first + i * BLOCK_BYTES
            memory[start : start + len(arguments)] = np.frombuffer(arguments, dtype=np.uint8)
            self._table[i] = code, memory.ctypes.data + start
        self._address = self._table.ctypes.data

    def run(self, pool: ThreadPool, dtype: torch.dtype) -> None:
        pool.run(
            REPLAY, dtype, pool.num_threads, len(self._table), self._address,
            pool.count_threads_address,
        )  # fmt: skip


class CapturedGraph:
    """Captured kernels, eager calls of Python between them, what they work on, and the result."""

    def __init__(
        self, steps: Sequence[CapturedCall], kept: Sequence[object], result: Tensor
    ) -> None:
        self.result = result
        self._kept = kept
        self._parts: list[_KernelRun | Callable[[], None]] = []
        kernels: list[tuple[int, bytes]] = []
        for step in [*steps, None]:
            if isinstance(step, tuple):
                kernels.append(step)
                continue
            if kernels:
                self._parts.append(_KernelRun(kernels))
                kernels = []
            if step is not None:
                self._parts.append(step)

    def run(self, pool: ThreadPool, dtype: torch.dtype) -> Tensor:
        """Compute the result again; the caller copies what must outlive the next run."""
        for part in self._parts:
            if isinstance(part, _KernelRun):
                part.run(pool, dtype)
            else:
                part()
        return self.result


class Arena:
    """The memory between the kernels of graphs: what nothing holds any more is given out again.

    A kernel that is replayed finds its memory as it was when it was captured, because all kernels
    before it are replayed, too. So one arena serves all graphs: one runs at a time.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[NDArray[np.uint8]]] = {}
        """By size, which is a power of two, so that steps of other shapes find pieces, too."""

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        piece = self._piece(max(1 << (num_bytes - 1).bit_length(), SMALLEST_PIECE_BYTES))
        start = -piece.ctypes.data % 64
        return torch.from_numpy(piece[start : start + num_bytes]).view(dtype).view(*shape)

    def _piece(self, size_bytes: int) -> NDArray[np.uint8]:
        pieces = self._pieces.setdefault(size_bytes, [])
        for index in range(len(pieces)):
            # a tensor, or a view of one, holds its piece
            if _count_holders(pieces, index) == _ONLY_THE_LIST:
                return pieces[index]
        pieces.append(np.empty(size_bytes + 64, dtype=np.uint8))
        return pieces[-1]


def _count_holders(pieces: list[NDArray[np.uint8]], index: int) -> int:
    return sys.getrefcount(pieces[index])


_ONLY_THE_LIST = _count_holders([np.empty(1, dtype=np.uint8)], 0)


class CapturedGraphs:
    """The graphs of one backend, by key; those unused for longest make room for new ones."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kept: list[object] | None = None
        self._arena = Arena()

    @property
    def is_capturing(self) -> bool:
        return self._kept is not None

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for what an operation makes."""
        if self._kept is None or not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return self._arena.new(shape, dtype)

    def keep(self, memory: object) -> None:
        """Keep what a kernel that is being captured works on."""
        if self._kept is not None:
            self._kept.append(memory)

    def eager(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Compute something that is no kernel; a graph that is captured calls it each time."""
        kept, captured = self._kept, self._pool.captured
        if kept is None or captured is None:
            return compute()
        result = self.new(like.shape, like.dtype)

        def call() -> None:
            result.copy_(compute())

        self._kept = self._pool.captured = None
        try:
            call()
        finally:
            self._kept, self._pool.captured = kept, captured
        captured.append(call)
        return result

    def run(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        """Run the graph of a key; capture it when the key comes for the second time."""
        if self.is_capturing:  # a part of what is captured; its own graph would use its memory
            return compute()
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph.run(self._pool, dtype).clone()
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
            return compute()
        del self._seen[key]
        return self._capture(key, compute)

    def _capture(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        captured: list[CapturedCall] = []
        self._kept, self._pool.captured = [compute, self._arena], captured
        try:
            result = compute()
            self._graphs[key] = CapturedGraph(captured, self._kept, result)
        finally:
            self._kept = self._pool.captured = None
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return result.clone()
