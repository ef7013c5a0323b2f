"""CuPy and NVSHMEM in the shared memory of this machine, as far as the transports call them.

The memory of rank r's "GPU" is the memfd number r, mapped where a rank asks for it. A stream does
what it was given later: some of it at any call, all of it when synchronised. NVSHMEM's puts are
delivered in any order, and only `quiet` completes them, as in the real library.

Parameter names are those of the wheels; `test_gpu_wheels.py` compares them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

_maps: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}
_lock = threading.Lock()


def map_heap(owner: int, rank: int, descriptor: int) -> int:
    """Return the address of a mapping of a rank's memory, one per process and owner."""
    with _lock:
        mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _maps[owner, address] = (rank, mapped)  # addresses stay valid: never unmapped
        return address


def words_at(address: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer((ctypes.c_uint64 * 1).from_address(address), dtype=np.uint64)


class FakeStream:
    """Runs what is queued in its order, at some later time."""

    def __init__(self, seed: int) -> None:
        self.ptr = 4711
        self._queue: list[Callable[[], None]] = []
        self._random = random.Random(seed)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def append(self, operation: Callable[[], None]) -> None:
        self._queue.append(operation)
        for _ in range(self._random.randint(0, 2)):
            self._run_one()

    def synchronize(self) -> None:
        while self._queue:
            self._run_one()

    def _run_one(self) -> None:
        if self._queue:
            self._queue.pop(0)()


class FakeRuntime:
    """`cupy.cuda.runtime`."""

    def __init__(self, rank: int, descriptors: Sequence[int], stream: FakeStream) -> None:
        self._rank = rank
        self._descriptors = descriptors
        self._stream = stream
        self.open_handles: set[int] = set()
        self.allocated: set[int] = set()

    def getDeviceCount(self) -> int:
        return 1

    def setDevice(self, device: int) -> None:
        assert device == 0

    def malloc(self, size: int) -> int:
        descriptor = self._descriptors[self._rank]
        assert size <= os.fstat(descriptor).st_size
        address = map_heap(self._rank, self._rank, descriptor)
        self.allocated.add(address)
        return address

    def free(self, ptr: int) -> None:
        self.allocated.remove(ptr)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        assert stream == self._stream.ptr
        self._stream.append(lambda: ctypes.memset(ptr, value, size) and None)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (4, self._stream.ptr)
        self._stream.append(lambda: ctypes.memmove(dst, src, size) and None)

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        assert devPtr in self.allocated
        return self._rank.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert len(handle) == 64
        rank = int.from_bytes(handle, "little")
        assert rank != self._rank, "CUDA refuses to open a handle of the same process"
        address = map_heap(self._rank, rank, self._descriptors[rank])
        self.open_handles.add(address)
        return address

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        self.open_handles.remove(devPtr)


class FakePinned(bytearray):
    """`PinnedMemoryPointer`: a buffer with an address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class FakeKernel:
    """`RawKernel` of the two kernels that the transports launch, by name."""

    def __init__(self, stream: FakeStream, name: str) -> None:
        self._stream = stream
        self._body = {"set_word": _set_word, "wait_word": _wait_word}[name]

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[np.uint64, ...]) -> None:
        assert grid == block == (1,)
        assert all(isinstance(argument, np.uint64) for argument in args)
        self._stream.append(lambda: self._body(*map(int, args)))


def _set_word(word: int, value: int) -> None:
    words_at(word)[0] = value


def _wait_word(word: int, at_least: int, timeout_ns: int, found: int) -> None:
    words, start = words_at(word), time.monotonic_ns()
    while words[0] < at_least and time.monotonic_ns() - start < timeout_ns:
        time.sleep(20e-6)
    words_at(found)[0] = words[0]


class FakeCupy:
    """The module, for one rank."""

    uint8 = np.uint8

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        self.stream = stream = FakeStream(rank)
        self.runtime = FakeRuntime(rank, descriptors, stream)
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            Stream=SimpleNamespace(null=stream),
            UnownedMemory=lambda ptr, size, owner, device_id: (ptr, size),
            MemoryPointer=lambda mem, offset: (mem[0] + offset, mem[1]),
            alloc_pinned_memory=lambda size: FakePinned(size),
        )

    def RawKernel(self, code: str, name: str) -> FakeKernel:
        assert f"void {name}(" in code
        return FakeKernel(self.stream, name)

    def ndarray(self, shape: tuple[int], dtype: type, memptr: tuple[int, int]) -> Any:
        address, size = memptr
        assert shape[0] <= size
        return np.frombuffer((ctypes.c_uint8 * shape[0]).from_address(address), dtype=dtype)


class FakeBindings:
    """`nvshmem.bindings`: addresses are those of the caller's own heap, wherever the data goes."""

    def __init__(self, rank: int, descriptors: Sequence[int], stream: FakeStream) -> None:
        self._bases = [map_heap(rank, peer, fd) for peer, fd in enumerate(descriptors)]
        self._rank = rank
        self._stream = stream
        self._size = os.fstat(descriptors[rank]).st_size
        self._random = random.Random(rank)
        self._puts: list[Callable[[], None]] = []
        self.freed: list[int] = []

    def calloc(self, count: int, size: int) -> int:
        return self._bases[self._rank] if count * size <= self._size else 0

    def free(self, ptr: int) -> None:
        self.freed.append(ptr)

    def putmem_nbi_on_stream(self, dest: int, source: int, bytes: int, pe: int, cstrm: int) -> None:
        target = self._remote(dest, pe, cstrm)
        copy = lambda: ctypes.memmove(target, source, bytes) and None  # noqa: E731
        self._stream.append(lambda: self._puts.append(copy))

    def signal_op_on_stream(
        self, sig_addr: int, signal: int, sig_op: int, pe: int, cstrm: int
    ) -> None:
        word = self._remote(sig_addr, pe, cstrm)
        assert sig_op == 9
        self._stream.append(lambda: _set_word(word, signal))

    def quiet_on_stream(self, cstrm: int) -> None:
        assert cstrm == self._stream.ptr
        self._stream.append(self._deliver)

    def _deliver(self) -> None:
        self._random.shuffle(self._puts)
        while self._puts:
            self._puts.pop()()

    def _remote(self, address: int, pe: int, stream: int) -> int:
        assert stream == self._stream.ptr
        offset = address - self._bases[self._rank]
        assert 0 <= offset < self._size, "not an address of the symmetric heap"
        return self._bases[pe] + offset


class FakeUniqueId:
    def __init__(self, text: bytes) -> None:
        self._data = np.frombuffer(text.ljust(128), dtype=np.uint8).copy()


class FakeCore:
    """`nvshmem.core`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.is_up = False

    def get_unique_id(self, empty: bool = False) -> FakeUniqueId:
        return FakeUniqueId(b"" if empty else b"the id of rank 0")

    def init(
        self,
        device: object = None,
        uid: FakeUniqueId | None = None,
        rank: int | None = None,
        nranks: int | None = None,
        mpi_comm: object = None,
        initializer_method: str = "",
    ) -> None:
        assert uid is not None
        assert uid._data.tobytes().startswith(b"the id of rank 0")
        assert (rank, nranks, initializer_method) == (self._rank, self._num_ranks, "uid")
        self.is_up = True

    def my_pe(self) -> int:
        return self._rank

    def n_pes(self) -> int:
        return self._num_ranks

    def finalize(self) -> None:
        self.is_up = False
