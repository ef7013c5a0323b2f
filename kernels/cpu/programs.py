"""Programs: the regions of a whole forward pass, recorded once and run again without Python.

A region started from Python costs 10 us, and three times as much once a step's weights have swept
the interpreter out of the caches; a decode step has two hundred of them. Addresses, shapes and
weights are the same from step to step, so they are kept: running a program costs about 1 us per
region. (CUDA graphs are the same idea.) What other ranks have a part in cannot be recorded: there
a program calls Python, which reads and writes memory that stays where it is.
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

from whalepod.kernels.cpu.regions import (
    BLOCK_BYTES,
    HEADER,
    Recorded,
    Region,
    Team,
    argument,
    call_for_count,
    call_region,
    finish,
    take,
    wait_patiently,
)
from whalepod.kernels.cpu.simd import i64_pointer, load, store

MAX_PROGRAMS = 256
MAX_REMEMBERED = 1024
"""Shapes of steps are many: a batch that drains, times the drafts of each step."""
SMALLEST_PIECE_BYTES = 4096


def _program_region(block):
    """Run regions in turn, each when all threads have left the one before.

    Arguments: regions, table of (machine code, argument block) addresses, address of
    `omp_get_num_threads` (0: there is one thread).
    """
    num_regions, table = argument(block, 0), i64_pointer(argument(block, 1))
    num_threads = call_for_count(argument(block, 2)) if argument(block, 2) else 1
    thread = take(block, 0)
    for i in range(num_regions):
        call_region(load(table, 2 * i), load(table, 2 * i + 1))
        finish(block, 1)
        wait_patiently(block, 1, (i + 1) * num_threads)
        if thread == 0:  # nobody looks at it until the program runs again
            header = i64_pointer(load(table, 2 * i + 1))
            for counter in range(HEADER):
                store(header, counter, 0)


PROGRAM = Region(_program_region, "3q")


class _Regions:
    """Recorded regions that follow one another."""

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

    def run(self, team: Team, dtype: torch.dtype) -> None:
        team.run(
            PROGRAM, dtype, team.num_threads, len(self._table), self._address,
            team.count_threads_address,
        )  # fmt: skip


class Program:
    """Recorded regions, the calls of Python between them, what they work on, and what comes out."""

    def __init__(self, steps: Sequence[Recorded], kept: Sequence[object], result: Tensor) -> None:
        self.result = result
        self._kept = kept
        self._parts: list[_Regions | Callable[[], None]] = []
        regions: list[tuple[int, bytes]] = []
        for step in [*steps, None]:
            if isinstance(step, tuple):
                regions.append(step)
                continue
            if regions:
                self._parts.append(_Regions(regions))
                regions = []
            if step is not None:
                self._parts.append(step)

    def run(self, team: Team, dtype: torch.dtype) -> Tensor:
        """Compute the result again; the caller copies what must outlive the next run."""
        for part in self._parts:
            if isinstance(part, _Regions):
                part.run(team, dtype)
            else:
                part()
        return self.result


class Arena:
    """The memory between the regions of programs: what nobody holds any more is given out again.

    A region that is repeated finds its memory as it was when it was recorded, because all regions
    before it are repeated, too. So one arena serves all programs: one runs at a time.
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


class Programs:
    """The programs of one backend, by key; those unused for longest make room for new ones."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kept: list[object] | None = None
        self._arena = Arena()

    @property
    def is_recording(self) -> bool:
        return self._kept is not None

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for what an operation makes."""
        if self._kept is None or not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return self._arena.new(shape, dtype)

    def keep(self, memory: object) -> None:
        """Keep what a region that is being recorded works on."""
        if self._kept is not None:
            self._kept.append(memory)

    def outside(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Compute something that is no region; a program that is recorded calls it each time."""
        kept, recorded = self._kept, self._team.recorded
        if kept is None or recorded is None:
            return compute()
        result = self.new(like.shape, like.dtype)

        def call() -> None:
            result.copy_(compute())

        self._kept = self._team.recorded = None
        try:
            call()
        finally:
            self._kept, self._team.recorded = kept, recorded
        recorded.append(call)
        return result

    def run(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        """Run the program of a key; record it when the key comes for the second time."""
        if self.is_recording:  # a part of what is recorded; its own program would use its memory
            return compute()
        program = self._programs.get(key)
        if program is not None:
            self._programs.move_to_end(key)
            return program.run(self._team, dtype).clone()
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
            return compute()
        del self._seen[key]
        return self._record(key, compute)

    def _record(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        recorded: list[Recorded] = []
        self._kept, self._team.recorded = [compute, self._arena], recorded
        try:
            result = compute()
            self._programs[key] = Program(recorded, self._kept, result)
        finally:
            self._kept = self._team.recorded = None
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return result.clone()
