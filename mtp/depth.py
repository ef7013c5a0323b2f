"""How many tokens to guess ahead: chosen for every step from what was measured before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from whalepod.mtp.stats import AcceptanceAverage, LeastTimes, StepRecord

SETTLED_STEPS = 8
"""Steps that a depth is kept at least, unless the batch changes its size."""
GAIN_NUMERATOR, GAIN_DENOMINATOR = 17, 16
"""Another depth must promise this much more (1 / 16) to be taken."""
PROBE_TRIALS = 8
"""Drafts that are tried now and then where drafts do not pay."""
FIRST_PROBE_STEPS, LAST_PROBE_STEPS = 64, 1024
"""Steps between two trials, doubled after each that does not pay."""


class Depth(Protocol):
    """Chooses the number of drafts of a step. Decides by the records alone."""

    def choose(self) -> int:
        """Return how many drafts each row of the next step is asked for."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Take the record of a finished step."""
        ...


class FixedDepth:
    """Always the same depth."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self) -> int:
        return self._depth

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


class StepTimes:
    """What steps cost: verifying by tokens of the step, drafting by depth and rows."""

    __slots__ = ("_draft_us", "_verify_us")

    def __init__(self, max_depth: int) -> None:
        self._verify_us = LeastTimes()
        self._draft_us = [LeastTimes() for _ in range(max_depth)]

    def observe(self, record: StepRecord) -> None:
        """Take the times of a step without pieces of prompts."""
        self._verify_us.observe(record.num_tokens, record.step_time_us - record.draft_time_us)
        if 0 < record.num_passes <= len(self._draft_us):
            self._draft_us[record.num_passes - 1].observe(record.num_rows, record.draft_time_us)

    def estimate(self, num_rows: int, depth: int) -> int | None:
        """Return the time of a step that verifies and makes `depth` drafts for each row."""
        verify_us = self._verify_us.estimate(num_rows * (1 + depth))
        if verify_us is None or not depth:
            return verify_us
        return verify_us + self._estimate_draft(num_rows, depth, verify_us)

    def _estimate_draft(self, num_rows: int, depth: int, verify_us: int) -> int:
        """A depth that was not tried is taken to cost a little less than it will, so that it is."""
        known = [
            (tried, time_us)
            for tried, times in enumerate(self._draft_us, start=1)
            if (time_us := times.estimate(num_rows)) is not None
        ]
        if not known:
            return depth * (verify_us // 8)
        tried, time_us = min(known, key=lambda item: (abs(item[0] - depth), item[0]))
        return max(time_us + (depth - tried) * time_us // (tried + 1), 1)


def best_depth(
    acceptance: AcceptanceAverage,
    times: StepTimes,
    *,
    num_rows: int,
    current: int,
    max_depth: int,
) -> int:
    """Return the depth that yields most tokens in the same time; `current` where it is close.

    A step of depth k computes (1 + k) tokens for each row and runs k passes of the draft model.
    """
    current_us = times.estimate(num_rows, current)
    if current_us is None:
        return current
    best, best_tokens, best_us = current, acceptance.expected_tokens(current), current_us
    # the current depth has a lead that the others must make up for
    best_tokens = best_tokens * GAIN_NUMERATOR // GAIN_DENOMINATOR
    for depth in range(min(current + 1, max_depth) + 1):  # upwards step by step
        tokens, needed_us = acceptance.expected_tokens(depth), times.estimate(num_rows, depth)
        if needed_us is not None and tokens * best_us > best_tokens * needed_us:
            best, best_tokens, best_us = depth, tokens, needed_us
    return best


class AdaptiveDepth:
    """Follows acceptance and step times, and now and then tries drafts where they do not pay."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._acceptance = AcceptanceAverage(max_depth)
        self._times = StepTimes(max_depth)
        self._depth = min(1, max_depth)
        self._num_rows = 0
        self._num_settled = 0
        self._num_idle = 0
        self._probe_after = FIRST_PROBE_STEPS
        self._num_probes = 0

    @property
    def shares(self) -> Sequence[int]:
        """Acceptance by position, times 65,536."""
        return self._acceptance.shares

    def choose(self) -> int:
        return max(self._depth, min(self._num_probes, 1))

    def observe(self, record: StepRecord) -> None:
        if not record.num_rows:
            return
        self._acceptance.observe(record.num_judged, record.num_accepted)
        if record.is_decode:
            self._times.observe(record)
        self._num_settled += 1
        if self._num_settled >= SETTLED_STEPS or record.num_rows != self._num_rows:
            self._num_settled %= SETTLED_STEPS
            self._settle(record.num_rows)
        self._count_probes(record.num_rows)

    def _settle(self, num_rows: int) -> None:
        self._num_rows = num_rows
        depth = best_depth(
            self._acceptance,
            self._times,
            num_rows=num_rows,
            current=self._depth,
            max_depth=self._max_depth,
        )
        if depth != self._depth:
            self._depth, self._num_settled = depth, 0

    def _count_probes(self, num_rows: int) -> None:
        if self._depth:
            self._num_idle, self._num_probes = 0, 0
            self._probe_after = FIRST_PROBE_STEPS
        elif self._num_probes:
            self._num_probes -= 1
        else:
            self._num_idle += 1
            if self._num_idle >= self._probe_after:
                self._num_idle = 0
                self._num_probes = -(-PROBE_TRIALS // num_rows)
                self._probe_after = min(2 * self._probe_after, LAST_PROBE_STEPS)
