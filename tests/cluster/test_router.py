"""Who gets a request, and what becomes of it when its rank is full or lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.engine.fakes import expected_answer, make_core
from tests.engine.test_channel import DEADLINE_S, engine, until
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats, add_stats
from whalepod.server.channel import EngineChannel
from whalepod.server.cluster.router import RankRouter, expected_tokens
from whalepod.server.engine.core import EngineCore
from whalepod.server.errors import EngineLost, GroupLost
from whalepod.server.messages import EngineInfo, Submit

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = replace(SHORT, max_tokens=300)
ENDLESS = replace(SHORT, max_tokens=3900)
"""Runs for many times as long as the router takes to look at its ranks again."""
PROMPT = (3, 1, 4, 1, 5)


def request(request_id: str, params: SamplingParams = SHORT, length: int = 5) -> Submit:
    prompt = (PROMPT * length)[:length]
    return Submit(request_id=request_id, prompt_token_ids=prompt, params=params)


class OpenChannel:
    """A channel that its owner has entered already."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)

    async def __aenter__(self) -> EngineChannel:
        return self._channel

    async def __aexit__(self, *_: object) -> None: ...


@dataclass
class FakeRanks:
    """A launcher whose ranks are fake engines in threads, none of which knows the others."""

    channels: list[EngineChannel]
    lost: dict[int, str] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    replacement: EngineChannel | None = None
    failure: str | None = None
    look_errors: list[Exception] = field(default_factory=list)
    start_errors: list[Exception] = field(default_factory=list)
    remove_errors: list[Exception] = field(default_factory=list)
    """What `why_lost`, `replace_rank` and `remove` raise before they do what they should."""
    all_lost: threading.Barrier | None = None
    """Where replacements wait for each other: each returns when all ranks are members."""

    @property
    def num_ranks(self) -> int:
        return len(self.channels)

    @property
    def info(self) -> EngineInfo:
        return self.channels[0].info

    def rank_channel(self, rank: int) -> OpenChannel:
        return OpenChannel(self.channels[rank])

    def why_lost(self, rank: int) -> str | None:
        if self.look_errors:
            raise self.look_errors.pop()
        return self.lost.get(rank)

    def where(self, rank: int) -> str:
        return "it is in combine of layer 3"

    def remove(self, rank: int, reason: str) -> None:
        if self.remove_errors:
            raise self.remove_errors.pop()
        self.removed.append(rank)

    def stop_replacing(self) -> None: ...

    def replace_rank(self, rank: int) -> None:
        if self.start_errors:
            raise self.start_errors.pop()
        if self.all_lost is not None:
            self.all_lost.wait(DEADLINE_S)
            del self.lost[rank]
            return
        if self.replacement is None:
            raise GroupLost(f"rank {rank} cannot be replaced: there is no other")
        del self.lost[rank]
        self.channels[rank] = self.replacement


@asynccontextmanager
async def routed(
    folder: Path, *cores: EngineCore
) -> AsyncIterator[tuple[RankRouter, FakeRanks, list[EngineCore]]]:
    folders = [folder / str(i) for i in range(len(cores))]
    for each in folders:
        each.mkdir()
    async with (
        engine(folders[0], cores[0]) as (first, _),
        engine(folders[1], cores[1]) as (other, _),
    ):
        ranks = FakeRanks([first, other])
        async with RankRouter(ranks) as router:  # type: ignore[arg-type]
            yield router, ranks, list(cores)


async def read(router: RankRouter, submit: Submit) -> list[SequenceOutput]:
    return [output async for output in router.submit(submit)]


def ids_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def run(
    tmp_path: Path,
    scenario: Callable[[RankRouter, FakeRanks, list[EngineCore]], object],
    *cores: EngineCore,
) -> None:
    async def body() -> None:
        async with asyncio.timeout(6 * DEADLINE_S):
            async with routed(tmp_path, *(cores or (make_core(), make_core()))) as parts:
                await scenario(*parts)  # type: ignore[misc]

    asyncio.run(body())


def roomy_cores() -> list[EngineCore]:
    """Two engines for one request at a time each, which may be `ENDLESS`."""
    return [make_core(max_num_seqs=1, max_model_len=4096) for _ in range(2)]


