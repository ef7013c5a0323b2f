"""The wire between gateway and engine: one ZeroMQ pair over a socket file in a private folder.

`EngineServer` is the engine's end (blocking, one thread), `EngineChannel` the gateway's (asyncio).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Self

import zmq

from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats
from whalepod.server.codec import Encoder, decode, encode
from whalepod.server.errors import EngineLost, RequestRecalled
from whalepod.server.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    EngineFailed,
    EngineInfo,
    Experts,
    MessageError,
    Ping,
    PlaceExperts,
    Pong,
    Recall,
    Recalled,
    Rejected,
    ResetPrefixCache,
    StepOutputs,
    Submit,
    ToEngine,
    ToGateway,
)
from whalepod.server.output_queue import OutputQueue

MAX_QUEUED_MESSAGES = 1024
"""High-water mark of each direction: past it a sender waits for its peer."""
MAX_LIVE_REQUESTS = 16_384
"""Requests in flight on one channel: each has a queue here, and one abort may wait to be sent."""
MAX_RECEIVED_AT_ONCE = 256
"""Messages that the engine takes between two steps."""
MAX_EXCHANGED_AT_ONCE = 64
"""Messages that the gateway takes or sends before others have their turn."""
EXIT_POLL_S = 0.2
"""How often the gateway looks whether the engine's process lives."""
LINGER_MS = 1000
"""How long last words may take to leave a socket that is closed."""

logger = logging.getLogger(__name__)


def new_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Make one end of the pair, with every queue and every wait bounded."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


def _events(socket: zmq.Socket[bytes]) -> int:
    """Return what a socket can do now: POLLIN, POLLOUT."""
    return int(socket.get(zmq.EVENTS))


