"""Opens a rank's end of the transport that was chosen for its group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from whalepod.ep_comm.transport import gloo
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.shm import ShmTransport
from whalepod.server.cluster.deadline import call_within
from whalepod.server.cluster.group_store import connect_library
from whalepod.server.cluster.rank_assignment import RankAssignment, prepare_heaps
from whalepod.server.errors import StartupError

LONELY_TIMEOUT_S = 300.0
"""How long the ranks of one machine wait to be connected to each other."""
LOOPBACK = "127.0.0.1"


def open_transport(
    assignment: RankAssignment,
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
        if assignment.transport == "shm":
            prepare_heaps(assignment, heap_bytes)
            return ShmTransport(assignment.rank, assignment.heap_fds)
        store = _open_store(assignment)
        if assignment.transport == "gloo":
            return _open_gloo(assignment, heap_bytes, store, patience_ms, on_arrival)
        return _open_on_gpu(assignment, heap_bytes, store)
    except (RuntimeError, ValueError) as error:
        raise StartupError(str(error)) from error


def _open_store(assignment: RankAssignment) -> Store:
    """Return what the transport's own rendezvous goes over."""
    plan = assignment.plan
    if not plan.is_spread:
        return FileStore(str(Path(assignment.folder) / "transport"), plan.num_ranks)
    return connect_library(plan, plan.timeout_s)


def _open_gloo(
    assignment: RankAssignment,
    heap_bytes: int,
    store: Store,
    patience_ms: float,
    on_arrival: Callable[[], None],
) -> Transport:
    address = assignment.address or LOOPBACK
    timeout_s = assignment.plan.timeout_s or LONELY_TIMEOUT_S
    rank, num_ranks = assignment.rank, assignment.num_ranks
    try:
        group = call_within(
            timeout_s, lambda: gloo.connect(store, rank, num_ranks, address=address)
        )
    except TimeoutError:
        raise StartupError(
            f"rank {rank} has no connections to all {num_ranks} ranks from {address} after "
            f"{timeout_s:g} s"
        ) from None
    return gloo.GlooTransport(
        group,
        heap_bytes,
        ranks_per_node=assignment.ranks_per_node,
        patience_ms=patience_ms,
        on_arrival=on_arrival,
    )


def _open_on_gpu(assignment: RankAssignment, heap_bytes: int, store: Store) -> Transport:
    """Open a transport between GPUs; their wheels need not be there otherwise."""
    from whalepod.ep_comm.gpu.cuda_ipc import CudaIpcTransport
    from whalepod.ep_comm.gpu.nvshmem import NvshmemTransport

    kind = CudaIpcTransport if assignment.transport == "cuda_ipc" else NvshmemTransport
    return kind(
        assignment.rank,
        assignment.num_ranks,
        heap_bytes,
        store,
        device=assignment.local_index,
        ranks_per_node=assignment.ranks_per_node,
    )
