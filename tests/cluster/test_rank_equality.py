"""Requests spread over ranks have the bits of one rank that runs them alone (rule A)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.cluster.ranks import Rank, Settings, alone, run_group, shape_of
from tests.engine.fakes import collect
from tests.equality import assert_bit_equal
from whalepod.ep_comm.all_gather import NUMBERS_PER_EPOCH
from whalepod.ep_comm.group import COUNT_BITS, signal_value
from whalepod.ep_comm.slots import TransferId
from whalepod.ep_comm.transport.loopback import results_of
from whalepod.mtp.depth import AdaptiveDepth
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server.cluster import group_member
from whalepod.server.cluster.membership_store import FolderStore, StaticMembership
from whalepod.server.messages import Abort, Submit, ToEngine

GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)


def mixed_requests(num_requests: int, vocab_size: int, seed: int = 3) -> list[Submit]:
    """Return greedy and sampled requests of many lengths, some of which share prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(70)]
    requests = []
    for i in range(num_requests):
        own = [rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 5, 56, 60, 62, 90)))]
        prompt = (shared[: rng.choice((0, 0, 0, 64, 70))] + own)[:150]
        params = replace(GREEDY if i % 2 else SAMPLED, max_tokens=rng.choice((1, 4, 12, 16)))
        if i % 2 == 0:
            params = replace(params, seed=i)
        requests.append(Submit(request_id=str(i), prompt_token_ids=tuple(prompt), params=params))
    return requests


def lone_answers(settings: Settings, requests: Sequence[Submit]) -> dict[str, SequenceOutput]:
    core, answers = alone(settings), {}
    for request in requests:
        assert core.receive([request]) == []
        while core.has_work:
            outputs = core.step()
            assert outputs is not None
            collect(answers, outputs)
    return {request_id: answer for (request_id, _), answer in answers.items()}


def assert_equal_answers(
    expected: dict[str, SequenceOutput], ranks: Sequence[Rank], cancelled: set[str] = frozenset()
) -> None:
    found = {key[0]: answer for rank in ranks for key, answer in rank.answers.items()}
    assert expected.keys() - cancelled <= found.keys()
    for request_id, answer in found.items():
        wanted, count = expected[request_id], len(answer.token_ids)
        if request_id not in cancelled:
            assert answer.finish_reason == wanted.finish_reason, answer
            assert count == len(wanted.token_ids), (request_id, answer)
        assert_bit_equal(
            wanted.token_ids[:count],
            [p.logprob for p in wanted.logprobs[:count]],
            answer.token_ids,
            [p.logprob for p in answer.logprobs],
            f"request {request_id}",
        )


CASES = {
    "two ranks": (2, 64, Settings(num_blocks=6)),
    "four ranks": (4, 24, Settings(num_blocks=6, new_depth=lambda: AdaptiveDepth(4))),
    "good guesses": (2, 24, Settings(num_blocks=6, is_guessing=True)),
    "adaptive": (2, 24, Settings(is_guessing=True, new_depth=lambda: AdaptiveDepth(4))),
    "no drafts": (2, 24, Settings(num_blocks=6, new_depth=None)),
}
"""Number of ranks, number of requests, what each rank is."""


@pytest.mark.parametrize("can_renew", [True, False])
def test_C3_numbers_of_exchanges_begin_anew_before_they_end(
    can_renew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A membership that no other can follow goes on with its own numbers."""
    monkeypatch.setattr(group_member, "RENEW_AFTER", 5)
    monkeypatch.setattr(FolderStore, "can_renew", can_renew)
    settings = Settings(num_blocks=6)
    requests = mixed_requests(16, shape_of(is_guessing=False).config.vocab_size)
    expected = lone_answers(settings, requests)

    def script(rank: Rank) -> Sequence[ToEngine]:
        mine = requests[rank.transport.rank :: 2][rank.num_turns : rank.num_turns + 1]
        if rank.num_turns > len(requests):
            raise StopIteration
        return mine

    ranks = results_of(run_group(2, settings, script))
    assert_equal_answers(expected, ranks, set())
    for rank in ranks:
        assert rank.member.membership.members == {0, 1}
        assert (rank.member.membership.epoch > 3) == can_renew  # 2 of them are for joining


def test_C3_numbers_of_exchanges_and_dispatches_last_for_years() -> None:
    last_exchange = (1 << 19) * NUMBERS_PER_EPOCH - 1
    ten_years_of_dispatches = 10 * 365 * 86_400 * 58 * 25
    most_chunks = 64

    assert FolderStore.can_renew
    assert not StaticMembership.can_renew
    for transfer in (
        TransferId(last_exchange),
        TransferId(ten_years_of_dispatches, most_chunks - 1, most_chunks.bit_length()),
    ):
        assert signal_value(transfer.epoch, 1) >> COUNT_BITS == transfer.epoch


@pytest.mark.parametrize("case", CASES)
def test_mixed_requests_have_the_bits_of_one_rank(case: str) -> None:
    """With idle ranks, chunked prompts, cancels, preemptions and drafts."""
    num_ranks, num_requests, settings = CASES[case]
    requests = mixed_requests(num_requests, shape_of(settings.is_guessing).config.vocab_size)
    expected = lone_answers(settings, requests)
    cancelled = {"8", "9", "22"}

    def script(rank: Rank) -> Sequence[ToEngine]:
        # the last rank gets its requests late and all at once: it joins without any before
        mine = [r for i, r in enumerate(requests) if i % num_ranks == rank.transport.rank]
        is_last = rank.transport.rank == num_ranks - 1
        turn = rank.num_turns - (60 if is_last else 10)
        if turn < 0:
            return ()
        due = mine[turn * (9 if is_last else 1) :][: 9 if is_last else 1]
        aborts = [Abort(request_id=r) for r in cancelled if any(m.request_id == r for m in mine)]
        if turn == 25:
            return [*due, *aborts]
        if turn > 25 and not due:
            raise StopIteration
        return due

    ranks = results_of(run_group(num_ranks, settings, script))
    assert_equal_answers(expected, ranks, cancelled)
    modes = {mode for rank in ranks for mode in rank.dispatcher.log}
    assert modes == {"low_latency", "throughput"}
    assert all(rank.dispatcher.log == ranks[0].dispatcher.log for rank in ranks)
    if num_requests == 64:
        assert sum(rank.core.stats.num_preemptions for rank in ranks) > 0
    if settings.is_guessing:
        assert sum(rank.core.stats.num_accepted_tokens for rank in ranks) > 20