def test_equal_requests_go_to_the_ranks_in_turn(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, _: FakeRanks, cores: list[EngineCore]) -> None:
        for i in range(6):
            assert ids_of(await read(router, request(f"r{i}"))) == expected_answer([*PROMPT], SHORT)
        assert [core.stats.prompt_tokens for core in cores] == [15, 15]
        assert router.stats.prompt_tokens == 30
        assert (await router.ping(DEADLINE_S)).num_running == 0

    run(tmp_path, scenario)


def test_one_answer_is_aborted_on_the_rank_that_has_it(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, _: FakeRanks, cores: list[EngineCore]) -> None:
        two = replace(request("two", ENDLESS), num_sequences=2)
        other = asyncio.create_task(read(router, request("other", ENDLESS)))
        outputs = router.submit(two)
        await anext(outputs)
        await until(lambda: sum(core.stats.num_running for core in cores) == 3)
        router.abort_answer("two", 0)
        router.abort_answer("nobody", 0)
        await until(lambda: [core.stats.num_running for core in cores] == [1, 1])
        assert {(await anext(outputs)).index for _ in range(5)} == {1}
        await outputs.aclose()
        await until(lambda: sum(core.stats.num_running for core in cores) == 1)
        other.cancel()

    cores = [make_core(max_num_seqs=2, max_model_len=4096) for _ in range(2)]
    run(tmp_path, scenario, *cores)


def test_requests_are_balanced_by_tokens_not_by_number(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, _: FakeRanks, cores: list[EngineCore]) -> None:
        large = asyncio.create_task(read(router, request("large", LONG, length=200)))
        await until(lambda: router.stats.num_running == 1)
        small = [asyncio.create_task(read(router, request(f"s{i}", length=9))) for i in range(5)]
        await asyncio.gather(large, *small)
        assert sorted(core.stats.prompt_tokens for core in cores) == [45, 200]

    run(tmp_path, scenario)


def test_queued_requests_move_to_a_rank_that_becomes_free(tmp_path: Path) -> None:
    """The estimate was wrong: the rank with the small request is free long before the other."""

    async def scenario(router: RankRouter, _: FakeRanks, cores: list[EngineCore]) -> None:
        endless = asyncio.create_task(read(router, request("endless", ENDLESS, length=120)))
        await until(lambda: router.stats.num_running == 1)
        busy = 0 if cores[0].stats.num_running else 1
        router._ranks[1 - busy].num_tokens += 10_000  # the other seems full
        waiting = asyncio.create_task(read(router, request("waiting")))
        await until(lambda: cores[busy].stats.num_waiting == 1)
        router._ranks[1 - busy].num_tokens -= 10_000
        assert ids_of(await waiting) == expected_answer([*PROMPT], SHORT)
        assert not endless.done(), "it did not wait for the long one"
        assert cores[1 - busy].stats.generation_tokens == 6
        endless.cancel()

    run(tmp_path, scenario, *roomy_cores())


def test_a_rank_that_the_watch_has_not_missed_yet_is_not_tried_again(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, cores: list[EngineCore]) -> None:
        begun = router.submit(request("begun", ENDLESS))
        await anext(begun)
        number = 0 if cores[0].has_work else 1
        router._ranks[1 - number].num_tokens += 10_000
        waiting = asyncio.create_task(read(router, request("waiting")))
        await until(lambda: cores[number].stats.num_waiting == 1)
        ranks.channels[number].fail("the socket broke")  # the other is still the fuller one
        with pytest.raises(EngineLost):
            async for _ in begun:
                pass
        assert ids_of(await waiting) == expected_answer([*PROMPT], SHORT)

    run(tmp_path, scenario, *roomy_cores())


def test_what_a_lost_rank_had_not_begun_runs_elsewhere_and_what_it_had_begun_fails(
    tmp_path: Path,
) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, cores: list[EngineCore]) -> None:
        begun = router.submit(request("begun", ENDLESS))
        await anext(begun)
        number = 0 if cores[0].has_work else 1
        router._ranks[1 - number].num_tokens += 10_000
        waiting = asyncio.create_task(read(router, request("waiting")))
        await until(lambda: cores[number].stats.num_waiting == 1)
        router._ranks[1 - number].num_tokens -= 10_000
        ranks.lost[number] = "ended by SIGKILL"
        with pytest.raises(EngineLost, match=rf"rank {number} was lost: ended by SIGKILL"):
            async for _ in begun:
                pass
        assert ids_of(await waiting) == expected_answer([*PROMPT], SHORT)
        assert ranks.removed == [number]
        with pytest.raises(EngineLost, match=rf"rank {number} is lost: "):
            await router.ping(DEADLINE_S)
        await until(lambda: router.failure is not None)
        assert router.failure == f"rank {number} cannot be replaced: there is no other"

    run(tmp_path, scenario, *roomy_cores())


