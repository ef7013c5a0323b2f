"""Checks grammars at the door, in a process that is killed when it takes too long."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import CompilerUnavailableError, GrammarError
from whalepod.server.structured.worker import MAX_CPU_S

MAX_REMEMBERED = 1024
MAX_WAITING = 1024
"""Requests whose grammars wait for the worker."""
MAX_LINE_BYTES = 64 * 1024 * 1024
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit codes of a worker that another process ended, such as the kernel when memory is short."""


class GrammarChecker:
    """Owns the worker process: started for the first grammar, replaced when it dies."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._vocabulary = {
            "tokenizer_json": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._lock = asyncio.Lock()
        self._asking: asyncio.Task[str | None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._num_waiting = 0
        self._verdicts: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    async def check(self, constraint: Constraint) -> None:
        """Return if the grammar can be compiled; GrammarError says why not.

        Raises CompilerUnavailableError when the worker cannot be started, or too many wait for it.
        """
        key = (constraint.kind, constraint.grammar)
        if key not in self._verdicts:
            await self._judge(key, constraint)
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise GrammarError(verdict)

    async def close(self) -> None:
        """End the worker, whatever it does."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._end_worker()

    async def _end_worker(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _judge(self, key: tuple[str, str], constraint: Constraint) -> None:
        """Add the verdict on a grammar; others wait until the worker has judged this one.

        A caller that is cancelled while the worker judges, or starts, does not end it: the verdict
        is remembered, and others need the worker.
        """
        if self._num_waiting >= MAX_WAITING:
            raise CompilerUnavailableError(f"{self._num_waiting} grammars wait to be checked")
        self._num_waiting += 1
        try:
            await self._lock.acquire()
            self._asking = asyncio.create_task(self._ask_once(key, constraint))
            self._asking.add_done_callback(self._asked)
            verdict = await asyncio.shield(self._asking)
            self._verdicts[key] = verdict
        finally:
            self._num_waiting -= 1

    async def _ask_once(self, key: tuple[str, str], constraint: Constraint) -> str | None:
        if key not in self._verdicts:
            self._verdicts[key] = await self._ask(constraint)
        return self._verdicts[key]

    def _asked(self, task: asyncio.Task[str | None]) -> None:
        """Let the next one ask; a caller that still waits hears of an error."""
        self._asking = None
        self._lock.release()
        if not task.cancelled():
            task.exception()  # its callers may have left

    async def _ask(self, constraint: Constraint) -> str | None:
        process = await self._worker()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _exchange(process, asdict(constraint))
        except TimeoutError:  # not remembered: on a busy machine it says little of the grammar
            await self._end_worker()
            raise GrammarError(f"it takes more than {self._timeout_s:g} s to compile") from None
        except (EOFError, ConnectionError):
            code = await process.wait()
            await self._end_worker()
            if code == -signal.SIGXCPU:
                return f"it takes more than {MAX_CPU_S} s to compile"
            if code in _KILLED_FROM_OUTSIDE:  # it says little of the grammar: not remembered
                name = signal.Signals(-code).name
                raise CompilerUnavailableError(
                    f"the grammar compiler was ended by {name}"
                ) from None
            return "it takes too much memory to compile"
        except asyncio.CancelledError:  # the server stops
            await self._end_worker()
            raise
        error = answer["error"]
        return None if error is None else str(error)

    async def _worker(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            await self._end_worker()  # it was killed while it was idle
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "whalepod.server.structured.worker"),
                env=_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
            )
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await _exchange(self._process, self._vocabulary)
            except (TimeoutError, EOFError, ConnectionError) as error:
                await self._end_worker()
                raise CompilerUnavailableError("the grammar compiler does not start") from error
            except BaseException:
                await self._end_worker()
                raise
        return self._process


def _environment() -> dict[str, str]:
    """Return the environment of the worker: it finds the modules that this process finds."""
    paths = (str(Path(entry).absolute()) for entry in sys.path)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


async def _exchange(process: asyncio.subprocess.Process, message: dict[str, Any]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(orjson.dumps(message) + b"\n")
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise EOFError("the worker ended")
    return orjson.loads(line)
