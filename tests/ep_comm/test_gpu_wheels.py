"""The fakes of CuPy and NVSHMEM take the arguments of the wheels; errors say what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.ep_comm import fake_cuda, test_by_expert as expert_case
from tests.ep_comm.transports import run_threads
from whalepod.ep_comm.gpu import cuda_ipc, nvshmem
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.shm import create_heaps

RUNTIME_CALLS = [
    "getDeviceCount",
    "setDevice",
    "malloc",
    "free",
    "memsetAsync",
    "memcpyAsync",
    "ipcGetMemHandle",
    "ipcOpenMemHandle",
    "ipcCloseMemHandle",
]
CORE_CALLS = ["get_unique_id", "init", "my_pe", "n_pes", "finalize"]


def wheel(name: str) -> Any:
    """Return a module of the `cuda` extra, which exists for Linux on x86-64 only."""
    return pytest.importorskip(name, reason="gpu: needs the wheels of whalepod[cuda]")


def declared(function: Callable[..., Any]) -> list[str]:
    """Return parameter names, from the docstring's first line where there is no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        text = re.match(r"\w+\((.*?)\)", inspect.getdoc(function) or "")
        assert text is not None, function
        parts = [part.split("=")[0].split() for part in text[1].split(",")]
        return [part[-1] for part in parts if part]


def own(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.gpu
def test_what_we_call_of_nvshmem_is_what_the_wheel_has() -> None:
    bindings, core = wheel("nvshmem.bindings"), wheel("nvshmem.core")
    for name in nvshmem.CALLS:
        assert declared(getattr(bindings, name)) == own(getattr(fake_cuda.FakeBindings, name)), name
    for name in CORE_CALLS:
        assert declared(getattr(core, name)) == own(getattr(fake_cuda.FakeCore, name)), name
    assert int(core.SignalOp.SIGNAL_SET) == nvshmem.SIGNAL_SET
    nvshmem.check_version(wheel("nvshmem").__version__, bindings)


@pytest.mark.gpu
def test_a_unique_id_of_the_wheel_travels_as_bytes() -> None:
    bindings = wheel("nvshmem.bindings")
    sent, received = bindings.uniqueid(), bindings.uniqueid()
    sent._data.view("u1")[...] = range(sent._data.nbytes)
    data = sent._data.tobytes()
    received._data[...] = np.frombuffer(data, dtype=received._data.dtype)
    assert received.version == sent.version == int.from_bytes(bytes(range(4)), "little")


@pytest.mark.gpu
def test_what_we_call_of_cupy_is_what_the_wheel_has() -> None:
    cupy = wheel("cupy")
    for name in RUNTIME_CALLS:
        found = declared(getattr(cupy.cuda.runtime, name))
        assert found == own(getattr(fake_cuda.FakeRuntime, name)), name
    assert declared(cupy.RawKernel)[:2] == ["code", "name"]
    assert declared(cupy.cuda.UnownedMemory) == ["ptr", "size", "owner", "device_id"]
    assert declared(cupy.cuda.MemoryPointer) == ["mem", "offset"]
    assert declared(cupy.cuda.alloc_pinned_memory) == ["size"]
    assert hasattr(cupy.cuda.Stream.null, "ptr")
    assert cupy.cuda.runtime.memcpyDefault == cuda_ipc._COPY_DEFAULT
    assert cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess == cuda_ipc._LAZY_PEER_ACCESS


def test_an_old_nvshmem_is_refused_by_name() -> None:
    fakes = SimpleNamespace(**dict.fromkeys(nvshmem.CALLS[1:]))
    with pytest.raises(RuntimeError, match=r"nvshmem4py 0\.3\.1 is too old, 0\.4 .*lacks calloc"):
        nvshmem.check_version("0.3.1", fakes)


def test_a_missing_driver_and_a_full_heap_are_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    descriptors = create_heaps(1, 1024)
    cupy = fake_cuda.FakeCupy(0, descriptors)

    def no_driver(number: int) -> None:
        raise RuntimeError("CUDA_ERROR_NO_DEVICE")

    def library(open_device: Callable[[int], Any]) -> nvshmem.Library:
        return nvshmem.Library(
            core=fake_cuda.FakeCore(0, 1),
            bindings=fake_cuda.FakeBindings(0, descriptors, cupy.stream),
            cupy=cupy,
            open_device=open_device,
        )

    with pytest.raises(RuntimeError, match=r"cannot use GPU 3 .CUDA_ERROR_NO_DEVICE"):
        nvshmem.NvshmemTransport(0, 1, 64, store, device=3, library=library(no_driver))
    with pytest.raises(RuntimeError, match="no 4096 bytes for the heap: raise NVSHMEM_SYMMETRIC"):
        nvshmem.NvshmemTransport(0, 1, 4096, store, device=0, library=library(lambda n: n))
    with pytest.raises(RuntimeError, match="wants GPU 1, this host has 1"):
        cuda_ipc.CudaIpcTransport(0, 1, 64, store, device=1, cupy=cupy)


def test_a_fence_that_is_forgotten_on_nvshmem_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = expert_case.make_config(2)
    heap, regions = expert_case.make_heap(config)
    program = expert_case.Round(config, regions, tuple(range(8)))
    monkeypatch.setattr(nvshmem.NvshmemTransport, "fence", lambda self, rank: None)
    monkeypatch.setattr(expert_case, "TIMEOUT_MS", 2000.0)
    with pytest.raises(AssertionError):
        run_threads("nvshmem", heap, program, tmp_path)


def test_handles_and_memory_are_given_back(tmp_path: Path) -> None:
    heap = HeapLayout(2)
    found: list[fake_cuda.FakeRuntime] = []

    def program(transport: Transport) -> None:
        assert isinstance(transport, cuda_ipc.CudaIpcTransport)
        runtime = transport._runtime
        assert len(runtime.open_handles) == len(runtime.allocated) == 1
        found.append(runtime)

    run_threads("cuda_ipc", heap, program, tmp_path)
    assert [(r.open_handles, r.allocated) for r in found] == [(set(), set())] * 2
