"""HTTP connections: bounds of a request's head, and how what is no HTTP is refused."""

from __future__ import annotations

import asyncio

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose next request's head does not come in time, or is too large.

    uvicorn has deadlines for idle connections only; the body's bounds are in `body.py`.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:  # the head goes on
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps(invalid(None, msg).body())
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self.transport.close()
