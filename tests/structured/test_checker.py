"""The process that judges grammars: what it says, and what becomes of it when others end it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from whalepod.models.synthetic_tokenizer import train_tokenizer
from whalepod.scheduler.params import Constraint
from whalepod.server.structured.checker import GrammarChecker
from whalepod.server.structured.interface import CompilerUnavailableError, GrammarError

DEADLINE_S = 60.0
GOOD = Constraint(kind="regex", grammar="a+")
BAD = Constraint(kind="regex", grammar="(a")


@asynccontextmanager
async def checker() -> AsyncIterator[GrammarChecker]:
    """Start a worker, and end it."""
    checker = GrammarChecker(train_tokenizer(512).to_str(), 540, [1], timeout_s=DEADLINE_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await checker.check(Constraint(kind="regex", grammar="start"))
            yield checker
    finally:
        await checker.close()
        assert checker._process is None
        assert not checker._lock.locked()


def pid_of(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_grammar_is_not_blamed_for_the_end_of_a_worker_that_was_killed(number: int) -> None:
    async def scenario() -> None:
        async with checker() as own:
            os.kill(pid_of(own), signal.SIGSTOP)
            judged = asyncio.create_task(own.check(GOOD))
            await until(lambda: own._asking)
            os.kill(pid_of(own), number)
            with suppress(ProcessLookupError):  # SIGKILL ends it while it is stopped
                os.kill(pid_of(own), signal.SIGCONT)
            with pytest.raises(CompilerUnavailableError, match=signal.Signals(number).name):
                await judged
            await own.check(GOOD)

    asyncio.run(scenario())


def test_a_worker_that_was_killed_while_idle_is_replaced_unnoticed() -> None:
    async def scenario() -> None:
        async with checker() as own:
            process = own._process
            assert process is not None
            process.kill()
            await until(lambda: process.returncode is not None)
            await own.check(GOOD)
            with pytest.raises(GrammarError):
                await own.check(BAD)
            assert own._process is not process

    asyncio.run(scenario())


def test_a_client_that_leaves_takes_neither_worker_nor_verdict_along() -> None:
    async def scenario() -> None:
        async with checker() as own:
            pid = pid_of(own)
            os.kill(pid, signal.SIGSTOP)
            first, second, third = (asyncio.create_task(own.check(g)) for g in (BAD, GOOD, GOOD))
            await until(lambda: own._asking and own._num_waiting == 3)
            first.cancel()
            second.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            assert first.cancelled()
            assert own._num_waiting == 1
            os.kill(pid, signal.SIGCONT)
            await third
            assert own._verdicts["regex", BAD.grammar]
            assert pid_of(own) == pid

    asyncio.run(scenario())


def test_closing_ends_a_worker_that_is_asked() -> None:
    async def scenario() -> None:
        async with checker() as own:
            os.kill(pid_of(own), signal.SIGSTOP)
            judged = asyncio.create_task(own.check(GOOD))
            await until(lambda: own._asking)
            await own.close()
            with pytest.raises(asyncio.CancelledError):
                await judged

    asyncio.run(scenario())
