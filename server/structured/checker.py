"""Checks grammars at the door, in processes that are killed when they take too long."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import CompilerUnavailableError, GrammarError
from whalepod.server.structured.worker import MAX_CPU_S

NUM_COMPILERS = 2
MAX_REMEMBERED = 1024
MAX_WAITING = 1024
"""Requests whose grammars wait for a compiler."""
MAX_LINE_BYTES = 64 * 1024 * 1024
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit codes of a worker that another process ended, such as the kernel when memory is short."""


class GrammarChecker:
    """Judges each grammar once. Clients take turns: one that sends many holds one compiler."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
    ) -> None:
        vocabulary = {
            "tokenizer_json": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._compilers = [
            CompilerProcess(vocabulary, timeout_s, start_timeout_s) for _ in range(NUM_COMPILERS)
        ]
        self._idle = self._compilers[::-1]  # the last one is asked next: it runs already
        self._turns = Turns(NUM_COMPILERS)
        self._asking: set[asyncio.Task[str | None]] = set()
        self._num_waiting = 0
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, constraint: Constraint, client: Hashable = None) -> None:
        """Return if the grammar can be compiled; GrammarError says why not.

        Raises CompilerUnavailableError when no compiler can be started, or too many wait for one.
        """
        key = digest_of(constraint)
        if key not in self._verdicts:
            await self._judge(key, constraint, client)
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise GrammarError(verdict)

    async def close(self) -> None:
        """End the compilers, whatever they do."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for compiler in self._compilers:
            await compiler.end()

    async def _judge(self, key: bytes, constraint: Constraint, client: Hashable) -> None:
        """Add the verdict on a grammar once it is the client's turn.

        A caller that is cancelled while a compiler judges, or starts, does not end it: the verdict
        is remembered, and others need the compiler.
        """
        if self._num_waiting >= MAX_WAITING:
            raise CompilerUnavailableError(f"{self._num_waiting} grammars wait to be checked")
        self._num_waiting += 1
        try:
            await self._turns.take(client)
            task = asyncio.create_task(self._ask(key, constraint, client))
            self._asking.add(task)
            task.add_done_callback(self._asked)
            verdict = await asyncio.shield(task)
            self._verdicts[key] = verdict
        finally:
            self._num_waiting -= 1

    async def _ask(self, key: bytes, constraint: Constraint, client: Hashable) -> str | None:
        compiler = self._idle.pop()
        try:
            if key not in self._verdicts:
                self._verdicts[key] = await compiler.judge(constraint)
            return self._verdicts[key]
        finally:
            self._idle.append(compiler)
            self._turns.give_back(client)

    def _asked(self, task: asyncio.Task[str | None]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # its callers may have left; one that waits hears of it


def digest_of(constraint: Constraint) -> bytes:
    """Return what tells grammars apart: they may be long."""
    text = f"{constraint.kind} {constraint.grammar}"
    return hashlib.sha256(text.encode()).digest()


class Turns:
    """Shares a few places: clients take turns, and each has one place at a time."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy: set[Hashable] = set()

    async def take(self, client: Hashable) -> None:
        """Return when the client has a place, which it must give back."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._call_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(client)
            raise

    def give_back(self, client: Hashable) -> None:
        self._busy.remove(client)
        self._num_free += 1
        if client in self._waiting:
            self._waiting.move_to_end(client)
        self._call_next()

    def _call_next(self) -> None:
        for client in [client for client in self._waiting if client not in self._busy]:
            if not self._num_free:
                return
            turns = self._waiting.pop(client)
            while turns and turns[0].done():  # who waited has left
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                self._waiting[client] = turns
                self._busy.add(client)
                self._num_free -= 1


class CompilerProcess:
    """Owns a worker process: started for its first grammar, replaced when it dies."""

    def __init__(
        self, vocabulary: dict[str, Any], timeout_s: float, start_timeout_s: float
    ) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    async def end(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def judge(self, constraint: Constraint) -> str | None:
        """Return what is wrong with a grammar; None if it compiles.

        Raises GrammarError for a verdict that may be another one later.
        """
        process = await self._worker()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _exchange(process, asdict(constraint))
        except TimeoutError:  # not remembered: on a busy machine it says little of the grammar
            await self.end()
            raise GrammarError(f"it takes more than {self._timeout_s:g} s to compile") from None
        except (EOFError, ConnectionError):
            code = await process.wait()
            await self.end()
            if code == -signal.SIGXCPU:
                return f"it takes more than {MAX_CPU_S} s to compile"
            if code in _KILLED_FROM_OUTSIDE:  # it says little of the grammar: not remembered
                name = signal.Signals(-code).name
                raise CompilerUnavailableError(
                    f"the grammar compiler was ended by {name}"
                ) from None
            return "it takes too much memory to compile"
        except asyncio.CancelledError:  # the server stops
            await self.end()
            raise
        error = answer["error"]
        return None if error is None else str(error)

    async def _worker(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            await self.end()  # it was killed while it was idle
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
                await self.end()
                raise CompilerUnavailableError("the grammar compiler does not start") from error
            except BaseException:
                await self.end()
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
