"""Experts that move while requests run change no bit of any answer (rule A)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cluster.ranks import Rank, Settings, run_group, shape_of
from tests.cluster.test_rank_equality import assert_equal_answers, lone_answers, mixed_requests
from whalepod.ep_comm.eplb.balancer import ExpertBalancer
from whalepod.ep_comm.eplb.config import BalancerConfig, ReplicaChoice
from whalepod.ep_comm.eplb.reports import Phase
from whalepod.ep_comm.transport.loopback import results_of
from whalepod.scheduler.params import SamplingParams
from whalepod.server.messages import Submit, ToEngine

NUM_RANKS = 4


def balancer_of(rank: Rank) -> ExpertBalancer:
    balancer = rank.dispatcher.balancer
    assert balancer is not None
    return balancer


def settings(choice: ReplicaChoice = "least-loaded", **changes: int) -> Settings:
    config = BalancerConfig(
        window_steps=changes.pop("window", 40),
        interval_steps=changes.pop("interval", 10),
        min_gain=0.0,
        step_bytes=changes.pop("step_bytes", 40_000),
        choice=choice,
    )
    return Settings(num_blocks=6, balancing=config, num_redundant=4, **changes)


def deal(requests: Sequence[Submit], num_turns: int = 0) -> Sequence[ToEngine]:
    """Return a script: each rank gets its share, one request a turn."""

    def script(rank: Rank) -> Sequence[ToEngine]:
        mine = [r for i, r in enumerate(requests) if i % NUM_RANKS == rank.transport.rank]
        turn = rank.num_turns - 10
        if turn < 0:
            return ()
        if turn >= max(len(mine), num_turns):
            raise StopIteration
        return mine[turn : turn + 1]

    return script


def assert_slots_hold_their_experts(ranks: Sequence[Rank]) -> None:
    """Compare the bytes of every slot with those that a rank reads from the checkpoint."""
    for rank in ranks:
        balancer = balancer_of(rank)
        mine = balancer.slots.of_rank(rank.transport.rank)
        assert (balancer.contents_LP == balancer_of(ranks[0]).contents_LP).all()
        for layer in balancer.layers:
            for slot, expert in enumerate(balancer.contents_LP[layer.index, mine].tolist()):
                wanted = balancer.read_expert(layer.index, expert)
                assert torch.equal(layer.content.read(slot), wanted), (layer.index, slot, expert)


@pytest.mark.parametrize("choice", ["nearest", "hashed", "least-loaded"])
def test_item_55_answers_have_the_bits_of_one_rank_while_experts_move(
    choice: ReplicaChoice,
) -> None:
    requests = mixed_requests(24, shape_of(False).config.vocab_size)
    given = settings(choice)
    ranks = results_of(run_group(NUM_RANKS, given, deal(requests)))
    assert_equal_answers(lone_answers(given, requests), ranks)
    assert all(balancer_of(r).stats.num_failures == 0 for r in ranks)
    num_changed = sum(balancer_of(r).stats.num_slots_changed for r in ranks)
    assert num_changed >= balancer_of(ranks[0]).contents_LP.size // 4
    assert 0 < max(balancer_of(r).stats.most_step_bytes for r in ranks) <= 40_000
    assert_slots_hold_their_experts(ranks)
    assert np.unique([balancer_of(r).stats.num_plans for r in ranks]).size == 1


class Dies(BaseException):
    """A rank ends, and tells no one."""


def is_at(phase: Phase) -> Callable[[ExpertBalancer], bool]:
    return lambda balancer: balancer.report().phase == phase


DEATHS: dict[str, Callable[[ExpertBalancer], bool]] = {
    "before anything moves": lambda balancer: balancer.recorder.loads().sum() > 0,
    "while it copies": is_at(Phase.MOVING),
    "when all is copied": is_at(Phase.STAGED),
    "while it swaps": is_at(Phase.STAGED),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("num_redundant", [8, 4])
def test_a_rank_that_dies_takes_no_expert_with_it(death: str, num_redundant: int) -> None:
    """With 8 spare slots on 4 ranks, three hold all 8 experts, from replicas or read again; with 4
    the 9 slots do as well, and most experts have no replica."""
    submits = mixed_requests(24, shape_of(False).config.vocab_size)
    given = replace(settings(interval=3), num_redundant=num_redundant)
    deal_all, victim = deal(submits), 2

    def script(rank: Rank) -> Sequence[ToEngine]:
        balancer = balancer_of(rank)
        if rank.transport.rank == victim and rank.num_turns > 3 and DEATHS[death](balancer):
            if death != "while it swaps":
                raise Dies
            assert balancer.move is not None
            balancer.move.commit = dying  # type: ignore[method-assign]
        return deal_all(rank)

    def dying() -> None:
        raise Dies

    results = run_group(NUM_RANKS, given, script, dead={victim}, max_turns=20_000)
    assert isinstance(results[victim], RuntimeError), results[victim]
    ranks = [rank for rank in results if isinstance(rank, Rank)]
    assert len(ranks) == NUM_RANKS - 1, results
    theirs = {s.request_id for i, s in enumerate(submits) if i % NUM_RANKS != victim}
    found = {key[0] for rank in ranks for key in rank.answers}
    assert found == theirs
    assert not any(rank.refused for rank in ranks)
    expected = {k: v for k, v in lone_answers(given, submits).items() if k in theirs}
    assert_equal_answers(expected, ranks)
    contents_LP = balancer_of(ranks[0]).contents_LP
    assert (contents_LP[:, balancer_of(ranks[0]).slots.of_rank(victim)] == -1).all()
    assert_slots_hold_their_experts(ranks)
    num_loaded = sum(balancer_of(rank).stats.num_loaded for rank in ranks)
    if num_redundant == 4 and death == "before anything moves":
        assert num_loaded > 0


def test_a_group_with_too_few_slots_left_waits_for_its_rank() -> None:
    submits = mixed_requests(6, shape_of(False).config.vocab_size)
    given = replace(settings(), num_redundant=0, return_timeout_s=30.0)

    def script(rank: Rank) -> Sequence[ToEngine]:
        if rank.num_turns == 20:
            if rank.transport.rank == 3:
                raise Dies
            return [s for i, s in enumerate(submits) if i % NUM_RANKS == rank.transport.rank]
        if rank.num_turns > 20 and rank.engine.may_sleep and not rank.core.has_work:
            raise StopIteration
        return ()

    results = run_group(NUM_RANKS, given, script, dead={3}, max_turns=30_000)
    for rank in results[:3]:
        assert isinstance(rank, Rank), rank
        assert not balancer_of(rank).serves
        assert {r.code for r in rank.refused.values()} <= {"engine_lost"}
        ended = {key[0] for key, answer in rank.answers.items() if answer.finish_reason}
        mine = {s.request_id for i, s in enumerate(submits) if i % NUM_RANKS == rank.transport.rank}
        assert ended.isdisjoint(rank.refused)
        assert ended | rank.refused.keys() == mine
    assert any(rank.refused for rank in results[:3] if isinstance(rank, Rank))


@pytest.mark.parametrize("mishap", ["raises", "is damaged"])
def test_a_move_that_goes_wrong_is_forgotten_by_all_and_made_again(mishap: str) -> None:
    submits = mixed_requests(24, shape_of(False).config.vocab_size)
    given, done = settings(interval=5), []

    def script(rank: Rank) -> Sequence[ToEngine]:
        move = balancer_of(rank).move
        if not done and move is not None and not move.is_staged:
            if mishap == "raises":
                move.run = raising  # type: ignore[method-assign]
                done.append(mishap)
            else:
                staging = balancer_of(rank).regions.staging.data.view(rank.transport.heap)
                staging.bitwise_xor_(1)
                done.extend([mishap] * balancer_of(rank).stats.num_failures)
        return deal(submits)(rank)

    def raising() -> None:
        raise RuntimeError("a bug")

    ranks = results_of(run_group(NUM_RANKS, given, script))
    assert_equal_answers(lone_answers(given, submits), ranks)
    assert done
    failures = {balancer_of(rank).stats.num_failures for rank in ranks}
    assert failures == {1}
    assert balancer_of(ranks[0]).stats.num_swaps > 0
    assert_slots_hold_their_experts(ranks)


def shifting_requests(num_requests: int, vocab_size: int) -> list[Submit]:
    """Return requests whose prompts come from another part of the vocabulary every 16 requests."""
    rng, requests, first = random.Random(9), [], 0
    for i in range(num_requests):
        if i % 16 == 0:
            first = rng.randrange(3, vocab_size - 8)
        prompt = [first + rng.randrange(8) for _ in range(rng.choice((3, 20, 60)))]
        params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
        if i % 3 == 0:
            params = replace(params, temperature=0.9, seed=i)
        requests.append(Submit(request_id=str(i), prompt_token_ids=tuple(prompt), params=params))
    return requests


@pytest.mark.long
def test_two_thousand_steps_of_shifting_load_have_the_bits_of_one_rank() -> None:
    """Experts are placed every 50 steps, and a quarter of all slots at least changes."""
    requests = shifting_requests(480, shape_of(False).config.vocab_size)
    given = replace(settings(interval=50), num_blocks=8, new_depth=None, max_num_seqs=3)

    def script(rank: Rank) -> Sequence[ToEngine]:
        mine = [r for i, r in enumerate(requests) if i % NUM_RANKS == rank.transport.rank]
        turn = rank.num_turns - 10
        if turn < 0 or turn % 18:
            return ()
        if turn // 18 >= len(mine):
            raise StopIteration
        return [mine[turn // 18]]

    ranks = results_of(run_group(NUM_RANKS, given, script, max_turns=20_000))
    assert_equal_answers(lone_answers(given, requests), ranks)
    balancer, steps = balancer_of(ranks[0]), len(ranks[0].dispatcher.log)
    num_changed = sum(balancer_of(rank).stats.num_slots_changed for rank in ranks)
    plans = balancer.stats.plans
    print(
        f"{steps} steps, {balancer.stats.num_plans} plans, {num_changed} slots changed of "
        f"{balancer.contents_LP.size}; balancedness {np.mean([p.before for p in plans]):.3f} -> "
        f"{np.mean([p.after for p in plans]):.3f}; most bytes in a step "
        f"{max(balancer_of(rank).stats.most_step_bytes for rank in ranks)}"
    )
    assert steps >= 2000
    assert balancer.stats.num_plans >= 30
    assert num_changed >= balancer.contents_LP.size // 4
    assert max(balancer_of(rank).stats.most_step_bytes for rank in ranks) <= 40_000
    assert max(balancer_of(rank).stats.most_swapped for rank in ranks) == 1  # 24 KiB
    assert sum(balancer_of(rank).stats.num_failures for rank in ranks) == 0
    assert_slots_hold_their_experts(ranks)
