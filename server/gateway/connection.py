"""HTTP connections: deadlines of what is read and written, and how what is no HTTP is refused."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.limits import (
    HEAD_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MIN_READ_BYTES,
    REST_OF_BODY_S,
    UNREAD_TIMEOUT_S,
)

ABORT_CONNECTION = "whalepod.abort_connection"
"""The state of a request has under this name what drops its connection and all unsent bytes."""


class _Timer:
    """One deadline, set anew or lifted."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float) -> None:
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


SPARE_DESCRIPTORS = 256
"""Kept for all that is no connection of a client: files, engines, pipes, libraries."""


def max_connections() -> int:
    """Raise the limit of open files to the hard one; return how many may be connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # no limit at all, or the system has a lower one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(soft - SPARE_DESCRIPTORS, soft // 2), MAX_CONNECTIONS)


class TimedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose client dawdles: in a head, in a body that is answered already, or
    in taking what is sent to it; and one whose head is too large.

    uvicorn has deadlines for idle connections only; bodies that are wanted have their bounds in
    `body.py`.

    max_connections  one more is closed at once, so that descriptors are left for all else
    """

    max_connections = MAX_CONNECTIONS

    head_timeout_s = HEAD_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S
    rest_of_body_s = REST_OF_BODY_S
    _num_head_bytes = 0
    _num_unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = _Timer(self._close)
        self._rest = _Timer(self._close)
        self._unread = _Timer(self._check_reader)
        self._timers = (self._head, self._rest, self._unread)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head.is_set:  # the head goes on
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps(invalid(None, msg).body())
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._close()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()
        self.scope["state"][ABORT_CONNECTION] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._head.stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._rest.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reader()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._rest.start(self.rest_of_body_s)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._unread.stop()

    def _expect_head(self) -> None:
        self._num_head_bytes = 0
        self._head.start(self.head_timeout_s)

    def _close(self) -> None:
        """Close the connection once what was written is sent; its deadline holds."""
        self.transport.close()
        self._expect_reader()

    def _expect_reader(self) -> None:
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        self._unread.start(self.unread_timeout_s)

    def _check_reader(self) -> None:
        num_left = self.transport.get_write_buffer_size()
        if num_left > self._num_unread_bytes - MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._expect_reader()
