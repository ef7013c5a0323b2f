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
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.cluster.counted_rank import Sent, read_sent
from tests.engine.test_launch import cpu_seconds, is_alive
from tests.equality import assert_bit_equal
from whalepod.models.synthetic import synthesize
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server.cluster.rank_group import RankGroup
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import DeviceConfig, EngineConfig, ModelSource, ParallelConfig
from whalepod.server.engine.local import Engine, Generation
from whalepod.server.errors import EngineLost, StartupError
from whalepod.server.messages import Submit

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
    with breakable_group(config_of(nano), sockets) as group:
        yield group


@contextmanager
def breakable_group(config: EngineConfig, sockets: Path) -> Iterator[RankGroup]:
    """Start ranks that break when they are told to, and that must leave nothing behind."""
    before = set(os.listdir("/dev/shm"))
    with RankGroup(config, module="tests.cluster.breakable_rank") as group:
        yield group
        pids = [group.pid(rank) for rank in range(NUM_RANKS)]
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
        whole = whole.join(output) if whole else output
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
            pids = [group.pid(rank) for rank in range(NUM_RANKS)]
            before = [cpu_seconds(pid) for pid in pids]
            await asyncio.sleep(2.0)  # the interval that is measured
            used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
            assert max(used) < 0.02, "1 % of the interval"
            return found

    found = asyncio.run(scenario())
    for expected, one in zip(answers_of_one(nano, submits), found, strict=True):
        check_equal(expected, one)
    own = [info.expert_bytes for info in group.infos]
    assert own[0] == own[1]
    with Engine(nano, dtype="fp32", batch_invariant=True, num_threads=1) as whole:
        assert sum(own) == whole._core.info.expert_bytes


@pytest.mark.parametrize(
    ("is_exact", "bulk"), [(True, "packed"), (False, "per_token")], ids=["exact", "fast"]
)
def test_a_dispatch_sends_exactly_the_bytes_that_the_layout_predicts(
    nano: str, sockets: Path, is_exact: bool, bulk: str
) -> None:
    config = config_of(nano)
    config = replace(config, device=replace(config.device, batch_invariant=is_exact))
    submits = requests(12)

    async def scenario(group: RankGroup) -> list[list[Sent]]:
        async with routed(group) as router:
            await asyncio.gather(*(answer(router, submit) for submit in submits))
            return [read_sent(group.folder, rank) for rank in range(NUM_RANKS)]

    with RankGroup(config, module="tests.cluster.counted_rank") as group:
        by_rank = asyncio.run(scenario(group))
    assert len(by_rank[0]) == len(by_rank[1]), "all ranks dispatch in the same layers"
    for sent in by_rank:
        assert {one.mode for one in sent} == {"packed", bulk}
        assert [one.sent for one in sent] == [one.predicted for one in sent]
        for rank in range(NUM_RANKS):
            assert sum(one.sent[rank] for one in sent) > 0, f"nothing went to rank {rank}"
    # more than a decode step: those went through the mode for many tokens
    assert max(one.num_tokens for one in by_rank[0] if one.mode == bulk) > 32


@dataclass(frozen=True)
class Mishap:
    rank: int
    place: str
    action: str

    def cause(self, group: RankGroup) -> None:
        written = group.folder / "mishap.new"
        written.write_text(f"{self.rank}|{self.place}|{self.action}")
        written.rename(group.folder / "mishap")  # ranks see all of it

    def has_happened(self, group: RankGroup) -> bool:
        return not (group.folder / "mishap").exists()


PLACES = ["dispatch, sending", "dispatch, receiving", "combine", "gather of records"]
QUICK = [
    Mishap(1, "dispatch, receiving", "SIGKILL"),
    Mishap(0, "combine", "SIGKILL"),
    Mishap(0, "dispatch, sending", "SIGSTOP"),
    Mishap(1, "gather of records", "SIGKILL"),
    Mishap(1, "experts", "raise"),
]


def everywhere(action: str, places: list[str]) -> list[Mishap]:
    return [Mishap(rank, place, action) for rank in range(NUM_RANKS) for place in places]


IN_A_STEP = [*PLACES[:3], "experts"]
ALL = {
    "kill": everywhere("SIGKILL", PLACES),  # four losses of a rank: one more is allowed
    "stop": everywhere("SIGSTOP", PLACES),
    "raise": everywhere("raise", IN_A_STEP),
}


async def survive(
    router: RankRouter, group: RankGroup, mishap: Mishap, submits: list[Submit]
) -> list[SequenceOutput | None]:
    """Break a rank under load; return the answers, None where a clear error came instead."""
    asked = asyncio.create_task(ask_all(router, submits, mishap.rank))
    await asyncio.sleep(0.3)  # some have begun
    mishap.cause(group)
    found = await asked
    if not mishap.has_happened(group):  # all were done before: the next ones meet it
        found = await ask_all(router, submits, mishap.rank)
    assert mishap.has_happened(group)
    return found


