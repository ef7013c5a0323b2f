"""The choice of depth: integers in, and the depth that pays out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from whalepod.mtp.depth import AdaptiveDepth, FixedDepth
from whalepod.mtp.stats import (
    LEAST_OF_STEPS,
    ONE,
    AcceptanceAverage,
    LeastTimes,
    StepRecord,
    count_by_position,
    size_bucket,
)


class Machine:
    """Plays the steps of an engine: known acceptance by position, known costs, seeded luck."""

    def __init__(
        self,
        shares: Sequence[float],
        *,
        token_us: int,
        fixed_us: int = 1000,
        pass_us: int = 100,
        noise: float = 0.0,
    ) -> None:
        self.shares = shares
        self.token_us, self.fixed_us, self.pass_us = token_us, fixed_us, pass_us
        self.noise = noise
        self.rng = random.Random(1)
        self.num_tokens = 0
        self.time_us = 0

    def step(self, num_rows: int, num_drafts: int, num_passes: int) -> StepRecord:
        runs = []
        for _ in range(num_rows if num_drafts else 0):
            right = 0
            while right < num_drafts and self.rng.random() < self.shares[right]:
                right += 1
            runs.append((num_drafts, right))
        judged, accepted = count_by_position(runs)
        self.num_tokens += num_rows + sum(right for _, right in runs)
        disturbed = 1 + self.noise * self.rng.random()
        draft_us = int(num_passes * self.pass_us * disturbed)
        verify_us = int((self.fixed_us + num_rows * (1 + num_drafts) * self.token_us) * disturbed)
        self.time_us += draft_us + verify_us
        return StepRecord(
            num_rows=num_rows,
            num_tokens=num_rows * (1 + num_drafts),
            is_decode=True,
            num_judged=judged,
            num_accepted=accepted,
            num_passes=num_passes,
            step_time_us=draft_us + verify_us,
            draft_time_us=draft_us,
        )


def play(
    depth: AdaptiveDepth | FixedDepth, machine: Machine, num_rows: int, steps: int
) -> list[int]:
    """Run steps; what one step drafts the next one verifies. Returns the depths."""
    chosen, num_drafts = [], 0
    for _ in range(steps):
        wanted = depth.choose()
        depth.observe(machine.step(num_rows, num_drafts, wanted))
        chosen.append(wanted)
        num_drafts = wanted
    return chosen


GOOD, FADING, BAD = (0.9, 0.9, 0.9, 0.9), (0.8, 0.4, 0.1, 0.1), (0.05, 0.05, 0.05, 0.05)


def test_good_drafts_go_deep_where_tokens_are_cheap() -> None:
    chosen = play(AdaptiveDepth(4), Machine(GOOD, token_us=20), 1, 200)
    assert set(chosen[100:]) == {4}


def test_fading_drafts_stay_short() -> None:
    chosen = play(AdaptiveDepth(4), Machine(FADING, token_us=120), 1, 400)
    assert set(chosen[200:]) <= {1, 2}


def test_bad_drafts_are_left_but_tried_now_and_then() -> None:
    chosen = play(AdaptiveDepth(4), Machine(BAD, token_us=200), 4, 2000)
    tail = chosen[300:]
    assert set(tail) == {0, 1}
    assert 0 < sum(tail) < len(tail) // 50


def test_drafts_that_became_good_are_found() -> None:
    depth = AdaptiveDepth(4)
    play(depth, Machine(BAD, token_us=100), 4, 1000)
    chosen = play(depth, Machine(GOOD, token_us=20), 4, 6000)
    assert chosen[-1] == 4


def test_drafts_do_not_pay_where_every_token_costs_a_step() -> None:
    machine = Machine(FADING, token_us=1000, fixed_us=0)
    assert sum(play(AdaptiveDepth(4), machine, 16, 1000)[200:]) < 40


@pytest.mark.parametrize("shares", [GOOD, FADING, BAD])
@pytest.mark.parametrize(("token_us", "pass_us"), [(10, 50), (150, 150), (800, 400)])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_the_choice_is_near_the_best_fixed_depth(
    shares: Sequence[float], token_us: int, pass_us: int, num_rows: int
) -> None:
    def rate(depth: AdaptiveDepth | FixedDepth) -> float:
        machine = Machine(shares, token_us=token_us, pass_us=pass_us, noise=0.3)
        play(depth, machine, num_rows, 3000)
        return machine.num_tokens / machine.time_us

    best = max(rate(FixedDepth(k)) for k in range(5))
    assert rate(AdaptiveDepth(4)) > 0.93 * best


def test_the_same_records_give_the_same_choices() -> None:
    def choices() -> list[int]:
        return play(AdaptiveDepth(4), Machine(FADING, token_us=100, noise=0.5), 3, 500)

    assert choices() == choices()


def test_steps_without_sampling_rows_and_pieces_of_prompts_leave_times_alone() -> None:
    depth = AdaptiveDepth(4)
    before = depth.choose()
    for _ in range(50):
        depth.observe(StepRecord(num_tokens=512, step_time_us=10**6))
        depth.observe(StepRecord(num_rows=1, num_tokens=512, step_time_us=10**6))
    assert depth.choose() == before


def test_counts_by_position_stop_at_the_first_wrong_draft() -> None:
    assert count_by_position([(3, 0), (3, 1), (3, 3), (1, 1)]) == ((4, 2, 1), (3, 1, 1))
    assert count_by_position([]) == ((), ())


def test_averages_are_integers_between_nothing_and_all() -> None:
    average = AcceptanceAverage(2)
    for right in [0] * 200 + [1] * 400:
        average.observe((1, 1), (right, right))
        assert all(isinstance(share, int) and 0 <= share <= ONE for share in average.shares)
    assert average.shares[0] > 0.95 * ONE
    assert average.expected_tokens(0) == ONE
    assert average.expected_tokens(2) > 2.8 * ONE


def test_times_between_measured_sizes_are_interpolated() -> None:
    times = LeastTimes()
    assert times.estimate(3) is None
    times.observe(2, 1000)
    assert times.estimate(100) == 1000  # unknown, so worth a try
    assert times.estimate(1) == 500
    times.observe(6, 2000)
    assert times.estimate(4) == 1500
    times.observe(6, 1_000_000)  # a disturbed step
    assert times.estimate(6) == 2000


def test_a_disturbed_first_measurement_is_mended_by_the_next_and_by_larger_sizes() -> None:
    times = LeastTimes()
    times.observe(2, 50_000)
    times.observe(5, 3_000)
    assert times.estimate(2) == 3_000
    times.observe(2, 1_000)
    assert times.estimate(2) == 1_000


def test_steps_that_became_longer_are_noticed_after_two_windows() -> None:
    times = LeastTimes()
    times.observe(2, 1_000)
    for _ in range(LEAST_OF_STEPS):
        times.observe(2, 3_000)
    assert times.estimate(2) == 1_000
    for _ in range(LEAST_OF_STEPS):
        times.observe(2, 3_000)
    assert times.estimate(2) == 3_000


def test_a_run_moves_the_averages_as_its_counts_do() -> None:
    by_counts, by_runs = AcceptanceAverage(4, memory=8), AcceptanceAverage(4, memory=8)
    rng = random.Random(2)
    for _ in range(300):
        num_drafts = rng.randint(1, 4)
        run = (num_drafts, rng.randint(0, num_drafts))
        by_counts.observe(*count_by_position([run]))
        by_runs.observe_run(*run)
        assert by_counts.shares == by_runs.shares


@pytest.mark.parametrize("best", [1, 2, 3])
def test_the_cost_of_drafts_is_measured_for_each_depth(best: int) -> None:
    """Passes cost nothing up to one depth, and much behind it."""
    machine = Machine(GOOD, token_us=1, fixed_us=500, pass_us=0)

    def step(num_rows: int, num_drafts: int, num_passes: int) -> StepRecord:
        record = Machine.step(machine, num_rows, num_drafts, num_passes)
        draft_us = 5000 * max(num_passes - best, 0)
        return replace(record, step_time_us=record.step_time_us + draft_us, draft_time_us=draft_us)

    machine.step = step  # type: ignore[method-assign]
    chosen = play(AdaptiveDepth(4), machine, 1, 400)
    assert chosen[-100:].count(best) > 80


def test_the_choice_holds_where_most_steps_are_disturbed() -> None:
    """A busy machine: three steps of four take up to ten times as long."""
    machine = Machine(GOOD, token_us=20)

    def step(num_rows: int, num_drafts: int, num_passes: int) -> StepRecord:
        record = Machine.step(machine, num_rows, num_drafts, num_passes)
        factor = 1 if machine.rng.random() < 0.25 else 1 + 9 * machine.rng.random()
        return replace(
            record,
            step_time_us=int(record.step_time_us * factor),
            draft_time_us=int(record.draft_time_us * factor),
        )

    machine.step = step  # type: ignore[method-assign]
    chosen = play(AdaptiveDepth(4), machine, 1, 600)
    assert sum(chosen[300:]) > 3.5 * 300


def test_buckets_are_exact_for_small_sizes_and_never_shrink() -> None:
    buckets = [size_bucket(size) for size in range(1, 600)]
    assert buckets[:8] == list(range(1, 9))
    assert buckets == sorted(buckets)
    assert all(size <= size_bucket(size) <= size * 1.3 for size in range(1, 600))
