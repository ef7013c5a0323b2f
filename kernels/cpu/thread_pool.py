"""The threads that parallel kernels run on: torch's own, of OpenMP.

Numba's `parallel=True` would bring a second pool of threads, and two pools on the same cores stall
each other for whole scheduler quanta. Here a kernel is a C callback, and `GOMP_parallel` of the
OpenMP library that torch loaded calls it on the threads that torch's operations use too: entering
and leaving a kernel of two threads costs about 1 us (0.6 us of it ctypes; November 2026, 2 cores of
a Sapphire-Rapids-class machine). Torch's `OMP_NUM_THREADS` and `set_num_threads` apply unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numba import types
from numba.core.ccallback import CFunc

from whalepod.kernels.cpu.abi import ParallelKernel
from whalepod.kernels.cpu.compile_cache import CompileCache

BLOCK_BYTES = 8 * 64
"""Room for the largest block of counters and arguments."""

CapturedCall: TypeAlias = tuple[int, bytes] | Callable[[], None]
"""One step of a captured graph: a kernel's machine code and its block, or a call of Python."""


class ThreadPool:
    """Compiles kernels and runs them on torch's threads. Safe to use from several threads."""

    def __init__(self, num_threads: int, code_folder: Path | None = None) -> None:
        """code_folder: keeps machine code for the next process; None: where numba would."""
        self._code_folder = code_folder
        self._fork, self.count_threads_address = _find_openmp()
        self.num_threads = num_threads if self._fork else 1
        self._block = ctypes.create_string_buffer(BLOCK_BYTES + 64)
        self._address = -(-ctypes.addressof(self._block) // 64) * 64
        self._start = self._address - ctypes.addressof(self._block)
        self._lock = threading.Lock()
        self._compiled: dict[tuple[ParallelKernel, torch.dtype], _Compiled] = {}
        self.captured: list[CapturedCall] | None = None
        """Where `run` writes machine code and block of each kernel, if anywhere."""

    def compile(
        self,
        kernels: Sequence[tuple[ParallelKernel, torch.dtype]],
        progress: Callable[[int, int], None],
    ) -> None:
        """Compile kernels, or load them from the cache; tell how many are done, and of all."""
        for index, (kernel, dtype) in enumerate(kernels):
            progress(index, len(kernels))
            self._get(kernel, dtype)
        progress(len(kernels), len(kernels))

    def run(
        self, kernel: ParallelKernel, dtype: torch.dtype, num_items: int, arguments: tuple[Any, ...]
    ) -> None:
        """Call a kernel on as many threads as there are items, at the most all of the pool.

        arguments: of `kernel.arguments`
        """
        compiled = self._compiled.get((kernel, dtype)) or self._get(kernel, dtype)
        num_threads = min(num_items, self.num_threads)
        with self._lock:
            compiled.layout.pack_into(self._block, self._start, *arguments)
            if self.captured is not None:
                self.captured.append((compiled.address, compiled.layout.pack(*arguments)))
            if num_threads <= 1:
                compiled.call(self._address)
            else:
                self._fork(compiled.address, self._address, num_threads, 0)

    def _get(self, kernel: ParallelKernel, dtype: torch.dtype) -> _Compiled:
        compiled = self._compiled.get((kernel, dtype))
        if compiled is None:
            compiled = _compile_once(kernel, dtype, self._code_folder)
            self._compiled[kernel, dtype] = compiled
        return compiled


class KernelFunction(CFunc):
    """A C callback of a kernel, kept by `CompileCache`."""

    def keep_in(self, folder: Path | None) -> None:
        self._cache = CompileCache(self.__wrapped__, folder)

    def assembly(self) -> str:
        """Return the machine code as text; empty if it came from the cache."""
        library: Any = self._library  # type: ignore[attr-defined]
        return str(library.get_asm_str())


class _Compiled:
    """A kernel's machine code for one model dtype, and the layout of its block."""

    def __init__(
        self, kernel: ParallelKernel, dtype: torch.dtype, code_folder: Path | None
    ) -> None:
        self.function = new_function(kernel, dtype)  # owns the machine code
        self.function.keep_in(code_folder)
        self.function.compile()
        assert self.function.address is not None
        self.address: int = self.function.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self.layout = struct.Struct(kernel.layout)
        assert self.layout.size <= BLOCK_BYTES, (self.layout.size, BLOCK_BYTES)


@functools.cache
def _compile_once(
    kernel: ParallelKernel, dtype: torch.dtype, code_folder: Path | None
) -> _Compiled:
    return _Compiled(kernel, dtype, code_folder)


def new_function(kernel: ParallelKernel, dtype: torch.dtype) -> KernelFunction:
    """Return the function of a kernel for a model dtype; `compile` compiles it, uncached."""
    signature = (kernel.block_type(dtype),), types.void
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    return KernelFunction(kernel.body, signature, {}, options)


def _find_openmp() -> tuple[Any, int]:
    """Return `GOMP_parallel` of the OpenMP library in torch's folder, None if there is none, and
    the address of `omp_get_num_threads`.
    """
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted([*folder.glob("libgomp*.so*"), *folder.glob("libiomp5*.so*")]):
        library = ctypes.CDLL(str(path))
        fork = getattr(library, "GOMP_parallel", None)
        if fork is not None:
            fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            fork.restype = None
            count = ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value
            return fork, count or 0
    return None, 0
