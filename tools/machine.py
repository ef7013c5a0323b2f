"""What the machine has, read without loading torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whalepod.server.memory import memory_bytes

CPU_FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
REQUIRED = (
    "torch", "numba", "safetensors", "transformers", "fastapi", "uvicorn", "pyzmq", "msgpack",
)  # fmt: skip
OPTIONAL = {
    "triton": "GPU kernels: pip install triton (Linux)",
    "nvshmem4py-cu13": "expert parallelism over GPUs: pip install 'whalepod[cuda]'",
    "cupy-cuda13x": "CUDA IPC between ranks: pip install 'whalepod[cuda]'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    name: str
    version: str | None
    """None: not installed."""
    hint: str
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    system: str
    python: str
    cpu: str
    num_cores: int
    """That this process may use."""
    cpu_features: tuple[str, ...]
    memory_bytes: int
    available_memory_bytes: int
    gpus: tuple[Gpu, ...]
    packages: tuple[Package, ...]
    num_compiled_kernels: int
    """In the compile cache; with none the first start takes longer."""


def inspect_machine() -> Machine:
    """Look at the machine. Reads files and runs nvidia-smi if there is one; needs no network."""
    from whalepod.models.source import compiled_code_folder

    total, available = memory_bytes()
    info = _read("/proc/cpuinfo")
    hints = {name: f"pip install {name}" for name in REQUIRED} | OPTIONAL
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=_cpuinfo_value(info, "model name") or platform.processor() or platform.machine(),
        num_cores=num_usable_cores(),
        cpu_features=cpu_features(info),
        memory_bytes=total,
        available_memory_bytes=available,
        gpus=tuple(_gpus()),
        packages=tuple(
            Package(name=name, version=_version(name), hint=hint, required=name in REQUIRED)
            for name, hint in hints.items()
        ),
        num_compiled_kernels=sum(1 for _ in compiled_code_folder().rglob("*.nbi")),
    )


def num_usable_cores() -> int:
    """Count the cores that affinity and the container's quota leave to this process."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.strip().isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Pick the features that matter to matrix products out of /proc/cpuinfo."""
    flags = (_cpuinfo_value(cpuinfo, "flags") or _cpuinfo_value(cpuinfo, "Features")).split()
    return tuple(feature for feature in CPU_FEATURES if feature in flags)


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    try:
        bind_port(host, port)
    except OSError:
        return False
    return True


def bind_port(host: str, port: int) -> int:
    """Bind a port for a moment and return its number (0: any). Raises OSError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _gpus() -> Iterator[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return  # a driver that does not answer is a GPU that cannot be used
    for line in answer.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            yield Gpu(name=name.strip(), memory_bytes=int(mebibytes) << 20)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo_value(cpuinfo: str, key: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
