"""Ranks whose GPUs are on several hosts, over NVSHMEM.

One symmetric byte heap, and the low-level calls with raw pointers: the array calls move whole
buffers only. Puts are not ordered at all until `quiet` on the stream, which is also the fence, as
there is none on a stream. Waiting is a kernel of ours, because NVSHMEM's has no deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from whalepod.ep_comm.gpu.device import DeviceTransport, import_cupy
from whalepod.ep_comm.transport.interface import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SIGNAL_SET = 9
MIN_VERSION = (0, 4)
_KEY = "whalepod/nvshmem/unique_id"

CALLS = (
    "calloc",
    "free",
    "putmem_nbi_on_stream",
    "signal_op_on_stream",
    "quiet_on_stream",
)
"""What we call of `nvshmem.bindings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The modules, or what tests put in their place.

    open_device  number -> what `core.init` wants; raises without a driver
    """

    core: Any
    bindings: Any
    cupy: Any
    open_device: Callable[[int], Any]


def load_library() -> Library:
    """Import NVSHMEM's modules; RuntimeError says which one does not fit and what to install."""
    try:
        import nvshmem
        import nvshmem.bindings as bindings
        import nvshmem.core as core
        from cuda.core import Device
    except ImportError as error:
        raise RuntimeError(
            f"NVSHMEM cannot be imported ({error}): install whalepod[cuda] (nvshmem4py "
            f"{_text(MIN_VERSION)} or later), or choose --all2all-backend gloo"
        ) from error
    check_version(nvshmem.__version__, bindings)

    def open_device(number: int) -> Any:
        device = Device(number)
        device.set_current()
        return device

    return Library(core=core, bindings=bindings, cupy=import_cupy(), open_device=open_device)


def check_version(version: str, bindings: Any) -> None:
    """Raise RuntimeError unless this nvshmem4py has all that we call."""
    found = tuple(int(part) for part in version.split(".")[:2])
    missing = [name for name in CALLS if not hasattr(bindings, name)]
    if found < MIN_VERSION or missing:
        raise RuntimeError(
            f"nvshmem4py {version} is too old, {_text(MIN_VERSION)} is needed"
            f"{' (it lacks ' + ', '.join(missing) + ')' if missing else ''}: "
            f"install whalepod[cuda] again"
        )


class NvshmemTransport(DeviceTransport):
    """One rank (PE).

    store   carries NVSHMEM's unique id, once
    device  this rank's GPU
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
        library: Library | None = None,
    ) -> None:
        library = library or load_library()
        self._core, self._bindings = library.core, library.bindings
        self._start(library, rank, num_ranks, store, device)
        heap_bytes = 8 * -(-heap_bytes // 8)
        address = self._bindings.calloc(heap_bytes, 1)
        if not address:
            raise RuntimeError(
                f"NVSHMEM has no {heap_bytes} bytes for the heap: raise NVSHMEM_SYMMETRIC_SIZE on "
                f"all ranks, or lower the most tokens of a dispatch"
            )
        topology = Topology(num_ranks, ranks_per_node or num_ranks)
        super().__init__(library.cupy, rank, topology, address, heap_bytes, device)

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        if not source.numel():
            return
        self._bindings.putmem_nbi_on_stream(
            self._address + offset, self._keep(source), source.numel(), rank, self._stream.ptr
        )

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        self._bindings.signal_op_on_stream(
            self._address + signal_offset, value, SIGNAL_SET, rank, self._stream.ptr
        )

    def fence(self, rank: int) -> None:
        self._bindings.quiet_on_stream(self._stream.ptr)

    def quiet(self) -> None:
        self._bindings.quiet_on_stream(self._stream.ptr)
        self._stream.synchronize()
        self._sources.clear()

    def close(self) -> None:
        """Free the heap and leave NVSHMEM; all ranks do it together."""
        self.quiet()
        self._bindings.free(self._address)
        self._core.finalize()

    def _start(
        self, library: Library, rank: int, num_ranks: int, store: Store, device: int
    ) -> None:
        """Bring up NVSHMEM with a unique id of rank 0."""
        try:
            opened = library.open_device(device)
        except Exception as error:  # cuda.core has many classes for a missing driver
            raise RuntimeError(
                f"rank {rank} cannot use GPU {device} ({error}): NVSHMEM needs a CUDA driver"
            ) from error
        core = self._core
        if rank == 0:
            unique_id = core.get_unique_id()
            store.set(_KEY, unique_id._data.tobytes())
        else:
            unique_id = core.get_unique_id(empty=True)
            data = np.frombuffer(store.get(_KEY), dtype=unique_id._data.dtype)
            unique_id._data[...] = data.reshape(unique_id._data.shape)
        core.init(
            device=opened, uid=unique_id, rank=rank, nranks=num_ranks, initializer_method="uid"
        )
        if core.my_pe() != rank or core.n_pes() != num_ranks:
            raise RuntimeError(
                f"NVSHMEM numbers this rank {core.my_pe()} of {core.n_pes()}, the group {rank} of "
                f"{num_ranks}: another NVSHMEM job runs in this process"
            )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