def test_A1_a_look_that_fails_once_is_repeated(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, cores: list[EngineCore]) -> None:
        ranks.look_errors = [OSError(24, "Too many open files") for _ in range(3)]
        await until(lambda: not ranks.look_errors)
        assert router.failure is None
        ranks.lost[1] = "ended by SIGKILL"
        await until(lambda: ranks.removed == [1])

    run(tmp_path, scenario, *roomy_cores())


def test_A7_a_replacement_that_fails_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalepod.server.retry_start.RETRY_S", 0.01)

    async def scenario(router: RankRouter, ranks: FakeRanks, cores: list[EngineCore]) -> None:
        new_folder = tmp_path / "new"
        new_folder.mkdir()
        async with engine(new_folder) as (channel, _):
            ranks.replacement = channel
            ranks.start_errors = [OSError(28, "No space left on device")]
            ranks.lost[1] = "ended by SIGKILL"
            await until(lambda: ranks.removed == [1] and not ranks.lost)
            await until(lambda: router._ranks[1].lost is None)
            assert router.failure is None

    run(tmp_path, scenario, *roomy_cores())


def test_A2_a_rank_that_could_not_be_removed_for_lack_of_space_is_removed_later(
    tmp_path: Path,
) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, _: list[EngineCore]) -> None:
        ranks.all_lost = threading.Barrier(1)
        ranks.remove_errors = [OSError(28, "No space left on device") for _ in range(3)]
        ranks.lost[1] = "ended by SIGKILL"
        await until(lambda: ranks.removed == [1])
        await until(lambda: not ranks.lost and not router._replacing)
        assert router.failure is None
        assert await read(router, request("a"))

    run(tmp_path, scenario)


def test_A8_all_ranks_can_be_lost_at_once(tmp_path: Path) -> None:
    """Each replacement ends when all ranks are members, so all must run at once."""

    async def scenario(router: RankRouter, ranks: FakeRanks, _: list[EngineCore]) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        ranks.all_lost = threading.Barrier(2)
        ranks.lost |= {0: "ended by SIGKILL", 1: "ended by SIGKILL"}
        await until(lambda: not ranks.lost and not router._replacing)
        assert router.failure is None

    run(tmp_path, scenario)


def test_A6_a_group_whose_folder_has_vanished_is_lost_for_good(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, _: list[EngineCore]) -> None:
        ranks.remove_errors = [GroupLost("/tmp/whalepod-1 has vanished")]
        ranks.lost[1] = "ended by SIGKILL"
        await until(lambda: router.failure is not None)
        assert router.failure == "/tmp/whalepod-1 has vanished"

    run(tmp_path, scenario)


def test_a_rank_that_came_back_gets_requests_again(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, cores: list[EngineCore]) -> None:
        new_folder = tmp_path / "new"
        new_folder.mkdir()
        async with engine(new_folder) as (channel, new_core):
            ranks.replacement, ranks.lost[0] = channel, "stopped"
            await until(lambda: bool(ranks.removed) and router._ranks[0].lost is None)
            assert (await router.ping(DEADLINE_S)).num_running == 0
            for i in range(4):
                await read(router, request(f"r{i}"))
            assert new_core.stats.prompt_tokens == cores[1].stats.prompt_tokens == 10
            assert router.failure is None

    run(tmp_path, scenario)


def test_an_unanswered_ping_says_which_rank_and_what_it_does(tmp_path: Path) -> None:
    async def scenario(router: RankRouter, ranks: FakeRanks, _: list[EngineCore]) -> None:
        ranks.channels[1].fail("the loop hangs")
        with pytest.raises(EngineLost, match=r"rank 1 .*in combine of layer 3.*the loop hangs"):
            await router._ping_rank(1, DEADLINE_S)

    run(tmp_path, scenario)


def test_counters_of_ranks_add_up() -> None:
    one = Stats(num_running=2, step_time_us=30, num_accepted_by_position=(3, 1))
    other = Stats(num_running=1, step_time_us=40, num_accepted_by_position=(4,))
    both = add_stats([one, other])
    assert both.num_running == 3
    assert both.step_time_us == 40
    assert both.num_accepted_by_position == (7, 1)
    assert expected_tokens(request("r", LONG)) == 5 + 256
