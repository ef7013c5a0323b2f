"""Ranks in processes of their own whose experts move, and that do without a lost rank."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.test_rank_processes import (
    PATIENCE_S,
    Mishap,
    answer,
    answers_of_one,
    ask_all,
    check_equal,
    check_near,
    config_of,
    nano as nano,
    requests,
    routed,
    sockets as sockets,
    until_ready,
)
from whalepod.ep_comm.eplb.trace import read_trace
from whalepod.server.cluster.rank_group import RankGroup
from whalepod.server.cluster.router import RankRouter
from whalepod.server.config import EngineConfig, EplbConfig
from whalepod.server.messages import Experts

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NUM_RANKS = 4


def config_of_balanced(folder: str) -> EngineConfig:
    config = config_of(folder)
    return replace(
        config,
        parallel=replace(config.parallel, expert_parallel_size=NUM_RANKS),
        eplb=EplbConfig(
            enable_eplb=True, num_redundant_experts=4, eplb_interval_steps=10,
            eplb_window_steps=40, eplb_min_gain=0.0, eplb_step_bytes=1 << 16,
        ),
    )  # fmt: skip


@pytest.fixture
def group(nano: str, sockets: Path) -> Iterator[RankGroup]:
    config = config_of_balanced(nano)
    eplb = replace(config.eplb, eplb_trace=str(sockets / "loads.eplb"))
    with RankGroup(replace(config, eplb=eplb)) as group:
        yield group


def experts_of(router: RankRouter) -> Experts:
    found = router.experts
    assert found is not None
    return found


def test_answers_have_the_bits_of_one_engine_while_experts_move(
    group: RankGroup, nano: str, sockets: Path
) -> None:
    submits = requests(32)

    async def scenario() -> None:
        async with routed(group) as router:
            expected, num_changed, num_slots = answers_of_one(nano, submits), 0, 36
            async with asyncio.timeout(PATIENCE_S):
                while num_changed < num_slots // 4:
                    found = await asyncio.gather(*(answer(router, submit) for submit in submits))
                    for wanted, one in zip(expected, found, strict=True):
                        check_equal(wanted, one)
                    stats = await router.ping(PATIENCE_S)
                    num_changed = stats.num_expert_slots_changed
            experts = experts_of(router)
            assert sum(map(len, experts.slots)) == num_slots
            assert stats.num_expert_failures == 0
            assert 0.5 < stats.expert_balance_ppm / 1e6 <= 1
            assert [len(row) for row in experts.slots] == [12] * len(experts.tokens)
            (trace,) = sockets.glob("loads.eplb")
            recorded = list(read_trace(trace))
            assert [r.loads_LE.shape for r in recorded] == [(len(experts.slots), 8)] * len(recorded)
            assert any((np.array(experts.tokens) == r.loads_LE).all() for r in recorded)
            assert 0 < stats.num_expert_plans <= len(recorded)
            # asked for by a person: everything in its first place again
            first = tuple(tuple(i % 8 for i in range(12)) for _ in experts.slots)
            router.place_experts(first)
            async with asyncio.timeout(PATIENCE_S):
                while not any(changes for _, _, _, changes in experts_of(router).plans[-1:]):
                    await asyncio.gather(*(answer(router, submit) for submit in submits[:4]))

    asyncio.run(scenario())


def test_item_60_the_others_serve_on_without_a_killed_rank_and_take_it_back(
    group: RankGroup, nano: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request of the others fails, and those that come while it is gone are answered."""
    submits, victim = requests(12), 3
    expected = answers_of_one(nano, submits)
    may_return, really_replace = threading.Event(), group.replace_rank

    def replace_later(rank: int) -> None:
        assert may_return.wait(PATIENCE_S)
        really_replace(rank)

    async def scenario() -> None:
        monkeypatch.setattr(group, "replace_rank", replace_later)
        async with routed(group) as router:
            asked = asyncio.create_task(ask_all(router, submits, victim))
            await asyncio.sleep(0.3)  # some have begun
            os.kill(group.pid(victim), signal.SIGKILL)
            killed_s = time.monotonic()
            for one, wanted in zip(await asked, expected, strict=True):
                if one is not None:
                    check_equal(wanted, one)
            named = [replace(s, request_id=f"again-{s.request_id}") for s in submits]
            first = await answer(router, named[0])
            print(f"served again {time.monotonic() - killed_s:.2f} s after the kill")
            check_equal(expected[0], first)
            found = await asyncio.gather(*(answer(router, submit) for submit in named[1:]))
            for one, wanted in zip(found, expected[1:], strict=True):
                check_equal(wanted, one)
            assert all(row[9:] == (-1, -1, -1) for row in experts_of(router).slots)
            assert all(set(row[:9]) == set(range(8)) for row in experts_of(router).slots)
            may_return.set()
            await until_ready(router)
            last = [replace(s, request_id=f"last-{s.request_id}") for s in submits]
            found = await asyncio.gather(*(answer(router, submit) for submit in last))
            for one, wanted in zip(found, expected, strict=True):
                check_equal(wanted, one)
            assert all(min(row) >= 0 for row in experts_of(router).slots)

    asyncio.run(scenario())


