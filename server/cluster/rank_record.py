"""What every rank tells every other one before each step: integers, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from whalepod.ep_comm.eplb.reports import NOTHING_MOVES, Report
from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.stats import StepRecord

_BITS = 62
"""Ranks in one integer of a set of ranks; the sign stays free."""
_NUM_SCALARS = 6
_NUM_STEP = 6 + 2 * MAX_DRAFT_TOKENS
_NUM_FIXED = _NUM_SCALARS + _NUM_STEP + len(NOTHING_MOVES)
"""Integers of a record, without its set of ranks."""


class StepOutcome(IntEnum):
    """How a rank's last step ended."""

    DONE = 0
    FAILED_HERE = 1
    """It raised on this rank."""
    FAILED_ELSEWHERE = 2
    """Another rank was missing in a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank before a step.

    version     digest of weights, placement and settings
    outcome     of its last step
    calls       how far its low-latency and its throughput calls are numbered
    num_tokens  the most that it would compute in the coming step; 0: nothing to do
    num_drafts  the most drafts that it could use after a row
    late        ranks that did not come to an earlier exchange of this epoch
    last_step   what its last step measured
    balance     where experts are and how they move
    """

    version: int = 0
    outcome: StepOutcome = StepOutcome.DONE
    calls: tuple[int, int] = (0, 0)
    num_tokens: int = 0
    num_drafts: int = 0
    late: frozenset[int] = frozenset()
    last_step: StepRecord = field(default_factory=StepRecord)
    balance: Report = NOTHING_MOVES


def record_bytes(num_ranks: int) -> int:
    """Return the size of a record on the wire."""
    return 8 * (_NUM_FIXED + -(-num_ranks // _BITS))


def to_tensor(record: RankRecord, num_ranks: int) -> Tensor:
    """Return the record as int64, always of the same size."""
    r = record
    masks = [0] * -(-num_ranks // _BITS)
    for rank in r.late:
        masks[rank // _BITS] |= 1 << rank % _BITS
    scalars = [r.version, r.outcome, *r.calls, r.num_tokens, r.num_drafts]
    return torch.tensor([*scalars, *_flat(r.last_step), *r.balance, *masks], dtype=torch.int64)


def from_tensor(tensor: Tensor) -> RankRecord:
    """Return the record that `to_tensor` made into integers."""
    values: list[int] = tensor.tolist()
    version, outcome, low_latency, throughput, num_tokens, num_drafts = values[:_NUM_SCALARS]
    return RankRecord(
        version=version,
        outcome=StepOutcome(outcome),
        calls=(low_latency, throughput),
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        late=frozenset(_ranks_of(values[_NUM_FIXED:])),
        last_step=_step_of(values[_NUM_SCALARS : _NUM_SCALARS + _NUM_STEP]),
        balance=Report(*values[_NUM_SCALARS + _NUM_STEP : _NUM_FIXED]),
    )


def _flat(step: StepRecord) -> list[int]:
    """Return a step's integers: six scalars, then counts padded to the most drafts."""
    s = step
    counts: list[int] = []
    for some in (s.num_judged, s.num_accepted):
        counts += [*some, *[0] * (MAX_DRAFT_TOKENS - len(some))]
    scalars = [s.num_rows, s.num_tokens, s.is_decode, s.num_passes, s.step_time_us, s.draft_time_us]
    return [*scalars, *counts]


def _step_of(values: Sequence[int]) -> StepRecord:
    num_rows, num_tokens, is_decode, num_passes, step_time_us, draft_time_us, *counts = values
    judged, accepted = counts[:MAX_DRAFT_TOKENS], counts[MAX_DRAFT_TOKENS:]
    depth = max((i + 1 for i, count in enumerate(judged) if count), default=0)
    return StepRecord(
        num_rows=num_rows,
        num_tokens=num_tokens,
        is_decode=bool(is_decode),
        num_passes=num_passes,
        step_time_us=step_time_us,
        draft_time_us=draft_time_us,
        num_judged=tuple(judged[:depth]),
        num_accepted=tuple(accepted[:depth]),
    )


def _ranks_of(masks: Sequence[int]) -> Iterable[int]:
    for i, mask in enumerate(masks):
        while mask:
            bit = mask & -mask
            mask ^= bit
            yield i * _BITS + bit.bit_length() - 1


def group_step(records: Iterable[RankRecord]) -> StepRecord:
    """Sum a step of the group up: judged drafts of all ranks, sizes and times of the largest."""
    steps = [_flat(r.last_step) for r in records if r.last_step.num_tokens]
    if not steps:
        return StepRecord()
    columns = list(zip(*steps, strict=True))
    largest, counts = [max(c) for c in columns[:6]], [sum(c) for c in columns[6:]]
    largest[2] = min(columns[2])  # of all ranks' steps
    return _step_of([*largest, *counts])
