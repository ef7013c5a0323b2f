"""Servers under the same load: whalepod's, llama.cpp's and vLLM's, one at work at a time.

The load is `whalepod bench serve`'s closed loop over `/v1/completions`: random prompts of 32
tokens, answers of 64. A server that starts slowly stays, frozen by SIGSTOP between its turns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whalepod.tools.bench.config import (
    BenchServeConfig,
    LoadConfig,
    ReportConfig,
    TargetConfig,
    WorkloadConfig,
)
from whalepod.tools.client import Client, ClientError
from whalepod.tools.peers.programs import (
    PeerFailed,
    Samples,
    last_words,
    own_environment,
    peer_environment,
    whalepod_command,
)

CONCURRENCIES = (1, 16)
INPUT_TOKENS = 32
OUTPUT_TOKENS = 64
_MAX_TOKEN_ID = 8000
_MAX_MODEL_LEN = 1024
_SLOT_TOKENS = 256
"""Room for a request; llama-server rounds it up to a multiple of this."""
_SHARE_ALONE = 16
"""Without company a server gets one of this many requests."""
_STOP_GRACE_S = 20.0
_POLL_S = 0.25

Command = Callable[[int], list[str]]
"""A server's command line, given its port."""


def rate_row(concurrency: int) -> str:
    """Name a row: output tokens/s over HTTP."""
    return f"HTTP x {concurrency}, tok/s"


def ttft_row(concurrency: int) -> str:
    """Name a row: the median time to first token over HTTP."""
    return f"HTTP x {concurrency}, TTFT ms"


class ServerProcess:
    """A server in a session of its own; `stop` ends whatever it started."""

    def __init__(self, command: Command, environment: Mapping[str, str]) -> None:
        """Start it on a free port. Raises PeerFailed if there is no such program."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        descriptor, name = tempfile.mkstemp(prefix="whalepod-peer-", suffix=".log")
        self._log = Path(name)
        words = command(port)
        try:
            self._process = subprocess.Popen(
                words, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=descriptor, stderr=descriptor,
            )  # fmt: skip
        except OSError as error:
            self._log.unlink()
            raise PeerFailed(f"{words[0]} cannot be run: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Return once `path` answers 200. Raises PeerFailed if it ends first or is late."""
        deadline = time.monotonic() + timeout_s
        with Client(self.url, None, timeout_s=5.0) as client:
            while not _answers(client, path):
                if (code := self._process.poll()) is not None:
                    raise PeerFailed(f"the server ended with code {code}: {self._last_words()}")
                if time.monotonic() > deadline:
                    raise PeerFailed(f"not ready after {timeout_s:g} s: {self._last_words()}")
                time.sleep(_POLL_S)

    def freeze(self) -> None:
        """Take it off the cores."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it and its children: asked first, killed after the grace period."""
        self._signal(signal.SIGTERM)
        self.thaw()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # it is killed, as are children that it may have left behind
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._log.unlink()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # no process is left

    def _last_words(self) -> str:
        return last_words(self._log.read_text("utf-8", "replace").splitlines())


@dataclass(slots=True, kw_only=True)
class Served:
    """One engine over HTTP."""

    name: str
    command: Command
    environment: Mapping[str, str]
    num_requests: int
    """Of the run with most of them at once."""
    timeout_s: float
    ready_path: str = "/health"
    stays: bool = False
    """It is started once, and frozen between its turns."""
    _server: ServerProcess | None = field(default=None, init=False)

    def measure(self, turn: int) -> Samples:
        """Load it with each concurrency. Raises PeerFailed."""
        server = self._start()
        try:
            samples: Samples = {}
            for concurrency in CONCURRENCIES:
                samples |= self._load(server.url, concurrency, turn)
            return samples
        finally:
            if self.stays:
                server.freeze()
            else:
                self.close()

    def close(self) -> None:
        """Stop the server, if there is one."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _start(self) -> ServerProcess:
        if self._server is not None:
            self._server.thaw()
            return self._server
        self._server = ServerProcess(self.command, self.environment)
        try:
            self._server.wait_until_ready(self.ready_path, self.timeout_s)
        except BaseException:
            self.close()
            raise
        return self._server

    def _load(self, url: str, concurrency: int, turn: int) -> Samples:
        from whalepod.tools.bench.run import play_once

        is_alone = concurrency == 1
        num_requests = max(2, self.num_requests // _SHARE_ALONE) if is_alone else self.num_requests
        config = BenchServeConfig(
            target=TargetConfig(url=url, timeout_s=self.timeout_s),
            workload=WorkloadConfig(
                num_requests=num_requests,
                input_len=INPUT_TOKENS,
                output_len=OUTPUT_TOKENS,
                max_token_id=_MAX_TOKEN_ID,
                seed=concurrency,
            ),
            load=LoadConfig(concurrency=str(concurrency)),
            report=ReportConfig(),
        )
        try:
            with Client(url, None, timeout_s=10.0) as client:
                model = client.first_model()
            result = play_once(config, model, concurrency, turn)
        except ClientError as error:
            raise PeerFailed(str(error)) from None
        expected = num_requests * OUTPUT_TOKENS
        if result["total_output_tokens"] != expected:
            raise PeerFailed(
                f"{result['total_output_tokens']} of {expected} tokens came back; "
                f"errors: {result['errors']}"
            )
        return {
            rate_row(concurrency): [result["output_throughput"]],
            ttft_row(concurrency): [result["median_ttft_ms"]],
        }


def whalepod_server(model: str, num_threads: int, num_requests: int, timeout_s: float) -> Served:
    """Return this engine's server, as a user starts it."""

    def command(port: int) -> list[str]:
        return whalepod_command(
            "serve", model, "--port", str(port), "--dtype", "bf16",
            "--num-threads", str(num_threads), "--max-model-len", str(_MAX_MODEL_LEN),
        )  # fmt: skip

    return Served(
        name="whalepod", command=command, environment=own_environment(), ready_path="/ready",
        num_requests=num_requests, timeout_s=timeout_s,
    )  # fmt: skip


def llama_server(
    folder: Path, gguf: Path, num_threads: int, num_requests: int, timeout_s: float
) -> Served:
    """Return `llama-server` with a slot for each request, and without its cache of old prompts."""
    slots = max(CONCURRENCIES)

    def command(port: int) -> list[str]:
        return [
            str(folder / "llama-server"), "-m", str(gguf), "--host", "127.0.0.1",
            "--port", str(port), "-t", str(num_threads), "-np", str(slots),
            "-c", str(slots * _SLOT_TOKENS), "--cache-ram", "0",
        ]  # fmt: skip

    return Served(
        name="llama.cpp", command=command, environment=peer_environment(),
        num_requests=num_requests, timeout_s=timeout_s,
    )  # fmt: skip


def vllm_server(
    python: Path, model: str, num_threads: int, num_requests: int, timeout_s: float
) -> Served:
    """Return vLLM's server on the first cores of this process."""

    def command(port: int) -> list[str]:
        return [
            str(python), "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port),
            "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(_MAX_MODEL_LEN),
            "--max-num-seqs", str(max(CONCURRENCIES)),
        ]  # fmt: skip

    return Served(
        name="vLLM", command=command, environment=peer_environment(**_vllm_settings(num_threads)),
        num_requests=num_requests, timeout_s=timeout_s, stays=True,
    )  # fmt: skip


def _vllm_settings(num_threads: int) -> dict[str, str]:
    cores: Sequence[int] = range(num_threads)
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the default is a share of the whole machine
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _answers(client: Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except ClientError:
        return False
