"""What transports share whose heaps are GPU memory: words, waiting, and the heap as a tensor.

All operations go to one stream, CuPy's null stream, which is also torch's default one: a put is
ordered after the kernels that made its source. Words are read and written by tiny kernels with
system-scope acquire and release, since neither library has a wait with a deadline.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from whalepod.ep_comm.transport.interface import (
    MappedMemory,
    SignalWait,
    Topology,
    barrier_by_signals,
)

WAIT_SLICE_MS = 10.0
"""A wait is a row of kernels of at most this length, so that none holds the GPU for long."""

SOURCE = r"""
extern "C" __global__ void set_word(unsigned long long* word, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(word), "l"(value) : "memory");
}

extern "C" __global__ void wait_word(const unsigned long long* word, unsigned long long at_least,
                                     unsigned long long timeout_ns, unsigned long long* found) {
    unsigned long long start, now, value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (value < at_least && now - start < timeout_ns);
    *found = value;
    __threadfence_system();
}
"""
"""`found` is pinned memory of the host."""


class DeviceTransport(ABC):
    """One rank's end. The subclass says how bytes and signals reach other ranks.

    cupy     the module, or what tests put in its place
    address  of this rank's heap on its GPU, zeroed
    """

    def __init__(
        self, cupy: Any, rank: int, topology: Topology, address: int, heap_bytes: int, device: int
    ) -> None:
        self.rank = rank
        self.topology = topology
        self._cupy = cupy
        self._address = address
        self._stream = cupy.cuda.Stream.null
        memory = cupy.cuda.UnownedMemory(address, heap_bytes, None, device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        self.heap: Tensor = from_dlpack(cupy.ndarray((heap_bytes,), cupy.uint8, pointer))
        self._set_kernel = cupy.RawKernel(SOURCE, "set_word")
        self._wait_kernel = cupy.RawKernel(SOURCE, "wait_word")
        self._pinned = cupy.cuda.alloc_pinned_memory(8)
        self._found = np.frombuffer(self._pinned, dtype=np.uint64, count=1)
        self._sources: list[Tensor] = []
        self._num_barriers = 0

    def now_ms(self) -> float:
        return time.monotonic() * 1e3

    @abstractmethod
    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None: ...

    @abstractmethod
    def signal_op(self, signal_offset: int, value: int, rank: int) -> None: ...

    @abstractmethod
    def fence(self, rank: int) -> None: ...

    @abstractmethod
    def quiet(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def signal_fetch(self, signal_offset: int) -> int:
        return self._read_word(signal_offset, 0, 0.0)

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        while True:
            left_ms = max(deadline_ms - self.now_ms(), 0.0)
            value = self._read_word(signal_offset, at_least, min(left_ms, WAIT_SLICE_MS))
            if value >= at_least or self.now_ms() >= deadline_ms:
                return SignalWait(value >= at_least, value)

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    @property
    def mapped(self) -> MappedMemory | None:
        """Return None: rows go through the transport."""
        return None

    def peer_view(self, rank: int) -> Tensor | None:
        """Return None: rows go through the staging region, by the transport's own copies."""
        return None

    def _read_word(self, signal_offset: int, at_least: int, timeout_ms: float) -> int:
        arguments = (
            np.uint64(self._address + signal_offset),
            np.uint64(at_least),
            np.uint64(timeout_ms * 1e6),
            np.uint64(self._pinned.ptr),
        )
        with self._stream:
            self._wait_kernel((1,), (1,), arguments)
        self._stream.synchronize()
        return int(self._found[0])

    def _set_word(self, address: int, value: int) -> None:
        with self._stream:
            self._set_kernel((1,), (1,), (np.uint64(address), np.uint64(value)))

    def _keep(self, source: Tensor) -> int:
        """Keep a source alive until `quiet`; return its address."""
        assert source.is_contiguous(), source.stride()
        self._sources.append(source)
        return source.data_ptr()


def import_cupy() -> Any:
    """Return the module, or say what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"CuPy cannot be imported ({error}): install whalepod[cuda], or choose "
            f"--all2all-backend shm or gloo"
        ) from error
    return cupy
