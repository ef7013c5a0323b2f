"""Fixtures of the command line's tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from tests.tools.fake_openai_server import FakeServer


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    app = FakeServer()
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline and thread.is_alive():
        time.sleep(0.005)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    app.url = f"http://127.0.0.1:{port}"
    yield app
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()
