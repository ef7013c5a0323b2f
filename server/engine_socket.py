"""The launcher's end of the wire to an engine: from the first message to the gateway's channel."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from whalepod.server.channel import EngineChannel, new_socket
from whalepod.server.codec import decode
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineFailed, EngineInfo, MessageError

POLL_MS = 100


class EngineSocket:
    """Bound before the engine starts; it says what it can do, or why it cannot, and then serves.

    name  the engine's, in messages for people
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context)
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_cut = False
        self._info: EngineInfo | None = None

    def bind(self, address: str) -> str:
        """Listen; returns the address with the port that was found if it names none.

        Raises StartupError.
        """
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise StartupError(f"{self._name} cannot be reached at {address}: {error}") from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, str), endpoint
        return endpoint

    def watch_connection(self) -> None:
        """Notice from now on when the connection ends (`is_cut`)."""
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    @property
    def is_cut(self) -> bool:
        """Return whether the connection has ended since it is watched."""
        if self._monitor is not None and not self._is_cut and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._is_cut = True
        return self._is_cut

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        assert self._info is not None, "the engine was not started"
        return self._info

    def wait_for_info(
        self,
        timeout_s: float,
        why_ended: Callable[[], str | None],
        why_stop: Callable[[], str | None] = lambda: None,
    ) -> EngineInfo:
        """Return what the engine says when it can serve. Raises StartupError.

        why_ended  says how the engine has ended; None while it lives
        why_stop   says why it is of no use to wait any longer; None: it is
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            reason = why_ended()
            if (info := self.take_info(POLL_MS)) is not None:  # even after the end: why it ended
                return info
            if reason is not None:
                raise StartupError(f"{reason} before it was ready")
            if (reason := why_stop()) is not None:
                raise StartupError(reason)
        raise StartupError(f"{self._name} was not ready after {timeout_s:.0f} s")

    def take_info(self, timeout_ms: int) -> EngineInfo | None:
        """Return what the engine says when it can serve; None: not yet. Raises StartupError."""
        if not self._socket.poll(timeout_ms):
            return None
        self._info = self._first_message()
        return self._info

    def channel(self, exit_reason: Callable[[], str | None]) -> EngineChannel:
        """Return the gateway's end, to be entered once."""
        return EngineChannel(self._socket, self.info, exit_reason)

    def close(self) -> None:
        if self._monitor is not None:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _first_message(self) -> EngineInfo:
        try:
            message = decode(self._socket.recv())
        except MessageError as error:
            raise StartupError(f"{self._name} sent what cannot be read: {error}") from error
        if isinstance(message, EngineInfo):
            return message
        if isinstance(message, EngineFailed):
            raise StartupError(message.message)
        raise StartupError(f"{self._name} began with a {type(message).__name__}")
