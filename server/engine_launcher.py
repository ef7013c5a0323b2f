"""Starts the engine's process and ends it, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from whalepod.server.channel import EngineChannel
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig
from whalepod.server.engine_socket import EngineSocket, wait_until_ready
from whalepod.server.messages import EngineInfo

ENGINE_MODULE = "whalepod.server.engine_process"
START_TIMEOUT_S = 1800.0
"""Loading hundreds of gigabytes from a network disk takes its time; progress is on stderr."""
STOP_GRACE_S = 10.0
"""From SIGTERM to SIGKILL: the engine ends after the step it is in."""


class EngineProcess:
    """One engine in a process of its own, for the time of a `with` block.

    Entering waits until the engine can serve and raises StartupError, one sentence, when it
    cannot. Leaving stops the process and removes the socket's folder (mode 0700, ours alone).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        module: str = ENGINE_MODULE,
    ) -> None:
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._module = module

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="whalepod-")  # 0700
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._socket = EngineSocket("the engine", f"ipc://{folder}/engine", self.exit_reason)
            stack.callback(self._socket.close)
            self._process = spawn(
                self._module,
                self._socket.address,
                encode_value(self._config),
                num_threads=self._config.device.num_threads,
            )
            stack.callback(end_all, [self._process], self._stop_grace_s)
            wait_until_ready([self._socket], self._start_timeout_s)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    is_told_to_stop = False
    """Only another machine of a group could ask for it."""

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        return self._socket.info

    @property
    def pid(self) -> int:
        return self._process.pid

    def channel(self) -> EngineChannel:
        """Return the gateway's end of the wire, to be entered once."""
        return self._socket.channel()

    def exit_reason(self) -> str | None:
        """Return how the process ended; None while it lives."""
        code = self._process.poll()
        return None if code is None else f"the engine process {describe_exit(code)}"


def spawn(
    module: str,
    address: str,
    payload: bytes,
    *,
    num_threads: int,
    pass_fds: Sequence[int] = (),
    shared_folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start an engine's process that connects to `address` and reads `payload` on its stdin."""
    command = [sys.executable, "-P", "-m", module]
    if shared_folder is not None:
        command += ["--shared-folder", str(shared_folder)]
    process = subprocess.Popen(
        [*command, "--address", address, "--parent-pid", str(os.getpid())],
        env=_environment(num_threads),
        pass_fds=pass_fds,
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),  # the caller's stdout may be read by a program
        process_group=0,  # Ctrl-C reaches the gateway only, which then ends the engine
    )
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(payload)
    except BrokenPipeError:
        pass  # it died at once: its exit code tells how
    return process


def end_all(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """End processes: SIGTERM, after one grace for all of them SIGKILL."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.terminate()  # nothing happens if it has ended
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def describe_exit(code: int) -> str:
    """Return how a process ended, for people."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _environment(num_threads: int) -> dict[str, str]:
    """Return the environment of an engine: the caller's modules, and its own thread pools.

    The pools read their sizes when they are imported, so they are set before the process starts.
    Threads that wait sleep instead of spinning: the gateway, and all else that shares the cores,
    would otherwise hold up every parallel region for a scheduler quantum. torch's C++ parts warn of
    addresses without a name.
    """
    threads = str(num_threads or available_cores())
    return (
        {"OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        | os.environ
        | {
            "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
        }
    )


def available_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
