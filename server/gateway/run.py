"""Serves the application with uvicorn until a signal says stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator, Mapping

import uvicorn

from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.tokenizer import TextTokenizer
from whalepod.server.upstream import Upstream

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
DRAIN_S = 30
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would raise them again and skip our caller's cleanup."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: GatewayConfig,
    upstream: Upstream,
    tokenizer: TextTokenizer,
    *,
    default_params: Mapping[str, float] | None = None,
) -> None:
    """Listen until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Run it on uvloop. Raises StartupError when the address cannot be had.
    """
    if not config.api_key and config.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("%s is open to the network without a key: set --api-key", config.host)
    app = create_app(config, upstream, tokenizer, default_params=default_params)
    with listen(config.host, config.port) as listener:
        server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        loop = asyncio.get_running_loop()
        stop_signals = (signal.SIGTERM, signal.SIGINT)
        for number in stop_signals:
            loop.add_signal_handler(number, _stop, server)
        try:
            await server.serve(sockets=[listener])
        finally:
            for number in stop_signals:
                loop.remove_signal_handler(number)


def _stop(server: uvicorn.Server) -> None:
    server.force_exit = server.should_exit
    server.should_exit = True


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
