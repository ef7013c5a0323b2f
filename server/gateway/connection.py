"""HTTP connections that cannot be held open by a client which says next to nothing."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whalepod.server.gateway.limits import HEAD_TIMEOUT_S


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose next request's head does not come in time.

    uvicorn has deadlines for idle connections only; the body's is in `body.py`.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self.transport.close()
