"""Gateway and engine over a real socket, in two threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.engine.fakes import expected_answer, make_core
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server import channel as channel_module, output_queue
from whalepod.server.channel import EngineChannel, EngineServer, new_socket
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine_process import serve
from whalepod.server.errors import EngineLost
from whalepod.server.messages import EngineFailed, StepOutputs, Submit

DEADLINE_S = 10.0
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = replace(PARAMS, max_tokens=400)
PROMPT = (3, 1, 4, 1, 5)


def request(request_id: str, params: SamplingParams = PARAMS, n: int = 1) -> Submit:
    return Submit(request_id=request_id, prompt_token_ids=PROMPT, params=params, num_sequences=n)


@contextmanager
def bound_socket(folder: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, address = new_socket(context), f"ipc://{folder}/engine"
    socket.bind(address)
    try:
        yield socket, address
    finally:
        socket.close(linger=0)
        context.term()


@asynccontextmanager
async def engine(
    folder: Path,
    core: EngineCore | None = None,
    exit_reason: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[tuple[EngineChannel, EngineCore]]:
    """Serve a fake engine from a thread for the time of a block."""
    core, stop = core or make_core(), threading.Event()
    with bound_socket(folder) as (socket, address):
        server = EngineServer(address, stop.is_set, poll_s=0.05)
        thread = threading.Thread(target=serve, args=(core, server, stop.is_set))
        thread.start()
        try:
            async with EngineChannel(socket, core.info, exit_reason) as channel:
                yield channel, core
        finally:
            stop.set()
            thread.join(DEADLINE_S)
            server.close()


async def read(channel: EngineChannel, submit: Submit) -> list[SequenceOutput]:
    return [output async for output in channel.submit(submit)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_answers_come_back_whole_from_many_requests_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, _):
            answers = await asyncio.gather(
                *(read(channel, request(f"r{i}", n=1 + i % 2)) for i in range(20))
            )
        for i, outputs in enumerate(answers):
            for index in range(1 + i % 2):
                mine = [output for output in outputs if output.index == index]
                ids = [token_id for output in mine for token_id in output.token_ids]
                assert ids == expected_answer(list(PROMPT), PARAMS)
                assert mine[-1].finish_reason == "length"

    asyncio.run(scenario())


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_closing_the_iterator_frees_the_requests_blocks(tmp_path: Path, num_read: int) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, core):
            outputs = channel.submit(request("a", ENDLESS, n=2))
            first = asyncio.ensure_future(anext(outputs))
            await until(lambda: core.stats.num_steps > 0)
            await first
            for _ in range(num_read):
                await anext(outputs)
            await outputs.aclose()

            await until(lambda: not core.has_work)
            await until(lambda: channel.stats.num_running == 0)  # told, without a question
            stats = await channel.ping(DEADLINE_S)
            assert (stats.num_running, stats.num_waiting, stats.num_owned_blocks) == (0, 0, 0)
            assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
            core.check()

    asyncio.run(scenario())


def test_an_aborted_answer_is_free_in_the_engine_and_yields_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, core):
            received = []
            async for output in channel.submit(request("a", replace(ENDLESS, max_tokens=200), n=2)):
                received.append(output)
                if output.index == 0:
                    assert len([o for o in received if o.index == 0]) == 1
                    await until(lambda: core.stats.num_running == 2)  # more of it is under way
                    channel.abort_answer("a", 0)
                    channel.abort_answer("a", 0)
                    await until(lambda: core.stats.num_running <= 1)
            channel.abort_answer("a", 1)  # it has ended
            rest = [token_id for o in received if o.index for token_id in o.token_ids]
            assert rest == expected_answer(list(PROMPT), replace(ENDLESS, max_tokens=200), 1)
            assert received[-1].finish_reason == "length"
            assert 200 < core.stats.generation_tokens < 400

    asyncio.run(scenario())


def test_a_request_ends_when_all_its_answers_are_aborted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, core):
            async with asyncio.timeout(DEADLINE_S):
                async for output in channel.submit(request("a", ENDLESS, n=3)):
                    channel.abort_answer("a", output.index)
            await until(lambda: not core.has_work)
            await until(lambda: channel.stats.num_running == 0)

    asyncio.run(scenario())


def test_a_cancelled_reader_aborts_too_even_while_it_waits_in_the_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = make_core(max_num_seqs=1)
        async with engine(tmp_path, core) as (channel, _):
            tasks = [asyncio.create_task(read(channel, request(f"r{i}", ENDLESS))) for i in "ab"]
            await until(lambda: core.stats.num_running + core.stats.num_waiting == 2)
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

            await until(lambda: not core.has_work)

    asyncio.run(scenario())


def test_a_finished_request_sends_no_abort(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, core):
            await read(channel, request("a"))
            again = await read(channel, request("a"))  # an abort of the first would end this one
            assert again[-1].finish_reason == "length"
            assert core.stats.num_running == 0

    asyncio.run(scenario())


def test_a_refusal_reaches_its_reader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, _):
            long = Submit(request_id="a", prompt_token_ids=(1,) * 600, params=PARAMS)
            with pytest.raises(RequestRejected) as refusal:
                await read(channel, long)
            assert refusal.value.code == "context_length_exceeded"

    asyncio.run(scenario())


def test_an_id_in_use_is_refused_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, _):
            outputs = channel.submit(request("a", ENDLESS))
            await anext(outputs)
            with pytest.raises(ValueError, match="'a' is in use"):
                await read(channel, request("a"))
            await outputs.aclose()

    asyncio.run(scenario())


def test_a_slow_reader_gets_longer_outputs_and_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queue, "MAX_QUEUED_OUTPUTS", 3)

    async def scenario() -> None:
        async with engine(tmp_path) as (channel, core):
            outputs = channel.submit(
                request("a", replace(ENDLESS, max_tokens=100, logprobs=0), n=2)
            )
            received = [await anext(outputs)]
            await until(lambda: not core.has_work)
            await channel.ping(DEADLINE_S)
            received += [output async for output in outputs]

            assert len(received) < 12
            for index in range(2):
                mine = [output for output in received if output.index == index]
                ids = [token_id for output in mine for token_id in output.token_ids]
                assert ids == expected_answer(list(PROMPT), replace(ENDLESS, max_tokens=100))
                assert [entry.token_id for o in mine for entry in o.logprobs] == ids
                assert mine[-1].finish_reason == "length"

    asyncio.run(scenario())


def test_a_ping_that_is_not_answered_ends_at_its_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        with bound_socket(tmp_path) as (socket, _):
            async with EngineChannel(socket, make_core().info) as channel:
                with pytest.raises(EngineLost, match=r"within 0\.05 s"):
                    await channel.ping(0.05)
                assert channel.failure is None, "slow is not dead"

    asyncio.run(scenario())


def test_the_end_of_the_process_fails_all_who_wait_within_a_second(tmp_path: Path) -> None:
    reason: list[str] = []

    async def scenario() -> None:
        with bound_socket(tmp_path) as (socket, _):
            info = make_core().info
            async with EngineChannel(socket, info, lambda: next(iter(reason), None)) as channel:
                waiting = [asyncio.create_task(read(channel, request(f"r{i}"))) for i in range(3)]
                ping = asyncio.create_task(channel.ping(DEADLINE_S))
                await asyncio.sleep(0)
                reason.append("ended by SIGKILL")
                async with asyncio.timeout(1.0):
                    results = await asyncio.gather(*waiting, ping, return_exceptions=True)

                assert [type(result) for result in results] == [EngineLost] * 4
                assert channel.failure == "ended by SIGKILL"
                with pytest.raises(EngineLost, match="SIGKILL"):
                    await read(channel, request("later"))
                with pytest.raises(EngineLost, match="SIGKILL"):
                    await channel.ping(1.0)

    asyncio.run(scenario())


def test_last_words_of_the_engine_reach_its_readers_after_their_outputs(tmp_path: Path) -> None:
    async def scenario() -> None:
        with bound_socket(tmp_path) as (socket, address):
            async with EngineChannel(socket, make_core().info) as channel:
                outputs = channel.submit(request("a"))
                first = asyncio.create_task(anext(outputs))
                server = EngineServer(address)
                await asyncio.sleep(0)
                output = SequenceOutput(sequence_id=0, request_id="a", index=0, token_ids=(7,))
                server.send(StepOutputs(outputs=(output,)))
                server.send(EngineFailed(message="a bug"))

                assert (await asyncio.wait_for(first, DEADLINE_S)).token_ids == (7,)
                with pytest.raises(EngineLost, match="a bug"):
                    await asyncio.wait_for(anext(outputs), DEADLINE_S)
                server.close()

    asyncio.run(scenario())


def test_garbage_from_the_gateway_is_dropped_and_the_engine_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as (channel, _):
            channel._post(b"garbage")
            assert (await read(channel, request("a")))[-1].finish_reason == "length"

    asyncio.run(scenario())


def test_garbage_from_the_engine_is_a_loss(tmp_path: Path) -> None:
    async def scenario() -> None:
        with bound_socket(tmp_path) as (socket, address):
            async with EngineChannel(socket, make_core().info) as channel:
                server = EngineServer(address)
                server._socket.send(b"garbage")
                await until(lambda: channel.failure is not None)
                assert "cannot be read" in str(channel.failure)
                server.close()

    asyncio.run(scenario())


def test_an_engine_without_a_gateway_stops_waiting_when_it_is_told_to_stop(tmp_path: Path) -> None:
    with bound_socket(tmp_path) as (_, address):
        server = EngineServer(address, should_stop=lambda: True, poll_s=0.01)
        for _ in range(2 * channel_module.MAX_QUEUED_MESSAGES + 50):
            server.send(StepOutputs(outputs=()))
        server.close()
