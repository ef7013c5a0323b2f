"""The engine's process: `python -m whalepod.server.engine.process`, started by `server/launch.py`.

Its configuration comes on stdin (`codec.encode_value`), progress goes to stderr, and everything
else over the channel: first an `EngineInfo`, or an `EngineFailed` when it cannot serve.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from whalepod.server.channel import EngineServer
from whalepod.server.codec import decode_value
from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineFailed

if TYPE_CHECKING:
    from whalepod.server.engine.core import EngineCore  # brings torch: loaded with the model

PARENT_POLL_S = 1.0
"""How soon an engine notices that its launcher is gone."""

Build: TypeAlias = "Callable[[EngineConfig], EngineCore]"
logger = logging.getLogger(__name__)


def serve(core: EngineCore, server: EngineServer, should_stop: Callable[[], bool]) -> None:
    """Run the loop until a Shutdown comes or `should_stop`: receive, step, send.

    When nothing can run it sleeps until a message wakes it, and checks itself while it does.
    """
    is_idle, has_rested = True, False
    while not core.is_stopping and not should_stop():
        messages = server.receive(wait=is_idle)
        if is_idle and not messages and not has_rested:
            core.rest()
            has_rested = True
        for reply in core.receive(messages):
            server.send(reply)
        outputs = core.step()
        is_idle = outputs is None
        if outputs is not None:
            has_rested = False
            server.send(outputs)


def run(address: str, parent_pid: int, build: Build) -> int:
    """Build the engine that stdin describes and serve until told to stop; return the exit code."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle
    threading.Thread(
        target=_follow_parent, args=(parent_pid, address), name="follow-parent", daemon=True
    ).start()
    server = EngineServer(address, stop.is_set)
    try:
        core = build(decode_value(EngineConfig, sys.stdin.buffer.read()))
        server.send(core.info)
        serve(core, server, stop.is_set)
        core.close()
        return 0
    except StartupError as error:
        server.send(EngineFailed(message=str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine stops")
        server.send(EngineFailed(message=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        server.close()
        if os.getppid() != parent_pid:
            _remove_socket(address)


def _follow_parent(parent_pid: int, address: str) -> None:
    """End this process when its launcher died: nobody else would."""
    while os.getppid() == parent_pid:
        threading.Event().wait(PARENT_POLL_S)
    _remove_socket(address)
    os._exit(1)


def _remove_socket(address: str) -> None:
    """Remove the launcher's folder, which it cannot do any more."""
    path = address.removeprefix("ipc://")
    for remove, name in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        try:
            remove(name)
        except FileNotFoundError:
            pass  # both threads may come here
        except OSError as error:
            logger.warning("left behind %s: %s", name, error)


def main(arguments: Sequence[str], build: Build) -> int:
    """Parse the launcher's arguments and run."""
    parser = argparse.ArgumentParser(prog="whalepod engine")
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    return run(options.address, options.parent_pid, build)


if __name__ == "__main__":
    from whalepod.server.build import build_engine

    sys.exit(main(sys.argv[1:], build_engine))
