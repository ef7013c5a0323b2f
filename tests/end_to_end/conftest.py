"""A real server: `whalepod serve` in its own processes, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.gateway.serving import wait_until
from whalepod.models.synthetic import synthesize

PROGRAM = "import sys; from whalepod.tools.cli import main; sys.exit(main())"
STOP_S = 60


@contextmanager
def serve(*arguments: str) -> Iterator[str]:
    """Start a server and yield its address once it answers; it must stop with exit code 0."""
    with serve_process(*arguments) as (address, _):
        yield address


@contextmanager
def serve_process(*arguments: str) -> Iterator[tuple[str, int]]:
    """Do the same, and yield the id of the gateway's process, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", *arguments, "--port", "0", "--num-threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        address = _read_address(process)
        wait_until(lambda: _is_ready(address))
        yield address, process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    finally:
        process.kill()
        process.communicate()


def _read_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:  # ends when a server that fails closes its stdout
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            return match[0]
    raise AssertionError(f"the server ended with exit code {process.wait(STOP_S)}")


def _is_ready(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/ready", timeout=10).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random v3-nano in fp32."""
    return synthesize("v3-nano", tmp_path_factory.mktemp("models") / "nano", dtype="fp32")


@pytest.fixture(scope="session")
def invariant_server(nano_folder: Path) -> Iterator[str]:
    """v3-nano in batch-invariant mode."""
    with serve(
        str(nano_folder), "--dtype", "fp32", "--batch-invariant", "--max-num-seqs", "16",
        "--kv-cache-memory", "64M",
    ) as address:  # fmt: skip
        yield address


@pytest.fixture(scope="session")
def fast_server(nano_folder: Path) -> Iterator[str]:
    """v3-nano on the CPU kernels, with few blocks."""
    with serve(
        str(nano_folder), "--dtype", "fp32", "--kernels", "cpu", "--max-num-seqs", "32",
        "--kv-cache-memory", "16M",
    ) as address:  # fmt: skip
        yield address
