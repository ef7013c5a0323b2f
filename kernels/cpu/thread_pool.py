"""Parallel kernels: numba functions that run on torch's own OpenMP threads.

Numba's `parallel=True` would bring a second pool of threads, and two pools on the same cores stall
each other for whole scheduler quanta. Here a kernel is a C callback, and `GOMP_parallel` of the
OpenMP library that torch loaded calls it on the threads that torch's operations use too: entering
and leaving a kernel of two threads costs about 1 us (0.6 us of it ctypes; November 2026, 2 cores of
a Sapphire-Rapids-class machine). Torch's `OMP_NUM_THREADS` and `set_num_threads` apply unchanged.

Work is split into items that threads take one by one from an atomic counter. A stage ends when its
items are finished, not when every thread has arrived: a thread that the system has put aside does
not hold up the others between stages. Which thread computes an item never changes its bits.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from llvmlite import ir
from numba import njit, types
from numba.core.ccallback import CFunc

from whalepod.kernels.cpu import simd
from whalepod.kernels.cpu.compile_cache import CompileCache
from whalepod.kernels.cpu.simd import give_way, intrinsic, relax

_NUM_STAGES = 8
_PATIENCE = 2000
"""Looks at a counter (some 100 us of them) before a waiting thread gives its core away."""
HEADER = 2 * _NUM_STAGES
"""int64 values before the arguments of a kernel: items taken, then items finished, per stage."""

BLOCK_BYTES = 8 * 64


@dataclass(frozen=True, slots=True)
class ParallelKernel:
    """A function of one argument block, and the `struct` format of the arguments in it.

    The element type of the block's pointer is the model dtype: `pointer_like(block, address)`.
    """

    body: Callable[[Any], None]
    arguments: str


CapturedCall: TypeAlias = tuple[int, bytes] | Callable[[], None]
"""One step of a captured graph: a kernel's machine code and argument block, or a call of Python."""


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
        """Where `run` writes machine code and argument block of each kernel, if anywhere."""

    def compile(
        self,
        kernels: Sequence[tuple[ParallelKernel, torch.dtype]],
        progress: Callable[[int, int], None],
    ) -> None:
        """Compile kernels, or load them from numba's cache; tell how many are done, and of all."""
        for index, (kernel, dtype) in enumerate(kernels):
            progress(index, len(kernels))
            self._get(kernel, dtype)
        progress(len(kernels), len(kernels))

    def run(
        self, kernel: ParallelKernel, dtype: torch.dtype, num_items: int, *arguments: Any
    ) -> None:
        """Call a kernel on as many threads as there are items, at the most all of the pool."""
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


class _KernelFunction(CFunc):
    """A C callback of a kernel, kept by `CompileCache`."""

    def keep_in(self, folder: Path | None) -> None:
        self._cache = CompileCache(self.__wrapped__, folder)

    def assembly(self) -> str:
        """Return the machine code as text; empty if it came from the cache."""
        library: Any = self._library  # type: ignore[attr-defined]
        return str(library.get_asm_str())


class _Compiled:
    """A kernel's machine code for one model dtype, and the layout of its argument block."""

    def __init__(
        self, kernel: ParallelKernel, dtype: torch.dtype, code_folder: Path | None
    ) -> None:
        self.function = _new_function(kernel, dtype)  # owns the machine code
        self.function.keep_in(code_folder)
        self.function.compile()
        assert self.function.address is not None
        self.address: int = self.function.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self.layout = struct.Struct(f"={8 * HEADER}x{kernel.arguments}")


@functools.cache
def _compile_once(
    kernel: ParallelKernel, dtype: torch.dtype, code_folder: Path | None
) -> _Compiled:
    return _Compiled(kernel, dtype, code_folder)


def compile_afresh(kernel: ParallelKernel, dtype: torch.dtype) -> _KernelFunction:
    """Compile a kernel for a model dtype, whatever any cache holds."""
    function = _new_function(kernel, dtype)
    function.compile()
    return function


def _new_function(kernel: ParallelKernel, dtype: torch.dtype) -> _KernelFunction:
    pointer = simd.BF16_POINTER if dtype == torch.bfloat16 else simd.F32_POINTER
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    return _KernelFunction(kernel.body, ((pointer,), types.void), {}, options)


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


# -- inside a kernel -------------------------------------------------------------------------------


def _argument_code(kind: Any) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.bitcast(args[0], kind.as_pointer())
        return builder.load(builder.gep(values, [builder.add(args[1], ir.IntType(64)(HEADER))]))

    return codegen


@intrinsic
def argument(typingctx, block, index):
    """Return the int64 argument at `index` of a kernel's block."""
    return types.int64(block, types.int64), _argument_code(ir.IntType(64))


@intrinsic
def argument_f64(typingctx, block, index):
    """Return the f64 argument at `index` of a kernel's block."""
    return types.float64(block, types.int64), _argument_code(ir.DoubleType())


@intrinsic
def _fetch_add(typingctx, block, index):
    """Add 1 to the int64 at `index` of a block, atomically; return the old value."""

    def codegen(context, builder, signature, args):
        counters = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        counter = builder.gep(counters, [args[1]])
        return builder.atomic_rmw("add", counter, ir.IntType(64)(1), "seq_cst")

    return types.int64(block, types.int64), codegen


@intrinsic
def _load_acquire(typingctx, block, index):
    """Return the int64 at `index` of a block; later loads see what was stored before it rose."""

    def codegen(context, builder, signature, args):
        counters = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(builder.gep(counters, [args[1]]), "acquire", 8)

    return types.int64(block, types.int64), codegen


@intrinsic
def call_kernel(typingctx, code, block):
    """Call the machine code of a kernel at an address with the argument block at another."""

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


@njit
def wait_patiently(block, stage, num_items):
    """Return when all items of a stage are done; after a while, give the core away meanwhile."""
    num_looks = 0
    while _load_acquire(block, _NUM_STAGES + stage) < num_items:
        relax()
        num_looks += 1
        if num_looks > _PATIENCE:
            give_way()


@njit
def take(block, stage):
    """Return the next item of a stage; the caller stops when it is past the last."""
    return _fetch_add(block, stage)


@njit
def finish(block, stage):
    """Tell that an item of a stage is done."""
    _fetch_add(block, _NUM_STAGES + stage)


@njit
def wait_for(block, stage, num_items):
    """Return when all items of a stage are done."""
    while _load_acquire(block, _NUM_STAGES + stage) < num_items:
        relax()
