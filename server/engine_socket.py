"""The launcher's end of the wire to an engine: from the first message to the gateway's channel."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from whalepod.server.channel import EngineChannel, new_socket
from whalepod.server.codec import decode
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineFailed, EngineInfo, MessageError

POLL_MS = 100


class EngineSocket:
    """Bound before the engine starts; it says what it can do, or why it cannot, and then serves.

    name         the engine's, in messages for people
    exit_reason  returns how the engine has ended; None while it lives
    """

    def __init__(
        self, name: str, address: str, exit_reason: Callable[[], str | None], prefix: str = ""
    ) -> None:
        """Listen at `address`; raises StartupError. prefix: of what the engine says."""
        self.name = name
        self._prefix = prefix
        self.exit_reason = exit_reason
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context)
        self._monitor: zmq.Socket[bytes] | None = None
        self._cut_at: float | None = None
        self._info: EngineInfo | None = None
        is_file = address.startswith("ipc://")
        self._file = Path(address.removeprefix("ipc://")) if is_file else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            is_long = error.errno == errno.ENAMETOOLONG
            reason = "too long for a socket: set TMPDIR to a shorter folder" if is_long else error
            raise StartupError(f"{name} cannot be reached at {address}: {reason}") from error

    @property
    def address(self) -> str:
        """Return where the engine is to connect, with the port that was found."""
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, str), endpoint
        return endpoint

    def cut_for_s(self) -> float:
        """Return since when an engine on another machine has no connection; 0: it has one."""
        if self._monitor is not None and self._cut_at is None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._cut_at = time.monotonic()
        return 0.0 if self._cut_at is None else time.monotonic() - self._cut_at

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        assert self._info is not None, "the engine was not started"
        return self._info

    def take_info(self, timeout_ms: int) -> bool:
        """Return whether the engine can serve; raises StartupError with what it says if not."""
        if not self._socket.poll(timeout_ms):
            return False
        try:
            message = decode(self._socket.recv())
        except MessageError as error:
            raise StartupError(f"{self.name} sent what cannot be read: {error}") from error
        if isinstance(message, EngineFailed):
            raise StartupError(f"{self._prefix}{message.message}")
        if not isinstance(message, EngineInfo):
            raise StartupError(f"{self.name} began with a {type(message).__name__}")
        self._info = message
        if self.address.startswith("tcp:"):
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return True

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """What a channel sends and receives on."""
        return self._socket

    def channel(self) -> EngineChannel:
        """Return the gateway's end, to be entered once."""
        return EngineChannel(self._socket, self.info, self.exit_reason)

    def close(self) -> None:
        if self._monitor is not None:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
        if self._file is not None:  # ZeroMQ leaves it
            with suppress(OSError):
                self._file.unlink()


def wait_until_ready(
    sockets: Sequence[EngineSocket],
    timeout_s: float,
    why_stop: Callable[[], str | None] = lambda: None,
) -> None:
    """Hear from all engines, in the order in which they come. Raises StartupError.

    why_stop  returns why it is of no use to wait any longer; None: it is
    """
    deadline, pending = time.monotonic() + timeout_s, list(sockets)
    while pending:
        # asked before the last look: what has ended may have told why
        reason = why_stop() or next(
            (f"{reason} before it was ready" for one in sockets if (reason := one.exit_reason())),
            None,
        )
        pending = [one for one in pending if not one.take_info(max(POLL_MS // len(pending), 1))]
        if reason is not None:
            raise StartupError(reason)
        if time.monotonic() > deadline:
            names = ", ".join(one.name for one in pending)
            raise StartupError(f"{names} not ready after {timeout_s:.0f} s")
