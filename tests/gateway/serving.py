"""A real server on a free loopback port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette import testclient

DEADLINE_S = 30.0


class TestClient(testclient.TestClient):
    """Starlette's, under a name that a server without keys answers to."""

    __test__ = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"base_url": "http://127.0.0.1", **options})


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve `app` and yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,  # then what still runs is cancelled
    )
    server = uvicorn.Server(config)

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


def wait_until(holds: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    """Return as soon as `holds()` is true; fail after a deadline."""
    deadline_s = monotonic() + within_s
    while not holds():
        assert monotonic() < deadline_s, "the condition did not come true in time"
        sleep(0.005)
