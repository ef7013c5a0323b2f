"""Serves the application with uvicorn until a signal says stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence

import uvicorn
from fastapi import FastAPI

from whalepod.server.config import GatewayConfig
from whalepod.server.engine_client import EngineClient
from whalepod.server.errors import StartupError
from whalepod.server.gateway.admin import create_admin_app
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.auth import read_keys
from whalepod.server.gateway.connection import TimedHttpProtocol, max_connections
from whalepod.server.gateway.live_requests import LiveRequests
from whalepod.server.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
LAST_FRAMES_S = 5
"""For the last bytes of answers once all have ended."""
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would raise them again and skip our caller's cleanup."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: GatewayConfig,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    *,
    default_params: Mapping[str, float] | None = None,
    told_to_stop: asyncio.Event | None = None,
) -> None:
    """Listen until SIGTERM, SIGINT or `told_to_stop`, then drain; a second signal stops at once.

    While it drains new requests get a 503 and live ones may end, up to `drain_timeout_s`.

    Run it on uvloop. Raises StartupError when the address cannot be had.
    """
    app = create_app(config, engine, tokenizer, default_params=default_params)
    gateway = app.state.gateway
    limit = max_connections() // (2 if config.admin_port else 1)
    servers = [(_new_server(app, limit), config.host, config.port)]
    if config.admin_port:
        admin = create_admin_app(gateway, read_keys(config.admin_key, None))
        servers.append((_new_server(admin, limit), config.admin_host, config.admin_port))
    # what was loaded stays: looking through it for garbage held up every stream for 90 ms
    gc.collect()
    gc.freeze()
    with contextlib.ExitStack() as listeners:
        sockets = [listeners.enter_context(listen(host, port)) for _, host, port in servers]
        with _stopping_on_signals(
            [server for server, _, _ in servers],
            gateway.requests,
            config.drain_timeout_s,
            told_to_stop or asyncio.Event(),
        ):
            await asyncio.gather(
                *(
                    server.serve(sockets=[listener])
                    for (server, _, _), listener in zip(servers, sockets, strict=True)
                )
            )


def _new_server(app: FastAPI, num_connections: int) -> _Server:
    class Protocol(TimedHttpProtocol):
        max_connections = num_connections

    return _Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_FRAMES_S,
        )
    )


@contextlib.contextmanager
def _stopping_on_signals(
    servers: Sequence[uvicorn.Server],
    requests: LiveRequests,
    drain_timeout_s: float,
    told_to_stop: asyncio.Event,
) -> Iterator[None]:
    """Let the first signal drain the servers and stop them, and a second one stop them at once."""
    loop = asyncio.get_running_loop()
    has_signal = False

    async def drain_when_told() -> None:
        await told_to_stop.wait()
        if requests:
            logger.info("finishing %d requests, up to %g s", len(requests), drain_timeout_s)
        num_cut = await requests.drain(drain_timeout_s)
        if num_cut:
            logger.warning("%d requests were not finished in time", num_cut)
        for server in servers:
            server.should_exit = True

    def stop() -> None:
        nonlocal has_signal
        told_to_stop.set()
        if has_signal:
            for server in servers:
                server.force_exit = server.should_exit = True
        has_signal = True

    stop_signals = (signal.SIGTERM, signal.SIGINT)
    for number in stop_signals:
        loop.add_signal_handler(number, stop)
    drain = loop.create_task(drain_when_told())
    try:
        yield
    finally:
        for number in stop_signals:
            loop.remove_signal_handler(number)
        drain.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket; StartupError is one sentence for the user."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use: choose another with --port"
        else:
            message = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise StartupError(message) from error
    return listener
