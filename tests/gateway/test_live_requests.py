"""Requests that are ended: by their owner, by the server's operator, by a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import uvicorn

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import DEADLINE_S, TestClient, serving, wait_until
from tests.gateway.test_real_server import connect, free_port, request_bytes
from tests.gateway.wire import chat, error_of, user
from whalepod.scheduler.params import Constraint
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.admin import create_admin_app
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.connection import TimedHttpProtocol
from whalepod.server.gateway.limits import MAX_HEAD_BYTES
from whalepod.server.gateway.run import serve
from whalepod.server.messages import Experts
from whalepod.server.tokenizer import TextTokenizer

Ask = Callable[..., httpx2.Response]


@pytest.fixture
def app(engine: FakeEngine, tokenizer: TextTokenizer) -> Any:
    engine.gate = asyncio.Event()  # nothing is answered before it is set
    config = GatewayConfig(served_model_name=("tiny",), api_key=("one", "two"))
    return create_app(config, engine, tokenizer)


@pytest.fixture
def port(app: Any) -> Iterator[int]:
    with serving(app) as port:
        yield port


def post(port: int, path: str, key: str = "one", **fields: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": fields.pop("id", "x")}
    return httpx2.post(
        f"http://127.0.0.1:{port}{path}", json=fields, headers=headers, timeout=DEADLINE_S
    )


@contextmanager
def asking(port: int, engine: FakeEngine, **fields: Any) -> Iterator[list[httpx2.Response]]:
    """Ask in a thread and yield once the engine has the request; the answer is there at the end."""
    answers: list[httpx2.Response] = []
    body = {"model": "tiny", "messages": [user("hi")], **fields}

    def ask() -> None:
        answers.append(post(port, "/v1/chat/completions", **body))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: engine.running)
    yield answers
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_abort_ends_a_request_by_its_id(port: int, engine: FakeEngine) -> None:
    with asking(port, engine, id="mine") as answers:
        done = post(port, "/abort", request_id="mine").json()

    assert done == {"request_id": "mine", "num_aborted": 1}
    assert error_of(answers[0], 499)["code"] == "aborted"
    assert not engine.running
    assert len(engine.aborted) == 1


def test_abort_ends_a_stream_with_an_error_event(port: int, engine: FakeEngine) -> None:
    engine.gate, engine.step_delay_s = None, 0.01
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": "Bearer one", "x-request-id": "mine"}
    body = {"model": "tiny", "messages": [user("hi")], "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        post(port, "/abort", request_id="mine")
        last = [line for line in lines if line][-1]

    assert '"code":"aborted"' in last
    text = httpx2.get(f"{url}/metrics", headers=headers).text
    assert 'whalepod_request_errors_total{code="aborted"} 1.0' in text
    assert 'whalepod_request_success_total{finished_reason="abort"} 1.0' in text


def test_abort_leaves_the_requests_of_other_keys_alone(port: int, engine: FakeEngine) -> None:
    with asking(port, engine, id="mine"):
        refused = post(port, "/abort", key="two", request_id="mine")
        assert engine.running
        post(port, "/abort", request_id="mine")

    assert error_of(refused, 404)["param"] == "request_id"


def test_a_request_that_takes_too_long_ends(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    engine.gate = asyncio.Event()
    # time enough to reach the engine on a busy machine
    config = GatewayConfig(served_model_name=("tiny",), request_timeout_s=1.0)
    with TestClient(create_app(config, engine, tokenizer)) as client:
        response = client.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"]})

        assert "1 s" in error_of(response, 504)["message"]
        assert response.headers["x-should-retry"] == "false"
        assert len(engine.aborted) == 2
        engine.gate = None
        assert chat(client)["choices"][0]["finish_reason"] == "stop"


class BusyChecker:
    """Judges no grammar: others are before it."""

    def __init__(self) -> None:
        self.num_waiting = 0

    async def check(self, constraint: Constraint, client: object) -> None:
        self.num_waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_waiting -= 1

    async def close(self) -> None: ...


PATHS = {
    "/v1/chat/completions": {"messages": [user("hi")], "response_format": {"type": "json_object"}},
    "/v1/completions": {"prompt": "hi", "structured_outputs": {"regex": "a"}},
    "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_object"}}},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_time_limit_counts_the_wait_for_the_grammar_checker(
    path: str, engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    config = GatewayConfig(served_model_name=("tiny",), request_timeout_s=0.05)
    app = create_app(config, engine, tokenizer)
    app.state.gateway.grammars._checker = busy = BusyChecker()
    with TestClient(app) as client:
        response = client.post(path, json={"model": "tiny", **PATHS[path]})

    assert "0.05 s" in error_of(response, 504)["message"]
    assert busy.num_waiting == 0
    assert engine.submitted == []


def test_a_request_that_waits_for_the_grammar_checker_can_leave_or_be_ended(
    app: Any, port: int, engine: FakeEngine
) -> None:
    app.state.gateway.grammars._checker = busy = BusyChecker()
    body: dict[str, Any] = {"model": "tiny", **PATHS["/v1/completions"]}
    answers: list[httpx2.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(post(port, "/v1/completions", id="mine", **body))
    )
    thread.start()
    wait_until(lambda: busy.num_waiting == 1)
    assert post(port, "/abort", request_id="mine").json()["num_aborted"] == 1
    thread.join(DEADLINE_S)
    assert error_of(answers[0], 499)["code"] == "aborted"
    assert busy.num_waiting == 0

    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(head.encode() + b"Authorization: Bearer one\r\n\r\n" + data)
        wait_until(lambda: busy.num_waiting == 1)
    wait_until(lambda: busy.num_waiting == 0)
    wait_until(lambda: not len(app.state.gateway.requests))
    assert engine.submitted == []


@pytest.fixture
def admin(app: Any) -> Iterator[TestClient]:
    with TestClient(create_admin_app(app.state.gateway, ["root"])) as client:
        client.headers["authorization"] = "Bearer root"
        yield client


def test_admin_routes_want_their_own_key_and_are_not_on_the_public_port(
    admin: TestClient, port: int
) -> None:
    for key in ("one", ""):
        headers = {"authorization": f"Bearer {key}"}
        assert admin.get("/requests", headers=headers).status_code == 401
    assert admin.get("/health", headers={"authorization": ""}).status_code == 200
    assert admin.get("/openapi.json").status_code == 404
    for path in ("/drain", "/resume", "/reset_prefix_cache", "/log_level"):
        assert post(port, path).status_code == 404


def test_admin_lists_and_ends_anybodys_requests(
    admin: TestClient, port: int, engine: FakeEngine
) -> None:
    with asking(port, engine, id="theirs") as answers:
        (row,) = admin.get("/requests").json()["requests"]
        wrong = admin.post("/abort", json={"request_id": "other"})
        admin.post("/abort", json={"request_id": "theirs"})

    assert (row["request_id"], row["path"]) == ("theirs", "/v1/chat/completions")
    assert wrong.status_code == 404
    assert error_of(answers[0], 499)["code"] == "aborted"


def test_admin_drains_and_resumes(admin: TestClient, port: int, engine: FakeEngine) -> None:
    ready = f"http://127.0.0.1:{port}/ready"
    assert admin.post("/drain").json() == {"is_draining": True, "num_live": 0}

    refused = post(port, "/v1/completions", model="tiny", prompt="a")
    assert error_of(refused, 503)["code"] == "draining"
    assert refused.headers["retry-after"]
    assert httpx2.get(ready).status_code == 503
    assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
    admin.post("/resume")
    assert httpx2.get(ready).status_code == 200


def test_admin_sees_where_experts_are_and_moves_them(admin: TestClient, engine: FakeEngine) -> None:
    error_of(admin.get("/experts"), 404)
    engine.experts = Experts(
        num_ranks=2, slots=((0, 1, 2, 0),), tokens=((5, 2, 1),), plans=((50, 0.5, 0.75, 3),)
    )
    found = admin.get("/experts").json()
    assert found["slots"] == [[0, 1, 2, 0]]
    assert found["plans"] == [[50, 0.5, 0.75, 3]]
    assert admin.post("/experts", json={"slots": [[0, 1, 2, 2]]}).json() == {"num_layers": 1}
    assert engine.placed == ((0, 1, 2, 2),)
    assert admin.post("/experts", json={}).json() == {"num_layers": 0}
    assert engine.placed == ()
    message = error_of(admin.post("/experts", json={"slots": [[0, 1]]}), 400)["message"]
    assert "slots must be 1 layers of 4, got 1 layers of [2]" in message


def test_admin_resets_the_prefix_cache_and_sets_the_log_level(
    admin: TestClient, engine: FakeEngine
) -> None:
    level = logging.getLogger("whalepod").level
    engine.stats = engine.stats.__class__(num_blocks=9, num_cached_blocks=4)

    assert admin.post("/reset_prefix_cache").json() == {"num_cached_blocks": 0}
    assert admin.post("/log_level", json={"level": "debug"}).json() == {"level": "debug"}
    assert logging.getLogger("whalepod").level == logging.DEBUG
    error_of(admin.post("/log_level", json={"level": "loud"}), 400)
    logging.getLogger("whalepod").setLevel(level)


def answer_to(sent: bytes) -> tuple[bytes, float]:
    """Return what a connection answers before it is closed, and after how many seconds it is."""

    async def run() -> tuple[bytes, float]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("no request ever came")

        config = uvicorn.Config(app, http=TimedHttpProtocol, ws="none", lifespan="off")
        server = uvicorn.Server(config)
        config.load()
        loop = asyncio.get_running_loop()

        def protocol() -> Any:
            return TimedHttpProtocol(config, server.server_state, {})

        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        started_s = loop.time()
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        ended_after_s = loop.time() - started_s
        writer.close()
        listening.close()
        return answer, ended_after_s

    return asyncio.run(run())


@pytest.mark.parametrize("num_bytes", [0, 20])
def test_a_client_that_never_finishes_its_headers_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(TimedHttpProtocol, "head_timeout_s", 0.05)

    answer, ended_after_s = answer_to(b"GET / HTTP/1.1\r\nHost: x"[:num_bytes])

    assert answer == b""
    assert ended_after_s >= 0.05


def test_A1_one_connection_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedHttpProtocol, "max_connections", 0)
    monkeypatch.setattr(TimedHttpProtocol, "head_timeout_s", 3600.0)
    assert answer_to(b"")[0] == b""


def test_A1_descriptors_are_raised_to_the_hard_limit_and_some_are_kept() -> None:
    program = (
        "import resource as r; from whalepod.server.gateway.connection import max_connections\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 1024)); print(max_connections())\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=environment,
        timeout=DEADLINE_S,
        check=True,
    )
    assert printed.stdout.split() == [b"768", b"1024"]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "Invalid HTTP"),
        (b"BREW /v1/models HTTP/1.1\r\n\r\n", "Invalid HTTP"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "Invalid HTTP"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1), "the headers have more than"),
    ],
)
def test_what_is_no_request_is_refused_in_the_shape_of_the_api(sent: bytes, said: str) -> None:
    head, body = answer_to(sent)[0].split(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_drain_that_takes_too_long_tells_the_clients(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    """New requests are refused while the old one may end, and then it is cut off with an error."""
    port, admin_port = free_port(), free_port()
    config = GatewayConfig(
        port=port,
        admin_port=admin_port,
        admin_key=("root",),
        served_model_name=("tiny",),
        drain_timeout_s=0.5,
    )

    async def run() -> tuple[bytes, bytes]:
        engine.gate = asyncio.Event()
        server = asyncio.create_task(serve(config, engine, tokenizer))
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await connect(port)
            late_reader, late_writer = await connect(port)
            admin_reader, admin_writer = await connect(admin_port)
            writer.write(request_bytes())
            while not engine.running:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            admin_writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in await admin_reader.readline()
            late_writer.write(request_bytes())
            late, answer = await late_reader.read(), await reader.read()
            for each in (writer, late_writer, admin_writer):
                each.close()
            await server
        return late, answer

    late, answer = asyncio.run(run())

    assert b" 503 " in late.split(b"\r\n")[0]
    assert b"takes no new requests" in late
    assert b" 503 " in answer.split(b"\r\n")[0]
    assert b"before the answer was whole" in answer
    assert len(engine.aborted) == 1


def test_a_second_signal_does_not_wait(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    port = free_port()
    config = GatewayConfig(port=port, served_model_name=("tiny",), drain_timeout_s=10_000)

    async def run() -> None:
        engine.gate = asyncio.Event()
        server = asyncio.create_task(serve(config, engine, tokenizer))
        async with asyncio.timeout(DEADLINE_S):
            _, writer = await connect(port)
            writer.write(request_bytes())
            while not engine.running:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await server
            writer.close()

    asyncio.run(run())


def test_an_admin_port_in_use_stops_the_start(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(port=free_port(), admin_port=port, admin_key=("k",))
        with pytest.raises(Exception, match=f"port {port} of 127.0.0.1 is in use"):
            asyncio.run(serve(config, engine, tokenizer))
