"""What is measured of drafts and steps, in integers: every rank of a group computes the same.

Shares are in units of 1 / 65,536, times in microseconds. A step is summed up in one `StepRecord`;
records of the ranks of a group add up to the group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ONE = 1 << 16
"""The share 1."""
FIRST_GUESS = ONE * 3 // 4
"""Acceptance that is assumed before the first draft was judged: high enough to try."""
BATCH_MEMORY, REQUEST_MEMORY = 32, 8
"""Drafts that the averages of all requests, and of a single one, reach back."""
FORGET_AFTER = 128
"""Steps without a draft at a position until its acceptance is assumed to have risen."""
TIMES_HOLD_STEPS = 512
"""Steps after which a time that was not measured again is forgotten."""
LEAST_OF_STEPS = 16
"""Measurements of which the least counts: what disturbs a step makes it longer, on a busy machine
many times as long, and longer steps are disturbed more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank."""

    num_rows: int = 0
    """Rows that sampled."""
    num_tokens: int = 0
    """Tokens computed, drafts included."""
    is_decode: bool = False
    """No row computed a piece of a prompt, so that times are comparable."""
    num_judged: tuple[int, ...] = ()
    """For each position: drafts that were judged, all before them being right."""
    num_accepted: tuple[int, ...] = ()
    num_passes: int = 0
    """Full passes of the draft model."""
    step_time_us: int = 0
    draft_time_us: int = 0


def count_by_position(
    drafts: Sequence[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Turn (drafts, right ones) of each row into counts of judged and of accepted by position."""
    depth = max((num_drafts for num_drafts, _ in drafts), default=0)
    judged, accepted = [0] * depth, [0] * depth
    for num_drafts, num_accepted in drafts:
        for position in range(min(num_accepted + 1, num_drafts)):
            judged[position] += 1
            accepted[position] += position < num_accepted
    return tuple(judged), tuple(accepted)


class AcceptanceAverage:
    """The share of right drafts at each position, given that all before were right."""

    __slots__ = ("_memory", "shares")

    def __init__(
        self, depth: int, *, first_guess: int = FIRST_GUESS, memory: int = BATCH_MEMORY
    ) -> None:
        """memory: drafts after which an old average has lost 63 % of its weight."""
        self._memory = memory
        self.shares = [first_guess] * depth

    def observe(self, num_judged: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Move each average towards the share of a step, the further the more were judged.

        Positions after the drafts of a step slowly forget: they drift up to the position before.
        """
        for position in range(max(len(num_judged), 1), len(self.shares)):
            if num_judged:
                gap = max(self.shares[position - 1] - self.shares[position], 0)
                self.shares[position] += gap // FORGET_AFTER
        for position, judged in enumerate(num_judged[: len(self.shares)]):
            if judged:
                share = num_accepted[position] * ONE // judged
                weight = min(judged, self._memory // 2)
                old = self.shares[position]
                self.shares[position] = old + (share - old) * weight // self._memory

    def observe_run(self, num_drafts: int, num_right: int) -> None:
        """Do as `observe` for one run of drafts."""
        shares, memory = self.shares, self._memory
        for position in range(max(num_drafts, 1), len(shares)):
            gap = shares[position - 1] - shares[position]
            if gap > 0:
                shares[position] += gap // FORGET_AFTER
        for position in range(min(num_right + 1, num_drafts, len(shares))):
            share = ONE if position < num_right else 0
            shares[position] += (share - shares[position]) // memory

    def expected_tokens(self, depth: int) -> int:
        """Return how many tokens a step with `depth` drafts yields, times 65,536."""
        total = reached = ONE
        for share in self.shares[:depth]:
            reached = reached * share // ONE
            total += reached
        return total


class LeastTimes:
    """The least time lately by size of a step; sizes that were not measured are estimated."""

    __slots__ = ("_last_seen", "_num_observed", "_times_us", "_windows")

    def __init__(self) -> None:
        self._times_us: dict[int, int] = {}
        self._windows: dict[int, tuple[int, int, int]] = {}
        """For each size: least of the last whole window, least of this one, how many it has."""
        self._last_seen: dict[int, int] = {}
        self._num_observed = 0

    def observe(self, size: int, time_us: int) -> None:
        """Take the time of a step of `size`."""
        bucket = size_bucket(size)
        self._num_observed += 1
        self._last_seen[bucket] = self._num_observed
        if self._num_observed % 64 == 0:
            self._forget_old()
        time_us = max(time_us, 1)
        before, least, count = self._windows.get(bucket, (time_us, time_us, 0))
        if count == LEAST_OF_STEPS:
            before, least, count = least, time_us, 0
        least = min(least, time_us)
        self._windows[bucket] = before, least, count + 1
        self._times_us[bucket] = min(before, least)

    def _forget_old(self) -> None:
        for bucket, seen in list(self._last_seen.items()):
            if seen < self._num_observed - TIMES_HOLD_STEPS:
                del self._last_seen[bucket], self._times_us[bucket], self._windows[bucket]

    def estimate(self, size: int) -> int | None:
        """Return the time of a step of `size`; None before the first measurement.

        A larger step never takes less. Beyond what was measured the estimate is too good: as long
        as the largest, in proportion to the smallest. So other sizes are tried, and measured.
        """
        bucket = size_bucket(size)
        known = self._times_us
        above = [b for b in known if b >= bucket]
        below = max((b for b in known if b < bucket), default=None)
        if not above:
            return None if below is None else known[below]
        most_us = min(known[b] for b in above)
        nearest = min(above)
        if nearest == bucket:
            return most_us
        if below is None:
            return most_us * bucket // nearest
        slope = known[nearest] - known[below]
        return min(known[below] + slope * (bucket - below) // (nearest - below), most_us)


def size_bucket(size: int) -> int:
    """Round a size up: exact up to 8, then in steps of an eighth to a quarter."""
    step = 1 << max(size.bit_length() - 3, 0) if size > 8 else 1
    return -(-size // step) * step