async def ask_all(
    router: RankRouter, submits: list[Submit], lost: int
) -> list[SequenceOutput | None]:
    """Return the answers, None where a clear error says that the rank `lost` was lost."""
    reasons: list[str] = []

    async def ask(submit: Submit) -> SequenceOutput | None:
        try:
            return await answer(router, submit)
        except EngineLost as error:
            reasons.append(str(error))
            return None

    found = await asyncio.gather(*(ask(submit) for submit in submits))
    assert all(f"rank {lost} was lost" in reason for reason in reasons), reasons
    return list(found)


@pytest.mark.parametrize(
    "mishaps",
    [QUICK, *(pytest.param(mishaps, marks=pytest.mark.long) for mishaps in ALL.values())],
    ids=["quick", *ALL],
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
                pids = [group.pid(rank) for rank in range(NUM_RANKS)]
                found = await survive(router, group, mishap, named)
                for one, wanted in zip(found, expected, strict=True):
                    if one is not None:
                        check_equal(wanted, one)
                assert any(found), mishap
                await until_ready(router)
                after = [group.pid(rank) for rank in range(NUM_RANKS)]
                assert after[1 - mishap.rank] == pids[1 - mishap.rank], "the survivor lives on"
                assert (after[mishap.rank] == pids[mishap.rank]) == (mishap.action == "raise")
                if mishap.action == "raise":
                    assert all(found), "a bug that does not come again fails nobody"
            again = await asyncio.gather(*(answer(router, submit) for submit in submits))
            for one, wanted in zip(again, expected, strict=True):
                check_equal(wanted, one)

    asyncio.run(scenario())


@pytest.mark.long
def test_ranks_that_sum_their_own_experts_survive_mishaps_too(nano: str, sockets: Path) -> None:
    """The throughput mode. Its sums are rounded differently, so first tokens are compared, by
    their log-probabilities: those of a text that lacks an expert are far off."""
    submits = requests(10)
    expected = answers_of_one(nano, submits)
    config = config_of(nano)
    config = replace(config, device=replace(config.device, batch_invariant=False))
    mishaps = [
        Mishap(rank, place, action)
        for action in ("SIGKILL", "SIGSTOP", "raise")
        for rank, place in ((0, "dispatch, sending"), (1, "combine"))
    ]

    async def scenario(group: RankGroup) -> None:
        async with routed(group) as router:
            for number, mishap in enumerate(mishaps):
                named = [replace(s, request_id=f"{number}-{s.request_id}") for s in submits]
                found = await survive(router, group, mishap, named)
                assert any(found), mishap
                for one, wanted in zip(found, expected, strict=True):
                    if one is not None:
                        check_near(wanted, one)
                await until_ready(router)

    with breakable_group(config, sockets) as group:
        asyncio.run(scenario(group))


def check_near(expected: Generation, found: SequenceOutput) -> None:
    assert len(found.token_ids) == len(expected.token_ids), found
    if found.token_ids[0] == expected.token_ids[0]:  # else two were nearly equally likely
        difference = found.logprobs[0].logprob - expected.logprobs[0].logprob
        assert abs(difference) < 1e-3, (found.request_id, difference)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_stopped_for_ten_seconds_is_waited_for_and_no_request_fails(
    group: RankGroup, nano: str, place: str
) -> None:
    """Longer than the deadlines of dispatch and combine, and shorter than that of the gather."""
    submits = requests(10)
    expected = answers_of_one(nano, submits)

    async def scenario() -> None:
        async with routed(group) as router:
            for rank in range(NUM_RANKS):
                pids = [group.pid(r) for r in range(NUM_RANKS)]
                named = [replace(s, request_id=f"{rank}-{s.request_id}") for s in submits]
                asked = [asyncio.create_task(answer(router, submit)) for submit in named]
                mishap = Mishap(rank, place, "SIGSTOP")
                mishap.cause(group)
                async with asyncio.timeout(PATIENCE_S):
                    while not mishap.has_happened(group):
                        await asyncio.sleep(0.02)
                await asyncio.sleep(10.0)  # the stop itself
                os.kill(pids[rank], signal.SIGCONT)
                for one, wanted in zip(await asyncio.gather(*asked), expected, strict=True):
                    check_equal(wanted, one)
                assert [group.pid(r) for r in range(NUM_RANKS)] == pids, "no rank was lost"

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_stopped_while_all_sleep_is_replaced_when_somebody_asks(
    group: RankGroup, nano: str, rank: int
) -> None:
    submits = requests(4)
    expected = answers_of_one(nano, submits)

    async def scenario() -> None:
        async with routed(group) as router:
            await until_ready(router)
            stopped = group.pid(rank)
            os.kill(stopped, signal.SIGSTOP)
            found = await ask_all(router, submits, rank)
            assert any(found), "those of the other rank wait for the new one"
            for one, wanted in zip(found, expected, strict=True):
                if one is not None:
                    check_equal(wanted, one)
            await until_ready(router)
            assert group.pid(rank) != stopped
            assert not is_alive(stopped)

    asyncio.run(scenario())


def test_a_rank_killed_while_all_sleep_is_back_before_anyone_asks(group: RankGroup) -> None:
    async def scenario() -> None:
        async with routed(group) as router:
            await until_ready(router)
            os.kill(group.pid(1), signal.SIGKILL)
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
            os.kill(group.pid(0), signal.SIGKILL)
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
