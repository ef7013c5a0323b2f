"""Starts the engine's process and ends it, whatever happens in between."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from whalepod.server.channel import EngineChannel
from whalepod.server.codec import encode_value
from whalepod.server.config import EngineConfig
from whalepod.server.engine_socket import EngineSocket, wait_until_ready
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import EngineInfo

ENGINE_MODULE = "whalepod.server.engine_process"
START_TIMEOUT_S = 1800.0
"""Loading hundreds of gigabytes from a network disk takes its time; progress is on stderr."""
STOP_GRACE_S = 10.0
"""From SIGTERM to SIGKILL: the engine ends after the step it is in."""
MAX_RESTARTS = 5
RESTARTS_COUNT_S = 600.0
"""An engine that was lost more often in this time is not started again."""


@dataclass(slots=True)
class Losses:
    """When earlier processes of one engine, or of one rank, were lost."""

    name: str
    lost_at: list[float] = field(default_factory=list)

    def count(self) -> None:
        """Note that it was lost. Raises GroupLost if that came too often."""
        now = time.monotonic()
        self.lost_at = [t for t in self.lost_at if now - t < RESTARTS_COUNT_S] + [now]
        if len(self.lost_at) > MAX_RESTARTS:
            raise GroupLost(
                f"{self.name} cannot be replaced: it was lost {len(self.lost_at)} times in "
                f"{RESTARTS_COUNT_S:.0f} s"
            )


class EngineProcess:
    """One engine in a process of its own, for the time of a `with` block.

    Entering waits until the engine can serve and raises StartupError, one sentence, when it
    cannot. Leaving stops the process and removes the socket's folder.
    """

    is_told_to_stop = False
    """Only another machine of a group could ask for it."""

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
        self._losses = Losses("the engine")
        self._num_lives = 0
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: EngineSocket | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = stack.enter_context(private_folder())
            stack.callback(self._end)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        life = f".{self._num_lives}" if self._num_lives else ""
        self._num_lives += 1
        address = f"ipc://{self._folder}/engine{life}"
        config = self._config
        if config.record and life:  # a file of its own: the earlier life's is kept
            config = replace(config, record=config.record + life)
        self._socket = EngineSocket("the engine", address, self.exit_reason)
        self._process = spawn(self._module, self._folder, num_threads=config.device.num_threads)
        assign(self._process, self._socket.address, encode_value(config))
        wait_until_ready([self._socket], self._start_timeout_s, lambda: self._why_stop)

    def _end(self) -> None:
        if self._process is not None:
            end_all([self._process], self._stop_grace_s)
        if self._socket is not None:
            self._socket.close()

    def restart(self) -> None:
        """Start a lost engine again; returns when it can serve. Its old channel is to be closed.

        Raises GroupLost, one sentence, when it was lost too often; any other error may be gone at
        the next try.
        """
        self._losses.count()
        self._end()
        self._start()

    def stop_restarting(self) -> None:
        """End a `restart` that runs in another thread, soon."""
        self._is_stopping = True

    @property
    def _why_stop(self) -> str | None:
        return "the server is stopping" if self._is_stopping else None

    @property
    def socket(self) -> EngineSocket:
        """The wire to the engine that runs at present."""
        assert self._socket is not None, "the engine was not started"
        return self._socket

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        return self.socket.info

    @property
    def pid(self) -> int:
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    def channel(self) -> EngineChannel:
        """Return the gateway's end of the wire, to be entered once; it ends with this process."""
        return self.socket.channel()

    def restarting_channel(self) -> EngineChannel:
        """Return the gateway's end, to be entered once, of this process and those after it."""
        from whalepod.server.engine_restart import RestartingChannel

        return RestartingChannel(self)

    def exit_reason(self) -> str | None:
        """Return how the process ended; None while it lives."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"the engine process {describe_exit(code)}"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder that is ours alone (mode 0700), and locked: cleaners of /tmp respect that.

    Raises StartupError.
    """
    with ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="whalepod-"))
        except OSError as error:
            raise StartupError(
                f"cannot make a folder for sockets in {tempfile.gettempdir()} "
                f"({error.strerror}): set TMPDIR to one with room"
            ) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield folder


def spawn(
    module: str,
    folder: Path,
    *,
    num_threads: int,
    pass_fds: Sequence[int] = (),
    preload: str = "",
) -> subprocess.Popen[bytes]:
    """Start an engine's process, which waits for what `assign` tells it.

    folder   of the launcher: removed by the process if the launcher was killed
    preload  module to import meanwhile
    """
    command = [sys.executable, "-P", "-m", module, "--folder", str(folder)]
    if preload:
        command += ["--preload", preload]
    return subprocess.Popen(
        [*command, "--parent-pid", str(os.getpid())],
        env=_environment(num_threads),
        pass_fds=pass_fds,
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),  # the caller's stdout may be read by a program
        process_group=0,  # Ctrl-C reaches the gateway only, which then ends the engine
    )


def assign(process: subprocess.Popen[bytes], address: str, payload: bytes) -> None:
    """Let a process connect to `address` and be the engine that `payload` describes."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once: its exit code tells how
        try:
            process.stdin.write(address.encode() + b"\n" + payload)
        finally:
            process.stdin.close()


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
        if process.stdin is not None:
            process.stdin.close()


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
