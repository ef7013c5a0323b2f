"""Runs one program on all ranks over each transport, in threads and in processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from tests.ep_comm.fake_cuda import FakeBindings, FakeCore, FakeCupy
from tests.ep_comm.faulty import FaultPlan, FaultyTransport
from tests.ep_comm.groups import run_faulty, run_loopback
from whalepod.ep_comm.gpu.cuda_ipc import CudaIpcTransport
from whalepod.ep_comm.gpu.nvshmem import Library, NvshmemTransport
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport import gloo
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import results_of
from whalepod.ep_comm.transport.shm import ShmTransport, create_heaps

T = TypeVar("T")
Program = Callable[[Transport], T]
REAL_TIMEOUT_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank finds its group: inherited descriptors, and a file that several may open."""

    num_ranks: int
    heap_bytes: int
    descriptors: Sequence[int]
    store_file: str

    def store(self) -> dist.Store:
        store = dist.FileStore(self.store_file, self.num_ranks)
        store.set_timeout(timedelta(milliseconds=REAL_TIMEOUT_MS))
        return store


def open_shm(place: Place, rank: int) -> Transport:
    return ShmTransport(rank, place.descriptors)


def open_faulty(place: Place, rank: int) -> Transport:
    return FaultyTransport(ShmTransport(rank, place.descriptors), 3, FaultPlan())


def open_gloo(place: Place, rank: int) -> Transport:
    group = gloo.connect(place.store(), rank, place.num_ranks, address="127.0.0.1")
    return gloo.GlooTransport(group, place.heap_bytes)


def open_cuda_ipc(place: Place, rank: int) -> Transport:
    cupy = FakeCupy(rank, place.descriptors)
    return CudaIpcTransport(
        rank, place.num_ranks, place.heap_bytes, place.store(), device=0, cupy=cupy
    )


def open_nvshmem(place: Place, rank: int) -> Transport:
    cupy = FakeCupy(rank, place.descriptors)
    library = Library(
        core=FakeCore(rank, place.num_ranks),
        bindings=FakeBindings(rank, place.descriptors, cupy.stream),
        cupy=cupy,
        open_device=lambda number: number,
    )
    return NvshmemTransport(
        rank, place.num_ranks, place.heap_bytes, place.store(), device=0, library=library
    )


OPENERS: dict[str, Callable[[Place, int], Transport]] = {
    "shm": open_shm,
    "faulty_shm": open_faulty,
    "gloo": open_gloo,
    "cuda_ipc": open_cuda_ipc,
    "nvshmem": open_nvshmem,
}


def make_place(heap: HeapLayout, folder: Path) -> Place:
    descriptors = create_heaps(heap.num_ranks, heap.num_bytes)
    number = len(list(folder.iterdir()))
    return Place(heap.num_ranks, heap.num_bytes, descriptors, str(folder / f"store{number}"))


def close_place(place: Place) -> None:
    for descriptor in place.descriptors:
        os.close(descriptor)


def play(
    name: str, place: Place, rank: int, program: Program[T], meet: Callable[[float], object]
) -> T:
    """Run the program of one rank; all ranks `meet` before they close."""
    transport = OPENERS[name](place, rank)
    try:
        result = program(transport)
        transport.quiet()
        meet(REAL_TIMEOUT_MS / 1e3)
    finally:
        transport.close()
    return result


def run_threads(name: str, heap: HeapLayout, program: Program[T], folder: Path) -> list[T]:
    """Run ranks in threads of this process, all at once."""
    place = make_place(heap, folder)
    results: list[T | Exception] = [RuntimeError("did not run")] * heap.num_ranks

    together = threading.Barrier(heap.num_ranks)

    def body(rank: int) -> None:
        try:
            results[rank] = play(name, place, rank, program, together.wait)
        except Exception as error:
            results[rank] = error
            together.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(heap.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close_place(place)
    first = [error for error in results if not isinstance(error, threading.BrokenBarrierError)]
    return results_of(first if len(first) < len(results) else results)


def run_processes(name: str, heap: HeapLayout, program: Program[T], folder: Path) -> None:
    """Run ranks in processes; raise what a rank raises."""
    place = make_place(heap, folder)
    context = multiprocessing.get_context("fork")
    errors: multiprocessing.Queue[str] = context.Queue()
    together = context.Barrier(heap.num_ranks)

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            play(name, place, rank, program, together.wait)
            errors.put("")
        except BaseException:
            errors.put(traceback.format_exc())
            together.abort()

    ranks = [context.Process(target=body, args=(rank,)) for rank in range(heap.num_ranks)]
    for process in ranks:
        process.start()
    found = [errors.get(timeout=2 * REAL_TIMEOUT_MS / 1e3) for _ in ranks]
    for process in ranks:
        process.join(timeout=REAL_TIMEOUT_MS / 1e3)
    close_place(place)
    assert not any(found), "\n".join(found)


class Runner(Protocol):
    def __call__(self, heap: HeapLayout, program: Program[T], folder: Path) -> list[T]: ...


def _loopback(heap: HeapLayout, program: Program[T], folder: Path) -> list[T]:
    return run_loopback(heap, program)


def _faulty(heap: HeapLayout, program: Program[T], folder: Path) -> list[T]:
    return results_of(run_faulty(heap, program, seed=4))


def _threads(name: str) -> Runner:
    def run(heap: HeapLayout, program: Program[T], folder: Path) -> list[T]:
        return run_threads(name, heap, program, folder)

    return run


RUNNERS: dict[str, Runner] = {
    "loopback": _loopback,
    "faulty": _faulty,
    **{name: _threads(name) for name in OPENERS},
}
