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
from llvmlite import ir
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.cpu.abi import (
    NUM_COUNTERS,
    ParallelKernel,
    arguments,
    finish,
    record,
    thread_number,
    wait_patiently,
)
from whalepod.kernels.cpu.simd import i64_pointer, intrinsic, load, store
from whalepod.kernels.cpu.thread_pool import BLOCK_BYTES, CapturedCall, ThreadPool

MAX_GRAPHS = 256
MAX_REMEMBERED = 1024
"""Shapes of steps are many: a batch that drains, times the drafts of each step."""
SMALLEST_PIECE_BYTES = 4096


_ReplayArguments = record(
    "num_kernels",
    "table:i64",  # Addresses of machine code and block of each kernel, side by side
    "count_threads",  # The address of `omp_get_num_threads`; 0: there is one thread
)


def _replay_kernel(block):
    """Run kernels in turn, each when all threads have left the one before."""
    a = arguments(block, _ReplayArguments)
    num_threads = call_for_count(a.count_threads) if a.count_threads else 1
    thread = thread_number(block)
    for i in range(a.num_kernels):
        call_kernel(load(a.table, 2 * i), load(a.table, 2 * i + 1))
        finish(block, 0)
        wait_patiently(block, 0, (i + 1) * num_threads)
        if thread == 0:  # no thread looks at it until the graph runs again
            counters = i64_pointer(load(a.table, 2 * i + 1))
            for index in range(NUM_COUNTERS):
                store(counters, index, 0)


@intrinsic
def call_kernel(typingctx, code, block):
    """Call the machine code of a kernel at an address with the block at another."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_for_count(typingctx, code):
    """Call a C function `int f(void)` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [])
        count = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return builder.zext(count, ir.IntType(64))

    return types.int64(types.int64), codegen


REPLAY = ParallelKernel(_replay_kernel, _ReplayArguments)


class _KernelRun:
    """Captured kernels that follow one another."""

    def __init__(self, calls: Sequence[tuple[int, bytes]]) -> None:
        memory = np.zeros((len(calls) + 1) * BLOCK_BYTES, dtype=np.uint8)
        first = -memory.ctypes.data % BLOCK_BYTES
        self._memory = memory
        self._table = np.zeros((len(calls), 2), dtype=np.int64)
        for i, (code, block) in enumerate(calls):
            start = first + i * BLOCK_BYTES
            memory[start : start + len(block)] = np.frombuffer(block, dtype=np.uint8)
            self._table[i] = code, memory.ctypes.data + start

    def run(self, pool: ThreadPool, dtype: torch.dtype) -> None:
        arguments = _ReplayArguments(
            len(self._table), self._table.ctypes.data, pool.count_threads_address
        )
        pool.run(REPLAY, dtype, pool.num_threads, arguments)


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

    def replay(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
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
