"""Starts the engine's process and ends it, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from whalepod.server.channel import EngineChannel
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig
from whalepod.server.engine_socket import EngineSocket
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
        name: str = "the engine",
        payload: bytes | None = None,
        pass_fds: Sequence[int] = (),
        shared_folder: Path | None = None,
    ) -> None:
        """name: in messages for people; payload: what it reads on stdin, None: its configuration;
        pass_fds: descriptors that it inherits; shared_folder: what it removes with its own if its
        launcher is killed."""
        self._shared_folder = shared_folder
        self._name = name
        self._payload = encode_value(config) if payload is None else payload
        self._pass_fds = tuple(pass_fds)
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def start(self) -> None:
        """Start the process; `wait_until_ready` is to follow, `stop` ends it."""
        self._folder = tempfile.mkdtemp(prefix="whalepod-")  # 0700
        self._socket = EngineSocket(self._name)
        try:
            self._process = self._spawn(self._socket.bind(f"ipc://{self._folder}/engine"))
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self, why_stop: Callable[[], str | None] = lambda: None) -> None:
        """Return when the engine can serve. Raises StartupError, and leaves nothing behind.

        why_stop  says why it is of no use to wait any longer; None: it is
        """
        assert self._process is not None, "the engine was not started"
        try:
            self._socket.wait_for_info(self._start_timeout_s, self.exit_reason, why_stop)
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        return self._socket.info

    @property
    def pid(self) -> int:
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    def channel(self) -> EngineChannel:
        """Return the gateway's end of the wire, to be entered once."""
        return self._socket.channel(self.exit_reason)

    def exit_reason(self) -> str | None:
        """Say how the process ended; None while it lives."""
        code = self._process.poll() if self._process is not None else None
        return None if code is None else f"{self._name} process {describe_exit(code)}"

    def startup_error(self) -> str | None:
        """Return why the engine could not start, if it has said so."""
        return self._socket.startup_error()

    def terminate(self) -> None:
        """Ask the process to end; `stop` waits for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once, whatever it does, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End the process (SIGTERM, after a grace SIGKILL) and remove the folder."""
        if self._process is not None:
            end(self._process, self._stop_grace_s)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, address: str) -> subprocess.Popen[bytes]:
        return spawn(
            self._module,
            address,
            self._payload,
            num_threads=self._config.device.num_threads,
            pass_fds=self._pass_fds,
            shared_folder=self._shared_folder,
        )


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
        pass  # it died at once: whoever waits for it says how
    return process


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process: SIGTERM, after a grace SIGKILL."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _environment(num_threads: int) -> dict[str, str]:
    """Return the environment of an engine: the caller's modules, and its own thread pools.

    The pools read their sizes when they are imported, so they are set before the process starts.
    Threads that wait sleep instead of spinning: the gateway, and whoever else shares the cores,
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
