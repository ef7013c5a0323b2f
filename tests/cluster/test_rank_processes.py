"""Ranks in processes of their own: they answer as one engine does, and survive what they can."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engine.test_launch import cpu_seconds, is_alive
from tests.equality import assert_bit_equal
from whalepod.models.synthetic import synthesize
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.params import SamplingParams
from whalepod.server.cluster.launch import RankGroup
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import DeviceConfig, EngineConfig, ModelSource, ParallelConfig
from whalepod.server.engine.local import Engine, Generation
from whalepod.server.errors import EngineLost, RequestRejected, StartupError
from whalepod.server.messages import SequenceOutput, Submit
from whalepod.server.outputs import join_outputs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NUM_RANKS = 2
PATIENCE_S = 300.0
"""For what must come; two shared cores may be slow."""
DISPATCH_S = 3.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synthesize("v3-nano", tmp_path_factory.mktemp("models") / "nano", dtype="fp32"))


def config_of(folder: str, **parallel: float) -> EngineConfig:
    return EngineConfig(
        source=ModelSource(model=folder, dtype="fp32"),
        device=DeviceConfig(batch_invariant=True, num_threads=1, kv_cache_memory_bytes=8 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256),
        parallel=ParallelConfig(
            expert_parallel_size=NUM_RANKS,
            dispatch_timeout_s=DISPATCH_S,
            **{"rank_return_timeout_s": PATIENCE_S, **parallel},
        ),
    )


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def group(nano: str, sockets: Path) -> Iterator[RankGroup]:
    """A group of breakable ranks that must leave nothing behind."""
    before = set(os.listdir("/dev/shm"))
    with RankGroup(config_of(nano), module="tests.cluster.breakable_rank") as group:
        yield group
        pids = [group.process(rank).pid for rank in range(NUM_RANKS)]
    assert not any(is_alive(pid) for pid in pids)
    assert list(sockets.glob("whalepod-*")) == []
    assert set(os.listdir("/dev/shm")) <= before


def requests(count: int) -> list[Submit]:
    rng = random.Random(5)
    lengths = [rng.choice((3, 30, 64, 90)) for _ in range(count)]
    return [
        Submit(
            request_id=str(i),
            prompt_token_ids=tuple([rng.randrange(3, 500) for _ in range(length)]),
            params=GREEDY if i % 2 else replace(GREEDY, temperature=0.9, seed=i),
        )
        for i, length in enumerate(lengths)
    ]


def answers_of_one(folder: str, submits: list[Submit]) -> list[Generation]:
    with Engine(
        folder, dtype="fp32", batch_invariant=True, num_threads=1, max_model_len=256,
        enable_prefix_caching=False, speculation="off",
    ) as engine:  # fmt: skip
        return [engine.generate([s.prompt_token_ids], s.params)[0] for s in submits]


async def answer(router: RankRouter, submit: Submit) -> SequenceOutput:
    whole: SequenceOutput | None = None
    async for output in router.submit(submit):
        whole = join_outputs(whole, output) if whole else output
    assert whole is not None
    return whole


def check_equal(expected: Generation, found: SequenceOutput) -> None:
    assert_bit_equal(
        expected.token_ids,
        [p.logprob for p in expected.logprobs],
        found.token_ids,
        [p.logprob for p in found.logprobs],
        f"request {found.request_id}",
    )


async def until_ready(router: RankRouter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await router.ping(5.0)
            except EngineLost:
                await asyncio.sleep(0.1)
            else:
                return


@asynccontextmanager
async def routed(group: RankGroup) -> AsyncIterator[RankRouter]:
    async with asyncio.timeout(6 * PATIENCE_S), group.channel() as router:
        yield router


def test_ranks_answer_with_the_bits_of_one_engine_and_then_sleep(
    group: RankGroup, nano: str
) -> None:
    submits = requests(24)

    async def scenario() -> list[SequenceOutput]:
        async with routed(group) as router:
            found = await asyncio.gather(*(answer(router, submit) for submit in submits))
            shares = [stats.prompt_tokens for stats in router.rank_stats.values()]
            assert min(shares) > 0.3 * sum(shares), "both ranks have their share"
            await asyncio.sleep(1.0)  # they park
            pids = [group.process(rank).pid for rank in range(NUM_RANKS)]
            before = [cpu_seconds(pid) for pid in pids]
            await asyncio.sleep(5.0)  # the interval that is measured
            used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
            assert max(used) < 0.05, "1 % of the interval"
            return found

    found = asyncio.run(scenario())
    for expected, one in zip(answers_of_one(nano, submits), found, strict=True):
        check_equal(expected, one)
    own = [info.expert_bytes for info in group.infos]
    assert own[0] == own[1]
    with Engine(nano, dtype="fp32", batch_invariant=True, num_threads=1) as whole:
        assert sum(own) == whole._core.info.expert_bytes


@dataclass(frozen=True)
class Mishap:
    rank: int
    place: str
    action: str

    def cause(self, group: RankGroup) -> None:
        (group._folder / "mishap").write_text(f"{self.rank}|{self.place}|{self.action}")

    def has_happened(self, group: RankGroup) -> bool:
        return not (group._folder / "mishap").exists()


PLACES = ["dispatch, sending", "dispatch, receiving", "combine", "gather of records"]
QUICK = [
    Mishap(1, "dispatch, receiving", "SIGKILL"),
    Mishap(0, "combine", "SIGKILL"),
    Mishap(0, "dispatch, sending", "SIGSTOP"),
    Mishap(1, "gather of records", "SIGKILL"),
    Mishap(1, "experts", "raise"),
]
ALL = [
    Mishap(rank, place, action)
    for action in ("SIGKILL", "SIGSTOP", "raise")
    for rank in range(NUM_RANKS)
    for place in PLACES
]


async def survive(
    router: RankRouter, group: RankGroup, mishap: Mishap, submits: list[Submit]
) -> list[SequenceOutput | None]:
    """Break a rank under load; return the answers, None where a clear error came instead."""

    reasons: list[str] = []

    async def ask(submit: Submit) -> SequenceOutput | None:
        try:
            return await answer(router, submit)
        except EngineLost as error:
            reasons.append(str(error))
            return None

    asked = [asyncio.create_task(ask(submit)) for submit in submits]
    await asyncio.sleep(0.3)  # some have begun
    mishap.cause(group)
    found = await asyncio.gather(*asked)
    if not mishap.has_happened(group):  # all were done before: the next ones meet it
        found = await asyncio.gather(*(ask(submit) for submit in submits))
    assert mishap.has_happened(group)
    assert all(f"rank {mishap.rank} was lost" in reason for reason in reasons), reasons
    return list(found)


@pytest.mark.parametrize(
    "mishaps", [QUICK, pytest.param(ALL, marks=pytest.mark.long)], ids=["quick", "all"]
)
def test_whatever_happens_to_a_rank_no_answer_is_wrong_and_the_group_comes_back(
    group: RankGroup, nano: str, mishaps: list[Mishap]
) -> None:
    submits = requests(10)
    expected = answers_of_one(nano, submits)

    async def scenario() -> None:
        async with routed(group) as router:
            for number, mishap in enumerate(mishaps):
                named = [replace(s, request_id=f"{number}-{s.request_id}") for s in submits]
                pids = [group.process(rank).pid for rank in range(NUM_RANKS)]
                found = await survive(router, group, mishap, named)
                for one, wanted in zip(found, expected, strict=True):
                    if one is not None:
                        check_equal(wanted, one)
                assert any(found), mishap
                await until_ready(router)
                after = [group.process(rank).pid for rank in range(NUM_RANKS)]
                assert after[1 - mishap.rank] == pids[1 - mishap.rank], "the survivor lives on"
                assert (after[mishap.rank] == pids[mishap.rank]) == (mishap.action == "raise")
                if mishap.action == "raise":
                    assert all(found), "a bug that does not come again fails nobody"
            again = await asyncio.gather(*(answer(router, submit) for submit in submits))
            for one, wanted in zip(again, expected, strict=True):
                check_equal(wanted, one)

    asyncio.run(scenario())


def test_a_rank_killed_while_all_sleep_is_back_before_anyone_asks(group: RankGroup) -> None:
    async def scenario() -> None:
        async with routed(group) as router:
            await until_ready(router)
            os.kill(group.process(1).pid, signal.SIGKILL)
            await asyncio.sleep(0.5)
            with pytest.raises(EngineLost, match=r"rank 1 .*SIGKILL"):
                await router.ping(5.0)
            assert router.info.num_ranks == NUM_RANKS
            await until_ready(router)
            assert (await answer(router, requests(1)[0])).token_ids

    asyncio.run(scenario())


def test_requests_wait_for_a_lost_rank_only_for_their_time(
    nano: str, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text is computed without its experts; the refusal says which rank is missing."""
    has_refused = threading.Event()

    async def scenario(group: RankGroup) -> None:
        monkeypatch.setattr(group, "replace_rank", lambda rank: has_refused.wait(PATIENCE_S))
        async with routed(group) as router:
            os.kill(group.process(0).pid, signal.SIGKILL)
            started = time.monotonic()
            refusal: RequestRejected | None = None
            while refusal is None:
                assert time.monotonic() - started < PATIENCE_S
                one = replace(requests(1)[0], request_id=str(time.monotonic()))
                try:
                    await answer(router, one)
                except RequestRejected as error:
                    refusal = error
                except EngineLost:
                    await asyncio.sleep(0.01)  # it was sent to the dead rank
            assert refusal.code == "engine_lost"
            assert "rank 0 of the group is gone" in refusal.message
            has_refused.set()

    with RankGroup(config_of(nano, rank_return_timeout_s=1.0)) as group:
        asyncio.run(scenario(group))


def test_a_group_that_cannot_start_says_which_rank_and_why(sockets: Path, nano: str) -> None:
    config = config_of(nano)
    config = replace(config, parallel=replace(config.parallel, expert_parallel_size=3))
    words = r"rank \d: .*3 does not divide the model's 8 experts"
    with pytest.raises(StartupError, match=words), RankGroup(config):
        pass
    assert list(sockets.glob("whalepod-*")) == []
