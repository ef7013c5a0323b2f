"""Steps that fail on a rank: everyone hears of it at once, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster.ranks import TIMEOUT_MS, Rank, Settings, run_group, shape_of
from tests.cluster.test_rank_equality import assert_equal_answers, lone_answers, mixed_requests
from whalepod.ep_comm.transport.loopback import results_of
from whalepod.server.messages import Submit, ToEngine

SETTINGS = Settings()
PLACES = ["dispatch, sending", "dispatch, receiving", "experts", "combine"]


def requests() -> list[Submit]:
    return mixed_requests(6, shape_of(False).config.vocab_size)


def script_of(num_ranks: int, submits: Sequence[Submit]) -> Callable[[Rank], Sequence[ToEngine]]:
    def script(rank: Rank) -> Sequence[ToEngine]:
        if rank.num_turns == 3:
            return [s for i, s in enumerate(submits) if i % num_ranks == rank.transport.rank]
        if rank.num_turns > 3:
            raise StopIteration
        return ()

    return script


class Mishap:
    """Raises at some operations of one rank; counts from 0 and only operations of one kind."""

    def __init__(self, place: str, numbers: Sequence[int]) -> None:
        self._place = place
        self._numbers = numbers
        self._count = -1

    def __call__(self, layer: str, operation: str) -> None:
        self._count += operation == self._place
        if operation == self._place and self._count in self._numbers:
            raise RuntimeError(f"a bug in {layer}")


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_raises_once_is_run_again_and_changes_no_answer(place: str) -> None:
    submits = requests()
    ranks = results_of(run_group(2, SETTINGS, script_of(2, submits), notes={1: Mishap(place, [9])}))
    assert_equal_answers(lone_answers(SETTINGS, submits), ranks)
    now_ms = ranks[0].transport.now_ms()
    assert now_ms < TIMEOUT_MS, "nobody waited for a deadline of the virtual clock"


def test_a_step_that_raises_again_ends_the_requests_of_its_own_rank_only() -> None:
    submits = requests()
    notes = {1: Mishap("experts", [9, 10])}  # what follows is that of the other requests
    ranks = results_of(run_group(2, SETTINGS, script_of(2, submits), notes=notes))
    failed = {key[0] for key, answer in ranks[1].answers.items() if answer.error}
    assert failed
    errors = {answer.error for answer in ranks[1].answers.values() if answer.error}
    assert errors == {"the engine failed at this step; its log says why"}
    assert not any(answer.error for answer in ranks[0].answers.values())
    expected = lone_answers(SETTINGS, submits)
    for rank in ranks:
        for key in list(rank.answers):
            if key[0] in failed:
                del rank.answers[key]
    assert_equal_answers(expected, ranks, failed)


def test_requests_of_a_group_that_lost_a_rank_end_with_a_clear_refusal() -> None:
    """The rank dies in a step and never comes back: its peers are told by the store only."""
    submits = requests()
    settings = Settings(return_timeout_s=30.0)

    class Dies(BaseException):
        pass

    def die(layer: str, operation: str) -> None:
        if operation == "combine":
            raise Dies

    def script(rank: Rank) -> Sequence[ToEngine]:
        if rank.num_turns == 3:
            return [s for i, s in enumerate(submits) if i % 2 == rank.transport.rank]
        if rank.num_turns > 3 and rank.engine.may_sleep and not rank.core.has_work:
            raise StopIteration
        return ()

    results = run_group(2, settings, script, notes={1: die}, max_turns=20_000, dead={1})
    survivor = results[0]
    assert isinstance(survivor, Rank), survivor
    assert survivor.refused.keys() == {s.request_id for i, s in enumerate(submits) if i % 2 == 0}
    (refusal,) = {(r.code, r.message) for r in survivor.refused.values()}
    assert refusal[0] == "engine_lost"
    assert "rank 1 of the group is gone" in refusal[1]
    assert not any(answer.token_ids for answer in survivor.answers.values())