class EngineServer:
    """The engine's end. `should_stop` is asked whenever a call has waited for `poll_s`."""

    def __init__(
        self,
        address: str,
        should_stop: Callable[[], bool] = lambda: False,
        poll_s: float = 0.5,
    ) -> None:
        self._should_stop = should_stop
        self._poll_ms = int(poll_s * 1000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encode = Encoder().encode
        self._socket = new_socket(self._context)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake_on(self, descriptor: int) -> None:
        """Let a readable file descriptor, too, end the sleep of `receive`."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Return the messages that have come; with `wait` sleep up to `poll_s` for the first.

        A frame that is no message of the gateway is logged and dropped.
        """
        messages: list[ToEngine] = []
        if wait and not self._poller.poll(self._poll_ms):
            return messages
        # asked between all steps: far cheaper than to try and be refused
        while len(messages) < MAX_RECEIVED_AT_ONCE and _events(self._socket) & zmq.POLLIN:
            message = _decode_or_none(self._socket.recv(zmq.NOBLOCK))
            if message is not None:
                messages.append(message)
        return messages

    def send(self, message: ToGateway) -> None:
        """Send a message; while the gateway is late wait for it, unless told to stop."""
        frame = self._encode(message)
        while True:
            with suppress(zmq.Again):
                self._socket.send(frame, zmq.NOBLOCK)
                return
            if not self._socket.poll(self._poll_ms, zmq.POLLOUT) and self._should_stop():
                return

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _decode_or_none(frame: bytes) -> ToEngine | None:
    try:
        message = decode(frame)
    except MessageError as error:
        logger.error("dropped a frame of the gateway: %s", error)
        return None
    if isinstance(message, ToEngine):
        return message
    logger.error("dropped a %s: the gateway does not send these", type(message).__name__)
    return None


class EngineChannel:
    """The gateway's end: an `EngineClient`. Use as `async with`, in the event loop that serves.

    `socket` is bound and its engine has sent `info`; the channel closes it at the end.
    `exit_reason` says why the engine's process ended, or None while it lives.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        info: EngineInfo,
        exit_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._info = info
        self._exit_reason = exit_reason
        self._experts: Experts | None = None
        self._stats = Stats(num_blocks=info.num_blocks, num_free_blocks=info.num_blocks)
        self._failure: str | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._pings: dict[int, asyncio.Future[Stats]] = {}
        self._last_nonce = 0
        self._outbox: deque[bytes] = deque()  # two a live request, at most

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.detach()

    def _begin(self) -> None:
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._exchange)
        self._exchange()  # what came earlier makes the descriptor readable no more
        self._watch = asyncio.create_task(self._watch_process())
        self._watch.add_done_callback(self._watch_ended)

    async def detach(self) -> None:
        """Let go of the engine; whoever waits for it raises EngineLost. It may be done already."""
        if self._socket.closed:
            return
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        self._loop.remove_reader(self._descriptor)
        self._fail("the server is stopping", is_fault=False)
        self._socket.close()

    def attach(self, socket: zmq.Socket[bytes], info: EngineInfo) -> None:
        """Go on with the next engine, after `detach`."""
        self._socket, self._info, self._failure = socket, info, None
        self._stats = Stats(num_blocks=info.num_blocks, num_free_blocks=info.num_blocks)
        self._outbox.clear()
        self._begin()

    @property
    def is_lost(self) -> bool:
        """Return whether the engine that it was attached to last is lost."""
        return self._failure is not None

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """Let no background task die unseen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the engine's channel failed", exc_info=error)
            self._fail(f"the channel to the engine failed: {error}")

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        return self._info

    @property
    def stats(self) -> Stats:
        """The newest counters that the engine sent."""
        return self._stats

    @property
    def experts(self) -> Experts | None:
        """Where experts are, if they move."""
        return self._experts

    @property
    def rank_stats(self) -> Mapping[int, Stats]:
        """The same: this is the only rank."""
        return {0: self._stats}

    @property
    def failure(self) -> str | None:
        """Why the engine is lost, or None while it is well."""
        return self._failure

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput, None]:
        """Yield outputs of all sequences until each has a finish reason or was aborted.

        Closing the iterator early aborts the request in the engine and frees its blocks. A reader
        that falls behind gets longer outputs, never fewer tokens. Raises RequestRejected when the
        engine refuses the request and EngineLost when it dies.
        """
        self._check_well()
        request_id = request.request_id
        if request_id in self._queues:
            raise ValueError(f"request id {request_id!r} is in use already")
        if len(self._queues) >= MAX_LIVE_REQUESTS:
            raise RequestRejected(
                "queue_full", f"{MAX_LIVE_REQUESTS} requests are live: retry later"
            )
        frame = encode(request)
        queue = self._queues[request_id] = OutputQueue(request.num_sequences)
        self._post(frame)
        try:
            while queue.live:
                yield await queue.get()
        finally:
            del self._queues[request_id]
            if queue.live and not queue.has_failed:
                self._send(Abort(request_id=request_id))

    def abort_answer(self, request_id: str, index: int) -> None:
        """End one answer of a live request; nothing more of it is yielded."""
        queue = self._queues.get(request_id)
        if queue is not None and queue.drop(index) and not queue.has_failed:
            self._send(Abort(request_id=request_id, index=index))

    def recall(self, request_id: str) -> None:
        """Ask for a request back that may not have begun: its reader raises RequestRecalled if
        so, and hears nothing otherwise."""
        if request_id in self._queues and self._failure is None:
            self._send(Recall(request_id=request_id))

    async def ping(self, timeout_s: float) -> Stats:
        """Return fresh counters from the engine loop itself; EngineLost after `timeout_s`."""
        self._check_well()
        if len(self._outbox) > MAX_QUEUED_MESSAGES:
            raise EngineLost("the engine takes no messages")
        self._last_nonce += 1
        nonce = self._last_nonce
        pong = self._pings[nonce] = asyncio.get_running_loop().create_future()
        self._send(Ping(nonce=nonce))
        try:
            return await asyncio.wait_for(pong, timeout_s)
        except TimeoutError:
            raise EngineLost(f"the engine's loop did not answer within {timeout_s} s") from None
        finally:
            del self._pings[nonce]

    def fail(self, reason: str) -> None:
        """Give the engine up: all who wait for it raise EngineLost."""
        self._fail(reason)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget cached texts; a ping after it tells when it has."""
        self._check_well()
        self._send(ResetPrefixCache())

    def place_experts(self, slots: tuple[tuple[int, ...], ...]) -> None:
        """Have the group place experts so; no slots: as the loads say."""
        self._check_well()
        self._send(PlaceExperts(slots=slots))

    def _check_well(self) -> None:
        if self._failure is not None:
            raise EngineLost(self._failure)

    def _send(self, message: ToEngine) -> None:
        self._post(encode(message))

    def _post(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._loop.call_soon(self._exchange)

    # -- in the background ----------------------------------------------------------------------

    def _exchange(self) -> None:
        """Take what has come and send what waits.

        The socket's descriptor tells of changes only, and each call may use one up: so this goes on
        until there is nothing to do. (pyzmq's own asyncio socket costs three times as much per
        message, and there is one message per step.)
        """
        try:
            for _ in range(MAX_EXCHANGED_AT_ONCE):
                if self._failure is not None or not self._exchange_one():
                    return
            self._loop.call_soon(self._exchange)
        except MessageError as error:
            self._fail(f"the engine sent what cannot be read: {error}")
        except Exception as error:
            logger.exception("the engine's channel failed")
            self._fail(f"the channel to the engine failed: {error}")

    def _exchange_one(self) -> bool:
        """Receive or send one message; False when neither can be done now."""
        if self._socket.closed:
            return False
        events = _events(self._socket)
        if events & zmq.POLLIN:
            self._take(decode(self._socket.recv(zmq.NOBLOCK)))
        elif self._outbox and events & zmq.POLLOUT:
            self._socket.send(self._outbox.popleft(), zmq.NOBLOCK)
        else:
            return False
        return True

    async def _watch_process(self) -> None:
        while (reason := self._exit_reason()) is None:
            await asyncio.sleep(EXIT_POLL_S)
        self._fail(reason)

    def _take(self, message: ToEngine | ToGateway) -> None:
        match message:
            case StepOutputs():
                self._stats = message.stats or self._stats
                self._experts = message.experts or self._experts
                for output in message.outputs:
                    queue = self._queues.get(output.request_id)
                    if queue is not None and not queue.put(output):
                        self._send(Abort(request_id=output.request_id))
            case Pong():
                self._stats = message.stats
                pong = self._pings.get(message.nonce)
                if pong is not None and not pong.done():
                    pong.set_result(message.stats)
            case Rejected():
                if (queue := self._queues.get(message.request_id)) is not None:
                    queue.fail(RequestRejected(message.code, message.message, message.param))
            case Recalled():
                if (queue := self._queues.get(message.request_id)) is not None:
                    queue.fail(RequestRecalled(message.request_id))
            case EngineFailed():
                self._fail(message.message)
            case _:
                logger.error("dropped a %s of the engine", type(message).__name__)

    def _fail(self, reason: str, *, is_fault: bool = True) -> None:
        """Mark the engine lost, once: all who wait for it raise EngineLost."""
        if self._failure is not None:
            return
        if is_fault:  # clients are not told
            logger.error("the engine is lost: %s", reason)
        self._failure = reason
        for queue in self._queues.values():
            if not queue.has_failed:
                queue.fail(EngineLost(reason))
        for pong in self._pings.values():
            if not pong.done():
                pong.set_exception(EngineLost(reason))
