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
from whalepod.server.structured.checker import (
    NUM_COMPILERS,
    GrammarChecker,
    Turns,
    digest_of,
)
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
        assert all(compiler._process is None for compiler in checker._compilers)
        assert len(checker._idle) == NUM_COMPILERS


def pid_of(checker: GrammarChecker) -> int:
    (first, *_) = checker._compilers
    assert first._process is not None
    return first._process.pid


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
            process = own._compilers[0]._process
            assert process is not None
            process.kill()
            await until(lambda: process.returncode is not None)
            await own.check(GOOD)
            with pytest.raises(GrammarError):
                await own.check(BAD)
            assert own._compilers[0]._process is not process

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
            assert own._verdicts[digest_of(BAD)]
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


def test_B3_clients_take_turns_and_hold_one_compiler_each() -> None:
    async def scenario() -> None:
        turns = Turns(2)
        order: list[str] = []

        async def work(client: str, done: asyncio.Event) -> None:
            await turns.take(client)
            order.append(client)
            await done.wait()
            turns.give_back(client)

        ends = [asyncio.Event() for _ in range(7)]
        clients = ["many"] * 4 + ["a", "b", "a"]
        tasks = [
            asyncio.create_task(work(client, end))
            for client, end in zip(clients, ends, strict=True)
        ]
        await until(lambda: len(order) == 2)
        assert order == ["many", "a"]  # one of many's, though it came with four
        tasks[1].cancel()  # one that leaves holds up no other
        await asyncio.gather(tasks[1], return_exceptions=True)
        ends[0].set()
        await until(lambda: len(order) == 3)
        assert order[2] == "b"
        for end in ends:
            end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(order) == ["a", "a", "b", "many", "many", "many"]

    asyncio.run(scenario())


def test_B3_slow_grammars_of_one_client_do_not_hold_up_another() -> None:
    async def scenario() -> None:
        async with checker() as own:
            os.kill(pid_of(own), signal.SIGSTOP)  # stands for a grammar that takes for ever
            grammars = [Constraint(kind="regex", grammar=f"x{i}") for i in range(10)]
            slow = [asyncio.create_task(own.check(grammar, "slow")) for grammar in grammars]
            await until(lambda: len(own._asking) == 1 and own._num_waiting == 10)
            await own.check(GOOD, "other")
            assert own._num_waiting == 10
            os.kill(pid_of(own), signal.SIGCONT)
            await asyncio.gather(*slow)

    asyncio.run(scenario())


def test_B4_verdicts_do_not_keep_the_texts_of_grammars() -> None:
    long = Constraint(kind="lark", grammar="start: " + "x" * 100_000)
    assert len(digest_of(long)) == 32
    assert digest_of(long) != digest_of(GOOD) != digest_of(BAD)
