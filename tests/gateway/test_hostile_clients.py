"""Clients that dawdle, do not read, or are pages of other sites: none holds what others need."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import orjson
import pytest
import uvicorn
from fastapi import FastAPI

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import DEADLINE_S, TestClient, wait_until
from tests.gateway.test_real_server import request_bytes
from tests.gateway.wire import chat, error_of, user
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import SequenceOutput, TokenLogprob
from whalepod.server.chat_template import ChatTemplate
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.connection import TimedHttpProtocol
from whalepod.server.output_queue import MAX_QUEUED_BYTES, OutputQueue
from whalepod.server.tokenizer import LARGE_BYTES, TextTokenizer, TokenizerPool


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve `app` with the connections of `whalepod serve` and yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # little is sent unread
    config = uvicorn.Config(
        app, http=TimedHttpProtocol, ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def connect(port: int, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(DEADLINE_S)
    client.connect(("127.0.0.1", port))
    return client


def endless(engine: FakeEngine) -> None:
    """Let answers go on until they are aborted, as fast as they are read."""

    async def submit(request: Any) -> Any:
        engine.running.add(request.request_id)
        output = SequenceOutput(
            sequence_id=0, request_id=request.request_id, index=0, token_ids=(40,) * 1000
        )
        try:
            while True:
                yield output
                await asyncio.sleep(0)
        finally:
            engine.running.discard(request.request_id)

    engine.submit = submit  # type: ignore[method-assign]


def test_B1_a_stream_that_is_not_read_ends_at_the_deadline_of_its_request(
    engine: FakeEngine, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalepod.server.gateway.http_responses.LAST_EVENT_S", 0.1)
    endless(engine)
    app = create_app(
        GatewayConfig(served_model_name=("tiny",), request_timeout_s=2.0), engine, tokenizer
    )
    with serving(app) as port, connect(port, 2048) as client:
        client.sendall(request_bytes(stream=True))
        wait_until(lambda: engine.running)
        wait_until(lambda: not engine.running and not len(app.state.gateway.requests))

        assert b"deadline_exceeded" not in error_or_end(client), "it was not sent in time"


def test_B1_a_client_that_takes_nothing_of_its_answer_is_cut_off(
    engine: FakeEngine, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedHttpProtocol, "unread_timeout_s", 0.2)
    endless(engine)
    app = create_app(GatewayConfig(served_model_name=("tiny",)), engine, tokenizer)
    with serving(app) as port, connect(port, 2048) as client:
        client.sendall(request_bytes(stream=True))
        wait_until(lambda: engine.running)
        wait_until(lambda: not engine.running and not len(app.state.gateway.requests))
        error_or_end(client)


def error_or_end(client: socket.socket) -> bytes:
    """Return what a connection still gives; it must end."""
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def test_B1_unread_outputs_are_bounded_in_bytes() -> None:
    token = TokenLogprob(token_id=1, logprob=-1.0, rank=1, top=((2, -2.0),) * 20)
    output = SequenceOutput(
        sequence_id=0, request_id="r", index=0, token_ids=(1,) * 100, logprobs=(token,) * 100
    )

    async def run() -> None:
        queue = OutputQueue(2)
        num_put = 1
        while queue.put(output):
            num_put += 1
            assert num_put * 100 * 20 * 64 < 2 * MAX_QUEUED_BYTES
        assert queue.has_failed
        with pytest.raises(RequestRejected, match="too slowly"):
            await queue.get()

        queue = OutputQueue(2)  # one that is read goes on for ever
        for _ in range(num_put * 2):
            assert queue.put(output)
            assert await queue.get() is output
        for _ in range(num_put // 2 + 1):
            assert queue.put(output)
        queue.drop(0)
        for _ in range(num_put // 2 + 1):
            assert queue.put(output._replace(index=1))

    asyncio.run(run())


@pytest.mark.parametrize(
    "body", [b"5\r\nhello\r\n", b"1;" + b"x" * 100, b""], ids=["chunk", "extension", "nothing"]
)
@pytest.mark.parametrize("target", [b"GET /health", b"POST /v1/chat/completions", b"POST /nowhere"])
def test_B2_a_body_that_goes_on_after_its_answer_is_cut_off(
    engine: FakeEngine,
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    target: bytes,
    body: bytes,
) -> None:
    monkeypatch.setattr(TimedHttpProtocol, "rest_of_body_s", 0.3)
    app = create_app(GatewayConfig(api_key=("secret",)), engine, tokenizer)
    with serving(app) as port, connect(port) as client:
        head = target + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + body)
        assert client.recv(4096).startswith(b"HTTP/1.1 ")
        client.settimeout(0.02)
        deadline_s = monotonic() + DEADLINE_S
        while True:
            assert monotonic() < deadline_s, "the connection is still open"
            try:
                client.sendall(b"1")  # of the size of a chunk, or of the extension
                if not client.recv(4096):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_B2_a_connection_goes_on_when_the_rest_of_a_body_comes_in_time(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    app = create_app(GatewayConfig(api_key=("secret",)), engine, tokenizer)
    with serving(app) as port, connect(port) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345"
        )
        assert b" 401 " in client.recv(4096)
        client.sendall(b"67890GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in client.recv(4096)


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "93.184.215.14"},
    {"Host": ""},
    {"Host": "[::1"},
    {"Host": "localhost@evil.example"},
    {"Origin": "https://evil.example"},
    {"Origin": "https://93.184.215.14"},
    {"Origin": "null"},
    {"Origin": "https://evil.example", "Content-Type": "text/plain"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_B5_pages_of_other_sites_do_not_use_a_server_without_keys(
    client: TestClient, engine: FakeEngine, headers: dict[str, str]
) -> None:
    body = orjson.dumps({"model": "tiny", "messages": [user("hi")]})
    for response in (
        client.post("/v1/chat/completions", content=body, headers=headers),
        client.post("/abort", content=b'{"request_id": "x"}', headers=headers),
        client.get("/cluster", headers=headers),
        client.get("/", headers=headers),
    ):
        assert error_of(response, 403)["code"] == "foreign_site"
    assert not engine.submitted


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost"},
        {"Host": "LOCALHOST:8000"},
        {"Host": "[::1]:8000"},
        {"Host": "127.0.0.2:80"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://127.0.0.1:8000"},
    ],
    ids=str,
)
def test_B5_this_machine_may_ask(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"api_key": ("k",)}, {"host": "0.0.0.0"}, {"cors_allow_origin": ("*",)}]
)
def test_B5_servers_that_others_may_reach_have_any_name(
    engine: FakeEngine, tokenizer: TextTokenizer, fields: dict[str, Any]
) -> None:
    client = TestClient(create_app(GatewayConfig(**fields), engine, tokenizer))
    headers = {"Authorization": "Bearer k", "Origin": "https://page.example"}
    headers |= {} if "cors_allow_origin" in fields else {"Host": "whale.example"}

    assert client.get("/v1/models", headers=headers).status_code == 200


def test_B6_requests_say_how_urgent_they_are_only_where_that_is_allowed(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    client = TestClient(create_app(GatewayConfig(served_model_name=("tiny",)), engine, tokenizer))
    fields = {"model": "tiny", "priority": -5, "max_tokens": 4}
    for path, prompt in {
        "/v1/chat/completions": {"messages": [user("hi")]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [user("hi")]},
    }.items():
        response = client.post(path, json={**fields, **prompt})
        assert response.status_code == 400
        assert "--allow-priority" in response.text
    assert chat(client, priority=0)["choices"]
    assert [submit.priority for submit in engine.submitted] == [0]


def test_N024_a_top_p_of_0_is_the_likeliest_token(client: TestClient, engine: FakeEngine) -> None:
    for path, prompt in {
        "/v1/chat/completions": {"messages": [user("hi")]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [user("hi")], "max_tokens": 4},
    }.items():
        assert client.post(path, json={"model": "tiny", "top_p": 0, **prompt}).status_code == 200
    assert {submit.params.top_p for submit in engine.submitted} == {0.0}


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/version", "/"])
def test_N033_a_head_is_answered_like_a_get_without_a_body(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)

    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_N033_a_head_of_a_route_that_generates_is_405(client: TestClient) -> None:
    assert client.head("/v1/chat/completions").status_code == 405


LONG = "word " * 200_000
TOOL = {"type": "function", "function": {"name": "w", "description": LONG}}
CALL = {"id": "c", "type": "function", "function": {"name": "w", "arguments": LONG}}
BULKS: dict[str, dict[str, Any]] = {
    "content": {"messages": [user(LONG)]},
    "a description": {"messages": [user("hi")], "tools": [TOOL]},
    "arguments": {
        "messages": [
            user("hi"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
    },
    "many messages": {"messages": [user("word " * 1000)] * 200},
}
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}"
    "{% endfor %}<\uff5cAssistant\uff5c></think>"
)


@pytest.mark.parametrize("bulk", BULKS.values(), ids=BULKS.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_I40_all_text_of_a_request_is_bounded_before_it_is_encoded(
    client: TestClient,
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    bulk: dict[str, Any],
) -> None:
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(TEMPLATE, {}))
    monkeypatch.setattr(tokenizer, "_encode", lambda text: pytest.fail(f"{len(text)} encoded"))

    error = error_of(client.post(path, json={"model": "tiny", **bulk}), 400)

    assert "at least" in error["message"]


def test_I40_large_requests_leave_a_thread_to_small_ones() -> None:
    release = threading.Event()

    async def run() -> None:
        pool = TokenizerPool(num_threads=1, max_pending=100)
        large = [asyncio.create_task(pool.run(release.wait, LARGE_BYTES)) for _ in range(8)]
        await asyncio.sleep(0)  # they come first
        async with asyncio.timeout(DEADLINE_S):
            assert await pool.run(lambda: 7, LARGE_BYTES - 1) == 7
        release.set()
        assert await asyncio.gather(*large) == [True] * 8
        pool.close()

    asyncio.run(run())


def test_I40_routes_tell_the_size_of_their_work(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    pool = client.app.state.gateway.tokenizer_pool  # type: ignore[attr-defined]
    run = pool.run

    async def noting(work: Any, num_bytes: int = 0) -> Any:
        sizes.append(num_bytes)
        return await run(work, num_bytes)

    monkeypatch.setattr(pool, "run", noting)
    hi = {"model": "tiny", "messages": [user("hi")], "max_tokens": 3}
    for path, fields in {
        "/v1/chat/completions": hi,
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": hi,
        "/v1/messages/count_tokens": hi,
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1, 2]},
    }.items():
        assert client.post(path, json={"model": "tiny", **fields}).status_code == 200
        assert sizes.pop() > 10
    first = client.post("/v1/responses", json={"model": "tiny", "input": "x" * 100}).json()
    size = sizes.pop()
    more = {"model": "tiny", "input": "x", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=more).status_code == 200
    assert sizes.pop() > size > 100
