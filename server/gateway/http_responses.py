"""Answers a request: its events as a stream, or folded into one object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from whalepod.server.gateway.api_errors import CLIENT_CLOSED_REQUEST, ApiError
from whalepod.server.gateway.connection import ABORT_CONNECTION
from whalepod.server.gateway.encoder import AnswerEncoder
from whalepod.server.gateway.events import Event, Failed, fold
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun, generate
from whalepod.server.gateway.limits import LAST_EVENT_S, START_WAIT_S
from whalepod.server.gateway.live_requests import LiveRequest
from whalepod.server.gateway.timers import RequestTimer

Result = TypeVar("Result")


async def answer(
    request: Request,
    make_runs: Callable[[], list[PromptRun]],
    new_encoder: Callable[[list[PromptRun]], AnswerEncoder],
    *,
    stream: bool | None,
    num_stored_bytes: int = 0,
) -> Response:
    """Answer a request with the events of its runs, in the form of its API.

    The runs are made on a thread, and go to the engine once their grammars are known to compile.
    `num_stored_bytes` is the size of what they are made of beside the body.
    A client that leaves closes the events, which aborts in the engine. Raises ApiError when the
    request is too late, interrupted, or its client has left.
    """
    gateway, live = gateway_of(request), request.state.live
    assert isinstance(live, LiveRequest), type(live)
    timer = RequestTimer(gateway.metrics, arrived_s=live.arrived_s)

    async def checked() -> list[PromptRun]:
        num_bytes = request.state.num_body_bytes + num_stored_bytes
        runs = await gateway.tokenizer_pool.run(make_runs, num_bytes)
        if any(run.submit.params.constraint for run in runs):
            await gateway.grammars.check(runs, live.client)
        return runs

    runs = await _unless_client_leaves(request.receive, live.within_limits(checked))
    if runs is None:
        raise ApiError("client_left", "the client left before its answer began")
    encoder = new_encoder(runs)
    events = live.guard(generate(gateway.engine, runs, gateway.tokenizer, timer))
    if stream:
        first = await _first_of(events)
        return EventStreamResponse(
            live,
            first,
            events,
            encoder,
            ping_interval_s=gateway.config.sse_keep_alive_interval_s,
            count_error=gateway.metrics.count_error,
        )
    async with aclosing(events):
        folded = await _unless_client_leaves(request.receive, fold(events))
    if folded is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(orjson.dumps(encoder.body(folded)), media_type="application/json")


async def _first_of(events: AsyncGenerator[Event, None]) -> asyncio.Task[Event]:
    """Wait a moment for a refusal: it is still a plain JSON error, not a broken stream."""
    first = asyncio.create_task(anext(events))
    try:
        await asyncio.wait({first}, timeout=START_WAIT_S)
    except asyncio.CancelledError:
        await _cancel(first)
        await events.aclose()
        raise
    if first.done() and isinstance(event := first.result(), Failed):
        await events.aclose()
        raise event.error
    return first


class EventStreamResponse(Response):
    """A server-sent event stream that pings while it is silent and ends when the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        live: LiveRequest,
        first: asyncio.Task[Event],
        events: AsyncGenerator[Event, None],
        encoder: AnswerEncoder,
        *,
        ping_interval_s: float,
        count_error: Callable[[str], None],
    ) -> None:
        """`count_error` gets the code of a failure in the middle of the stream."""
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._live, self._encoder = live, encoder
        self._first, self._events = first, events
        self._ping_interval_s = ping_interval_s
        self._count_error = count_error
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.create_task(self._ping(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _unless_client_leaves(receive, self._write(send, pings))
        except ApiError as error:  # the client does not take its end either
            self._count_error(error.code)
            await _drop_connection(scope, receive)
        finally:
            await _cancel(pings)
            await _cancel(self._first)
            await self._events.aclose()

    async def _write(self, send: Send, pings: asyncio.Task[None]) -> None:
        await self._write_event(send, await self._first)
        async for event in self._events:
            await self._write_event(send, event)
        await _cancel(pings)  # nothing may follow the end of the body
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_event(self, send: Send, event: Event) -> None:
        if isinstance(event, Failed):
            self._count_error(event.error.code)
        frames = self._encoder.frames(event)
        await self._live.within_limits(lambda: self._send(send, frames), grace_s=LAST_EVENT_S)

    async def _send(self, send: Send, data: bytes) -> None:
        if data:
            self._last_sent_s = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent_s = loop.time()
        while True:
            silent_s = loop.time() - self._last_sent_s
            if silent_s >= self._ping_interval_s:
                await self._send(send, self._encoder.ping)
            else:
                await asyncio.sleep(self._ping_interval_s - silent_s)


async def _unless_client_leaves(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, Result]
) -> Result | None:
    """Return the result of `work`, or cancel it and return None when the client hangs up."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_hangup(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(gone)
        await _cancel(task)


async def _drop_connection(scope: Scope, receive: Receive) -> None:
    """End a connection with all that is not sent."""
    abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT_CONNECTION)
    if abort is not None:
        abort()
        await _wait_for_hangup(receive)


async def _wait_for_hangup(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until its cleanup is over; its own failure was already seen."""
    if task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
