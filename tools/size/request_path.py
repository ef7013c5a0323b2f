"""Computes the request path: the modules that work for a chat request on the CPU backend.

A real `whalepod serve tiny` answers one chat completion whole and one as a stream. Its processes
tell in which modules any function ran meanwhile (`hook/sitecustomize.py`), and all loaded modules
of `kernels/` are added, since compiled code shows no calls.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.05
SETTLE_S = 0.5
"""What an answer leaves to do, and what runs every fraction of a second, is heard as well."""
_SERVE = "import sys; from whalepod.tools.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPath:
    """Files of the package, relative to its root."""

    ran: frozenset[Path]
    loaded: frozenset[Path]
    """All that the processes have imported, what runs only at the start included."""


def trace_request(root: Path, files: Collection[Path]) -> RequestPath:
    """Serve `tiny`, ask twice, and return which of `files` ran. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name, _server(Path(name)) as url:
        folder = Path(name)
        processes = [int(file.name) for file in folder.iterdir() if file.name.isdigit()]
        for is_recording in (True, False):
            for process in processes:
                os.kill(process, signal.SIGUSR1)
            if is_recording:
                time.sleep(POLL_S)
                _ask(url, stream=False)
                _ask(url, stream=True)
                time.sleep(SETTLE_S)
        records = [folder / f"{process}.json" for process in processes]
        _wait(lambda: all(file.exists() for file in records), ANSWER_TIMEOUT_S, "the records")
        told = [json.loads(file.read_text(encoding="utf-8")) for file in records]
    ran, loaded = (
        # the package may be imported over a link
        {Path(file).resolve() for record in told for file in record[key]}
        for key in ("ran", "loaded")
    )
    return RequestPath(
        ran=frozenset(f for f in files if root / f in (loaded if f.parts[0] == "kernels" else ran)),
        loaded=frozenset(f for f in files if root / f in loaded),
    )


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Serve `tiny` with the hook in all its processes; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hook = Path(__file__).with_name("hook")
    paths = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVE, "serve", "tiny", "--port", str(port)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "WHALEPOD_SIZE_HOOK": str(folder),
            },
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _is_ready(url), START_TIMEOUT_S, "the server", server)
        yield url
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{(folder / 'log').read_text()}") from error
    finally:
        server.terminate()
        server.wait(ANSWER_TIMEOUT_S)


def _wait(
    is_there: Callable[[], bool],
    timeout_s: float,
    what: str,
    server: subprocess.Popen[bytes] | None = None,
) -> None:
    end = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > end or (server is not None and server.poll() is not None):
            raise RuntimeError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(POLL_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=ANSWER_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _ask(url: str, *, stream: bool) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "stream": stream,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        answer.read()
