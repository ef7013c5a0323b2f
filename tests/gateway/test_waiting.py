"""What happens while nothing happens: pings, slow clients, full queues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.types import Message

from whalepod.scheduler.limits import RequestRejected
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.body import read_body
from whalepod.server.gateway.chat_encoder import ChatEncoder
from whalepod.server.gateway.encoder import EncoderOptions
from whalepod.server.gateway.events import Event, UsageReady
from whalepod.server.gateway.http_responses import EventStreamResponse
from whalepod.server.gateway.live_requests import LiveRequest
from whalepod.server.tokenizer import TextTokenizer, TokenizerPool

DEADLINE_S = 10.0


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def test_b101_a_silent_stream_pings_and_nothing_follows_its_end(tokenizer: TextTokenizer) -> None:
    encoder = ChatEncoder({"id": "x"}, EncoderOptions(), tokenizer)
    sent: list[Message] = []

    async def run() -> None:
        pinged = asyncio.Event()

        async def send(message: Message) -> None:
            sent.append(message)
            if message.get("more_body") is False:
                await asyncio.sleep(0.02)  # a slow client: time enough for twenty pings
            if [m.get("body") for m in sent].count(b": ping\n\n") == 3:
                pinged.set()

        async def events() -> AsyncGenerator[Event, None]:
            await pinged.wait()
            yield UsageReady(prompt_tokens=1, completion_tokens=1, cached_tokens=0)

        stream = events()
        first = asyncio.create_task(anext(stream))
        response = EventStreamResponse(
            LiveRequest("", None, "", 0.0),
            first,
            stream,
            encoder,
            ping_interval_s=0.001,
            count_error=print,
        )
        async with asyncio.timeout(DEADLINE_S):
            await response({"type": "http"}, never, send)

    asyncio.run(run())

    assert [message.get("body") for message in sent[-2:]] == [b"data: [DONE]\n\n", b""]
    assert sent[-1]["more_body"] is False


def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    scope = {"type": "http", "method": "POST", "headers": []}

    with pytest.raises(ApiError, match="did not arrive") as caught:
        asyncio.run(read_body(Request(scope, never), 100, timeout_s=0.01))
    assert caught.value.status == 408


def test_a_declared_length_of_any_number_of_digits_is_read() -> None:
    """Python refuses to read numbers of more than 4,300 digits."""
    headers = [(b"content-length", b"0" * 5000 + b"2")]
    scope = {"type": "http", "method": "POST", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    assert asyncio.run(read_body(Request(scope, receive), 100)) == b"{}"


def test_too_many_waiting_prompts_are_refused_and_places_come_back() -> None:
    release = threading.Event()

    async def run() -> None:
        pool = TokenizerPool(num_threads=1, max_pending=2)
        waiting = [asyncio.create_task(pool.run(release.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected) as caught:
            await pool.run(release.wait)
        assert caught.value.code == "queue_full"
        release.set()
        await asyncio.gather(*waiting)
        assert await pool.run(lambda: 7) == 7
        pool.close()

    asyncio.run(run())
