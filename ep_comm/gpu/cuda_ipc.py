"""Ranks of one host with GPUs: each maps the others' heaps through CUDA's memory handles.

A put is an asynchronous copy on the stream, a signal a kernel after it that stores with release at
system scope; a stream runs in its order, so a fence has nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from whalepod.ep_comm.gpu.device import DeviceTransport, import_cupy
from whalepod.ep_comm.transport.interface import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COPY_DEFAULT = 4
"""cudaMemcpyDefault: the driver finds out where both ends are."""

_LAZY_PEER_ACCESS = 1


class CudaIpcTransport(DeviceTransport):
    """One rank of a host. Ranks meet in a barrier before they close: a heap must outlive its uses.

    store   carries the handles, once
    device  this rank's GPU; ranks may share one
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        heap_bytes: int,
        store: Store,
        *,
        device: int,
        ranks_per_node: int | None = None,
        cupy: Any = None,
    ) -> None:
        cupy = cupy or import_cupy()
        self._runtime = runtime = cupy.cuda.runtime
        num_devices = _count_devices(runtime)
        if not 0 <= device < num_devices:
            raise RuntimeError(f"rank {rank} wants GPU {device}, this host has {num_devices}")
        runtime.setDevice(device)
        heap_bytes = 8 * -(-heap_bytes // 8)
        address = runtime.malloc(heap_bytes)
        topology = Topology(num_ranks, ranks_per_node or num_ranks)
        super().__init__(cupy, rank, topology, address, heap_bytes, device)
        runtime.memsetAsync(address, 0, heap_bytes, self._stream.ptr)
        self._stream.synchronize()
        self._heaps = self._exchange(store)

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        if not source.numel():
            return
        self._runtime.memcpyAsync(
            self._heaps[rank] + offset,
            self._keep(source),
            source.numel(),
            _COPY_DEFAULT,
            self._stream.ptr,
        )

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        self._set_word(self._heaps[rank] + signal_offset, value)

    def fence(self, rank: int) -> None:
        """Do nothing: the stream runs in its order, and signals release."""

    def quiet(self) -> None:
        self._stream.synchronize()
        self._sources.clear()

    def close(self) -> None:
        self.quiet()
        for rank, address in enumerate(self._heaps):
            if rank != self.rank:
                self._runtime.ipcCloseMemHandle(address)
        self._runtime.free(self._address)

    def _exchange(self, store: Store) -> list[int]:
        """Publish this rank's handle; return the addresses of all heaps in this process."""
        store.set(_key(self.rank), self._runtime.ipcGetMemHandle(self._address))
        heaps = []
        for rank in range(self.topology.num_ranks):
            if rank == self.rank:
                heaps.append(self._address)
            else:
                handle = store.get(_key(rank))
                heaps.append(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        return heaps


def _key(rank: int) -> str:
    return f"whalepod/cuda_ipc/{rank}"


def _count_devices(runtime: Any) -> int:
    try:
        return int(runtime.getDeviceCount())
    except Exception as error:  # CuPy's own class, which a fake need not have
        raise RuntimeError(f"no GPU can be used here ({error}): choose shm or gloo") from error
