"""The process of an engine, `python -m whalepod.server.engine_process`; see `engine_launcher.py`.

Address and configuration come on stdin (`engine_launcher.assign`), progress goes to stderr, and all
else over the channel: first an `EngineInfo`, or an `EngineFailed` when it cannot serve.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from whalepod.server.channel import EngineServer
from whalepod.server.codec import decode_value
from whalepod.server.config import EngineConfig
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import EngineFailed, EngineInfo, StepOutputs, ToEngine, ToGateway

PARENT_POLL_S = 1.0
"""How soon an engine notices that its launcher is gone."""


class ServedEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_stopping(self) -> bool: ...

    @property
    def may_sleep(self) -> bool:
        """Whether the last step found nothing to do, and only a message can change that."""
        ...

    def receive(self, messages: Sequence[ToEngine]) -> Sequence[ToGateway]: ...

    def step(self) -> StepOutputs | None: ...

    def on_idle(self) -> None: ...

    def close(self) -> None: ...


Build: TypeAlias = Callable[[EngineConfig], ServedEngine]
Open: TypeAlias = Callable[[bytes, EngineServer, Callable[[], bool]], ServedEngine]
"""(what the launcher wrote to stdin, the channel, whether to stop) -> an engine that can serve."""
logger = logging.getLogger(__name__)


def serve(core: ServedEngine, server: EngineServer, should_stop: Callable[[], bool]) -> None:
    """Run the loop until a Shutdown comes or `should_stop`: receive, step, send.

    When nothing can run it sleeps until a message wakes it, and checks itself while it does.
    """
    has_idled = False
    while not core.is_stopping and not should_stop():
        may_sleep = core.may_sleep
        messages = server.receive(wait=may_sleep)
        if may_sleep and not messages and not has_idled:
            core.on_idle()
            has_idled = True
        for reply in core.receive(messages):
            server.send(reply)
        outputs = core.step()
        has_idled = has_idled and core.may_sleep
        if outputs is not None:
            server.send(outputs)


def run(parent_pid: int, open_engine: Open, folder: str) -> int:
    """Open the engine that stdin describes and serve until told to stop; return the exit code.

    A process that was started ahead waits here until it is needed, or its launcher ends.
    """
    address, _, data = sys.stdin.buffer.read().partition(b"\n")
    if not address:
        return 0
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    threading.Thread(
        target=_follow_parent, args=(parent_pid, folder), name="follow-parent", daemon=True
    ).start()
    server = EngineServer(address.decode(), stop.is_set)
    try:
        core = open_engine(data, server, stop.is_set)
        gc.collect()
        gc.freeze()  # what is loaded stays: to look through it again would hold up a step
        server.send(core.info)
        serve(core, server, stop.is_set)
        core.close()
        return 0
    except (StartupError, GroupLost) as error:
        server.send(EngineFailed(message=str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine stops")
        server.send(EngineFailed(message=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        server.close()
        if os.getppid() != parent_pid:
            shutil.rmtree(folder, ignore_errors=True)


def _follow_parent(parent_pid: int, folder: str) -> None:
    """End this process when its launcher died: nothing else would."""
    while os.getppid() == parent_pid:
        threading.Event().wait(PARENT_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)  # its launcher cannot do it any more
    os._exit(1)


def main(arguments: Sequence[str], build: Build) -> int:
    """Run the engine that `build` makes of the launcher's configuration."""
    return main_of(arguments, lambda data, *_: build(decode_value(EngineConfig, data)))


def main_of(arguments: Sequence[str], open_engine: Open, name: str = "engine") -> int:
    """Parse the launcher's arguments and run."""
    parser = argparse.ArgumentParser(prog=f"whalepod {name}")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--folder", required=True, help="removed, if the launcher cannot")
    parser.add_argument("--preload", help="module to import before stdin is read")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=f"{name}: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle
    # comes when the launcher died while this process was stopped: `_follow_parent` ends it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if options.preload:
        importlib.import_module(options.preload)
    return run(options.parent_pid, open_engine, options.folder)


if __name__ == "__main__":
    from whalepod.server.build import build_engine

    sys.exit(main(sys.argv[1:], build_engine))
