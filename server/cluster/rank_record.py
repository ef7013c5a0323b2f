"""What every rank tells every other one before each step: integers, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.stats import StepRecord

_BITS = 62
"""Ranks in one integer of a set of ranks; the sign stays free."""
_NUM_FIXED = 16 + 2 * MAX_DRAFT_TOKENS
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

    epoch            of the membership that it goes by
    version          digest of weights, placement and settings
    outcome          of its last step
    calls            how far its low-latency and its throughput calls are numbered
    num_tokens       the most that it would compute in the coming step; 0: nothing to do
    num_drafts       the most drafts that it could use after a row
    num_free_blocks  of its cache
    num_waiting      requests that wait for a place
    is_draining      it takes no new requests
    accused          ranks that did not come to an earlier exchange of this epoch
    last_step        what its last step measured
    """

    epoch: int
    version: int
    outcome: StepOutcome = StepOutcome.DONE
    calls: tuple[int, int] = (0, 0)
    num_tokens: int = 0
    num_drafts: int = 0
    num_free_blocks: int = 0
    num_waiting: int = 0
    is_draining: bool = False
    accused: frozenset[int] = frozenset()
    last_step: StepRecord = field(default_factory=StepRecord)


def record_bytes(num_ranks: int) -> int:
    """Return the size of a record on the wire."""
    return 8 * (_NUM_FIXED + -(-num_ranks // _BITS))


def to_tensor(record: RankRecord, num_ranks: int) -> Tensor:
    """Return the record as int64, always of the same size."""
    r, s = record, record.last_step
    accused = [0] * -(-num_ranks // _BITS)
    for rank in r.accused:
        accused[rank // _BITS] |= 1 << rank % _BITS
    values = [
        r.epoch, r.version, r.outcome, *r.calls, r.num_tokens, r.num_drafts, r.num_free_blocks,
        r.num_waiting, r.is_draining, s.num_rows, s.num_tokens, s.is_decode, s.num_passes,
        s.step_time_us, s.draft_time_us, *_padded(s.num_judged), *_padded(s.num_accepted), *accused,
    ]  # fmt: skip
    return torch.tensor(values, dtype=torch.int64)


def from_tensor(tensor: Tensor) -> RankRecord:
    """Return the record that `to_tensor` made into integers."""
    values: list[int] = tensor.tolist()
    counts = values[16:_NUM_FIXED]
    return RankRecord(
        epoch=values[0],
        version=values[1],
        outcome=StepOutcome(values[2]),
        calls=(values[3], values[4]),
        num_tokens=values[5],
        num_drafts=values[6],
        num_free_blocks=values[7],
        num_waiting=values[8],
        is_draining=bool(values[9]),
        accused=frozenset(_ranks_of(values[_NUM_FIXED:])),
        last_step=_step_of(values[10:16], counts[:MAX_DRAFT_TOKENS], counts[MAX_DRAFT_TOKENS:]),
    )


def _padded(counts: Sequence[int]) -> list[int]:
    return [*counts, *[0] * (MAX_DRAFT_TOKENS - len(counts))]


def _step_of(values: Sequence[int], judged: Sequence[int], accepted: Sequence[int]) -> StepRecord:
    depth = max((i + 1 for i, count in enumerate(judged) if count), default=0)
    return StepRecord(
        num_rows=values[0],
        num_tokens=values[1],
        is_decode=bool(values[2]),
        num_passes=values[3],
        step_time_us=values[4],
        draft_time_us=values[5],
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
    steps = [r.last_step for r in records if r.last_step.num_tokens]
    largest = [
        max((s.num_rows for s in steps), default=0),
        max((s.num_tokens for s in steps), default=0),
        all(s.is_decode for s in steps),
        max((s.num_passes for s in steps), default=0),
        max((s.step_time_us for s in steps), default=0),
        max((s.draft_time_us for s in steps), default=0),
    ]
    judged = [sum(counts) for counts in zip(*(_padded(s.num_judged) for s in steps), strict=True)]
    accepted = [sum(c) for c in zip(*(_padded(s.num_accepted) for s in steps), strict=True)]
    return _step_of(largest, judged, accepted)
