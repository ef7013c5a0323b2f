"""Sockets instead of test clients: hang-ups, pings, OpenAI's own SDK, start and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import openai
import orjson
import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import DEADLINE_S, serving, wait_until
from tests.gateway.wire import user
from tests.scripts import say, scripted
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.run import serve
from whalepod.server.tokenizer import TextTokenizer


@pytest.fixture
def port(engine: FakeEngine, tokenizer: TextTokenizer) -> Iterator[int]:
    config = GatewayConfig(served_model_name=("tiny",))
    with serving(create_app(config, engine, tokenizer)) as port:
        yield port


@pytest.fixture
def sdk(port: int) -> Iterator[openai.OpenAI]:
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="x", max_retries=0, timeout=DEADLINE_S) as sdk:
        yield sdk


def request_bytes(path: str = "/v1/chat/completions", **fields: object) -> bytes:
    body = orjson.dumps(
        scripted({"model": "tiny", "messages": [user("hi")], "prompt": "hi", **fields})
    )
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "count"),
    [
        ("/v1/chat/completions", "", 1),
        ("/v1/completions", "a", 1),
        ("/v1/completions", ["a"] * 3, 3),
    ],
)
def test_b091_a_client_that_leaves_while_it_waits_aborts(
    engine: FakeEngine, port: int, stream: bool, path: str, prompt: object, count: int
) -> None:
    engine.gate = asyncio.Event()  # never set: the request is queued for ever
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(request_bytes(path, stream=stream, prompt=prompt))
        wait_until(lambda: len(engine.running) == count)

    wait_until(lambda: len(engine.aborted) == count)
    assert not engine.running


def test_b091_a_client_that_leaves_in_the_middle_of_a_stream_aborts(
    engine: FakeEngine, port: int
) -> None:
    engine.step_delay_s = 0.01
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(request_bytes(stream=True, ignore_eos=True))
        received = b""
        while received.count(b"data: ") < 3:
            received += client.recv(4096)
        assert engine.running

    wait_until(lambda: engine.aborted)
    assert not engine.running


def test_b101_headers_come_before_the_first_token(engine: FakeEngine, port: int) -> None:
    engine.gate = asyncio.Event()
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(request_bytes(stream=True))
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")

    wait_until(lambda: engine.aborted)


def test_a_client_that_sends_half_a_request_and_leaves_is_forgotten(
    engine: FakeEngine, port: int, sdk: openai.OpenAI
) -> None:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(request_bytes()[:-10])

    assert sdk.models.list().data
    assert engine.submitted == []


def test_an_endless_body_is_cut_off(engine: FakeEngine, port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = b""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(head)
        try:
            for _ in range(10_000):
                client.sendall(chunk)
        except OSError:
            pass  # the server closed the connection: what this test is about
        else:
            pytest.fail("the server read 640 MB")
        try:
            answer = client.recv(4096)
        except ConnectionResetError:
            return  # the reset overtook the answer
    assert b" 413 " in answer.split(b"\r\n")[0]


def test_openai_sdk_chats_streamed_and_whole(sdk: openai.OpenAI) -> None:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    whole = sdk.chat.completions.create(**fields)  # type: ignore[call-overload]
    options = {"include_usage": True}
    chunks = list(
        sdk.chat.completions.create(**fields, stream=True, stream_options=options)  # type: ignore[call-overload]
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_openai_sdk_completes(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="tiny", prompt=[1, 2, 3], logprobs=1, max_tokens=4)
    chunks = list(sdk.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=4, stream=True))

    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 4


def test_openai_sdk_maps_our_errors(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    create = sdk.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=messages)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=messages, temperature=-1)  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
    failing = [{"role": "user", "content": say(["a", "!raise"])}]
    chunks = create(model="tiny", messages=failing, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match="the step failed"):
        list(chunks)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_port_in_use_is_one_sentence(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} of 127.0.0.1 is in use"):
            asyncio.run(serve(GatewayConfig(port=port), engine, tokenizer))


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as soon as the server listens; the caller has the deadline."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


def test_sigterm_drains_and_returns(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    """The request that runs gets its whole answer; then `serve` returns to its caller."""
    port = free_port()

    async def run() -> bytes:
        engine.gate = asyncio.Event()
        config = GatewayConfig(port=port, served_model_name=("tiny",))
        server = asyncio.create_task(serve(config, engine, tokenizer))
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await connect(port)
            writer.write(request_bytes(test_steps=["one", "two"]))
            while not engine.running:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            ended, _ = await asyncio.wait({server}, timeout=0.4)
            assert not ended, "the server did not wait for its request"
            engine.gate.set()
            answer = await reader.read()
            writer.close()
            await server
        return answer

    answer = asyncio.run(run())

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"onetwo"' in answer
