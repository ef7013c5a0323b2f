"""The requests that are being answered: ids, deadlines, aborts, and what a drain waits for."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.events import Event, Failed

Result = TypeVar("Result")

GENERATING_FOLDER = "/v1/"
"""POSTs below it are counted, and refused while the server drains."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class LiveRequest:
    """One request on its way; its events end with an error when it is interrupted or too late."""

    def __init__(self, request_id: str, owner: int | None, path: str, timeout_s: float) -> None:
        """`owner` is the number of the key that it showed; `timeout_s` 0 lets it take for ever."""
        self.request_id, self.owner, self.path = request_id, owner, path
        self.client: Hashable = owner
        """Who shares what is shared by turns: the key, or the address where there are no keys."""
        self.arrived_s = time.monotonic()
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s else None
        self._error: ApiError | None = None
        self._wait: asyncio.Timeout | None = None
        self._grace_s = 0.0

    def interrupt(self, error: ApiError) -> None:
        """End the request with `error`: at once, or as soon as it waits for an event."""
        if self._error is not None:
            return
        self._error = error
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time() + self._grace_s)

    async def guard(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield `events`; when the request is interrupted close them and yield Failed instead."""
        try:
            while (event := await self._next(events)) is not None:
                yield event
        except ApiError as error:
            yield Failed(error=error)
        finally:
            await events.aclose()

    async def _next(self, events: AsyncGenerator[Event, None]) -> Event | None:
        return await self.within_limits(lambda: anext(events, None))

    async def within_limits(
        self, work: Callable[[], Awaitable[Result]], *, grace_s: float = 0.0
    ) -> Result:
        """Return the result of `work`; ApiError when the request is interrupted or too late.

        `grace_s` lets it take that much longer: the end of an answer must reach its client.
        """
        if self._error is not None and not grace_s:
            raise self._error
        self._grace_s, end_s = grace_s, self._deadline_s
        if grace_s and end_s is not None:
            end_s = max(end_s, asyncio.get_running_loop().time()) + grace_s
        if self._error is not None:
            end_s = asyncio.get_running_loop().time() + grace_s
        try:
            async with asyncio.timeout_at(end_s) as self._wait:
                return await work()
        except TimeoutError:
            if self._wait is None or not self._wait.expired():
                raise  # the work's own
            raise self._error or self._too_late() from None
        finally:
            self._wait = None

    def _too_late(self) -> ApiError:
        message = f"the answer was not finished within {self._timeout_s:g} s (--request-timeout)"
        return ApiError("deadline_exceeded", message)


class LiveRequests:
    """All requests that generate, and whether new ones are taken."""

    def __init__(self, timeout_s: float) -> None:
        self.is_draining = False
        self._timeout_s = timeout_s
        self._live: set[LiveRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(sorted(self._live, key=lambda live: live.arrived_s))

    @contextmanager
    def track(self, request_id: str, owner: int | None, path: str) -> Iterator[LiveRequest]:
        """Count a request for the time of a `with` block."""
        live = LiveRequest(request_id, owner, path, self._timeout_s)
        self._live.add(live)
        self._idle.clear()
        try:
            yield live
        finally:
            self._live.discard(live)
            if not self._live:
                self._idle.set()

    def abort(self, request_id: str, *, owner: int | None = None, any_owner: bool = False) -> int:
        """End the requests of an id that `owner` sent, or anybody; return how many."""
        found = [
            live
            for live in self._live
            if live.request_id == request_id and (any_owner or live.owner == owner)
        ]
        for live in found:
            live.interrupt(ApiError("aborted", f"the request {request_id} was aborted"))
        return len(found)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the others; return how many had to be interrupted."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass  # the requests that are left are told so
        left = list(self._live)
        for live in left:
            live.interrupt(ApiError("draining", "the server stopped before the answer was whole"))
        return len(left)


class LiveRequestMiddleware:
    """Keeps count of requests that generate, and refuses them while the server drains."""

    def __init__(self, app: ASGIApp, requests: LiveRequests, count: Callable[[str], None]) -> None:
        self._app, self._requests, self._count = app, requests, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].startswith(GENERATING_FOLDER)
        )
        if not is_counted:
            await self._app(scope, receive, send)
            return
        if self._requests.is_draining:
            self._count("draining")
            error = ApiError("draining", "the server is stopping and takes no new requests")
            await error.response(scope)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        request_id, owner = state.get("request_id", ""), state.get("key_number")
        with self._requests.track(request_id, owner, scope["path"]) as live:
            if owner is None and scope.get("client"):
                live.client = scope["client"][0]
            state["live"] = live
            await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Echo a client's X-Request-Id, or make one. It names a request in logs, never inside.

    A HEAD is answered as the GET that it asks about: the server sends no body for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"

        scope.setdefault("state", {})["request_id"] = request_id
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # Anthropic's name
            await send(message)

        await self._app(scope, receive, send_with_id)
