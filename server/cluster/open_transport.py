"""Opens a rank's end of the transport that was chosen for its group."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import FileStore, ProcessGroup, Store

from whalepod.ep_comm.transport import gloo
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.shm import ShmTransport
from whalepod.server.cluster.deadline import call_within
from whalepod.server.cluster.group_store import connect_library
from whalepod.server.cluster.rank_assignment import RankAssignment
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
    plan, rank = assignment.plan, assignment.rank
    try:
        if assignment.transport == "shm":
            _settle_heaps(assignment, heap_bytes)
            return ShmTransport(rank, assignment.heap_fds)
        if plan.is_spread:
            store: Store = connect_library(plan, plan.timeout_s)
        else:
            store = FileStore(str(Path(assignment.folder) / "transport"), plan.num_ranks)
        if assignment.transport == "gloo":
            return gloo.GlooTransport(
                _connect_gloo(assignment, store),
                heap_bytes,
                ranks_per_node=plan.ranks_per_node,
                patience_ms=patience_ms,
                on_arrival=on_arrival,
            )
        return _open_on_gpu(assignment, heap_bytes, store)
    except (RuntimeError, ValueError) as error:
        raise StartupError(str(error)) from error


def _settle_heaps(assignment: RankAssignment, heap_bytes: int) -> None:
    """Give the heaps their size, whichever rank comes first. ValueError if it was another one."""
    for descriptor in assignment.heap_fds:
        found = os.fstat(descriptor).st_size
        if found not in (0, heap_bytes):
            raise ValueError(
                f"rank {assignment.rank} needs heaps of {heap_bytes} bytes, another rank has made "
                f"them {found}: start all ranks with the same version and flags"
            )
        os.ftruncate(descriptor, heap_bytes)


def _connect_gloo(assignment: RankAssignment, store: Store) -> ProcessGroup:
    """Return when all ranks are connected. Raises RuntimeError."""
    address, num_ranks = assignment.address or LOOPBACK, assignment.num_ranks
    timeout_s = assignment.plan.timeout_s or LONELY_TIMEOUT_S
    try:
        return call_within(
            timeout_s, lambda: gloo.connect(store, assignment.rank, num_ranks, address=address)
        )
    except TimeoutError:
        raise RuntimeError(
            f"no connections from {address} to all {num_ranks} ranks after {timeout_s:g} s"
        ) from None


def _open_on_gpu(assignment: RankAssignment, heap_bytes: int, store: Store) -> Transport:
    """Open a transport between GPUs; their wheels need not be there otherwise."""
    from whalepod.ep_comm.gpu.cuda_ipc import CudaIpcTransport
    from whalepod.ep_comm.gpu.nvshmem import NvshmemTransport

    kind = CudaIpcTransport if assignment.transport == "cuda_ipc" else NvshmemTransport
    plan = assignment.plan
    return kind(
        assignment.rank,
        plan.num_ranks,
        heap_bytes,
        store,
        device=assignment.rank % plan.ranks_per_node,
        ranks_per_node=plan.ranks_per_node,
    )
