"""Opens a rank's end of the transport that was chosen for its group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import FileStore, Store

from whalepod.ep_comm.transport import gloo
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.shm import ShmTransport
from whalepod.server.cluster.seat import Seat, prepare_heaps
from whalepod.server.cluster.store import connect_library
from whalepod.server.errors import StartupError

T = TypeVar("T")
LONELY_TIMEOUT_S = 300.0
"""How long the ranks of one machine wait to be connected to each other."""
LOOPBACK = "127.0.0.1"


def open_transport(
    seat: Seat,
    heap_bytes: int,
    *,
    patience_ms: float,
    on_arrival: Callable[[], None],
) -> Transport:
    """Open it; returns when all ranks are connected, where they have to be. Raises StartupError.

    patience_ms  how long a peer may take no data; shorter than the deadline of a dispatch
    on_arrival   called when another rank has set a signal, from any thread, if the transport can
    """
    try:
        if seat.transport == "shm":
            prepare_heaps(seat, heap_bytes)
            return ShmTransport(seat.rank, seat.heap_descriptors)
        store = _open_store(seat)
        if seat.transport == "gloo":
            return _open_gloo(seat, heap_bytes, store, patience_ms, on_arrival)
        return _open_on_gpu(seat, heap_bytes, store)
    except (RuntimeError, ValueError) as error:
        raise StartupError(str(error)) from error


def _open_store(seat: Seat) -> Store:
    """Return what the transport's own rendezvous goes over."""
    meeting = seat.meeting
    if meeting is None:
        return FileStore(str(Path(seat.folder) / "transport"), seat.num_ranks)
    return connect_library(meeting.host, meeting.port, meeting.attempt, meeting.timeout_s)


def _open_gloo(
    seat: Seat,
    heap_bytes: int,
    store: Store,
    patience_ms: float,
    on_arrival: Callable[[], None],
) -> Transport:
    meeting = seat.meeting
    address = meeting.address if meeting else LOOPBACK
    timeout_s = meeting.timeout_s if meeting else LONELY_TIMEOUT_S
    group = _within(
        timeout_s,
        lambda: gloo.connect(store, seat.rank, seat.num_ranks, address=address),
        f"rank {seat.rank} has no connections to all {seat.num_ranks} ranks from {address}",
    )
    return gloo.GlooTransport(
        group,
        heap_bytes,
        ranks_per_node=seat.ranks_per_node,
        patience_ms=patience_ms,
        on_arrival=on_arrival,
    )


def _open_on_gpu(seat: Seat, heap_bytes: int, store: Store) -> Transport:
    """Open a transport between GPUs; their wheels need not be there otherwise."""
    from whalepod.ep_comm.transport.cuda_ipc import CudaIpcTransport
    from whalepod.ep_comm.transport.nvshmem import NvshmemTransport

    kind = CudaIpcTransport if seat.transport == "cuda_ipc" else NvshmemTransport
    return kind(
        seat.rank,
        seat.num_ranks,
        heap_bytes,
        store,
        device=seat.local_index,
        ranks_per_node=seat.ranks_per_node,
    )


def _within(timeout_s: float, function: Callable[[], T], complaint: str) -> T:
    """Return what `function` returns; RuntimeError if that takes too long.

    It has no deadline of its own, so it runs in a thread, which is left behind in that case.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=run, name="connect", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        raise RuntimeError(f"{complaint} after {timeout_s:g} s") from None