@pytest.mark.parametrize("action", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_a_rank_that_breaks_while_experts_move_costs_no_answer_of_the_others(
    nano: str, sockets: Path, action: str
) -> None:
    submits = requests(12)
    expected = answers_of_one(nano, submits)
    mishaps = [Mishap(1, "copy", action), Mishap(2, "swap", action)]
    mishaps += [Mishap(0, "gather of loads", action)]

    async def scenario(group: RankGroup) -> None:
        async with routed(group) as router:
            for number, mishap in enumerate(mishaps):
                mishap.cause(group)
                for turn in range(50):
                    named = [
                        replace(s, request_id=f"{number}-{turn}-{s.request_id}") for s in submits
                    ]
                    found = await ask_all(router, named, mishap.rank)
                    for one, wanted in zip(found, expected, strict=True):
                        if one is not None:
                            check_equal(wanted, one)
                    assert any(found)
                    if mishap.has_happened(group):
                        break
                assert mishap.has_happened(group), mishap
                await until_ready(router)
            again = await asyncio.gather(*(answer(router, submit) for submit in submits))
            for one, wanted in zip(again, expected, strict=True):
                check_equal(wanted, one)

    with RankGroup(config_of_balanced(nano), module="tests.cluster.breakable_rank") as group:
        asyncio.run(scenario(group))


@pytest.mark.long
def test_ranks_that_sum_their_own_experts_do_without_a_lost_one_too(
    nano: str, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The throughput mode, whose sums are rounded differently: first tokens are compared."""
    submits, victim = requests(12), 1
    expected = answers_of_one(nano, submits)
    config = config_of_balanced(nano)
    config = replace(config, device=replace(config.device, batch_invariant=False))

    async def scenario(group: RankGroup) -> None:
        try:
            await serve_without(group)
        finally:
            is_done.set()  # else the thread that waits for it keeps the loop open

    async def serve_without(group: RankGroup) -> None:
        monkeypatch.setattr(group, "replace_rank", lambda rank: is_done.wait(PATIENCE_S))
        async with routed(group) as router:
            await asyncio.gather(*(answer(router, submit) for submit in submits))
            os.kill(group.pid(victim), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while router._ranks[victim].lost is None:
                    await asyncio.sleep(0.05)
            named = [replace(s, request_id=f"again-{s.request_id}") for s in submits]
            found = await asyncio.gather(*(answer(router, submit) for submit in named))
            for one, wanted in zip(found, expected, strict=True):
                check_near(wanted, one)
            assert all(row[3:6] == (-1, -1, -1) for row in experts_of(router).slots)

    is_done = threading.Event()
    with RankGroup(config) as group:
        asyncio.run(scenario(group))
