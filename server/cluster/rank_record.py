"""What every rank tells every other one before each step: integers, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.stats import StepRecord

_BITS = 62
"""Ranks in one integer of a set of ranks; the sign stays free."""


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
    num_drafts       the most drafts that it could use behind a row
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


_SCALARS = (
    "epoch", "version", "outcome", "num_tokens", "num_drafts", "num_free_blocks", "num_waiting",
    "is_draining",
)  # fmt: skip
_STEP_SCALARS = tuple(f.name for f in fields(StepRecord) if f.type in ("int", "bool"))
_NUM_FIXED = len(_SCALARS) + 2 + len(_STEP_SCALARS) + 2 * MAX_DRAFT_TOKENS


def record_bytes(num_ranks: int) -> int:
    """Return the size of a record on the wire."""
    return 8 * (_NUM_FIXED + -(-num_ranks // _BITS))


def to_tensor(record: RankRecord, num_ranks: int) -> Tensor:
    """Return the record as int64, always of the same size."""
    step = record.last_step
    values = [int(getattr(record, name)) for name in _SCALARS]
    values += record.calls
    values += [int(getattr(step, name)) for name in _STEP_SCALARS]
    for counts in (step.num_judged, step.num_accepted):
        values += [*counts, *[0] * (MAX_DRAFT_TOKENS - len(counts))]
    values += _to_words(record.accused, num_ranks)
    return torch.tensor(values, dtype=torch.int64)


def from_tensor(tensor: Tensor) -> RankRecord:
    """Return the record that `to_tensor` made into integers."""
    values: list[int] = tensor.tolist()
    scalars: dict[str, Any] = dict(zip(_SCALARS, values, strict=False))
    rest = values[len(_SCALARS) :]
    calls, rest = (rest[0], rest[1]), rest[2:]
    step: dict[str, Any] = dict(zip(_STEP_SCALARS, rest, strict=False))
    rest = rest[len(_STEP_SCALARS) :]
    judged, accepted = rest[:MAX_DRAFT_TOKENS], rest[MAX_DRAFT_TOKENS : 2 * MAX_DRAFT_TOKENS]
    depth = max((i + 1 for i, count in enumerate(judged) if count), default=0)
    last_step = StepRecord(
        **step | {"is_decode": bool(step["is_decode"])},
        num_judged=tuple(judged[:depth]),
        num_accepted=tuple(accepted[:depth]),
    )
    return RankRecord(
        **scalars
        | {"outcome": StepOutcome(scalars["outcome"]), "is_draining": bool(scalars["is_draining"])},
        calls=calls,
        accused=_from_words(values[_NUM_FIXED:]),
        last_step=last_step,
    )


def _to_words(ranks: frozenset[int], num_ranks: int) -> list[int]:
    words = [0] * -(-num_ranks // _BITS)
    for rank in ranks:
        words[rank // _BITS] |= 1 << rank % _BITS
    return words


def _from_words(words: Sequence[int]) -> frozenset[int]:
    bits = ((i * _BITS + b, word >> b & 1) for i, word in enumerate(words) for b in range(_BITS))
    return frozenset(rank for rank, is_set in bits if is_set)


def group_step(records: Iterable[RankRecord]) -> StepRecord:
    """Sum a step of the group up: judged drafts of all ranks, sizes and times of the largest."""
    steps = [record.last_step for record in records]
    active = [step for step in steps if step.num_tokens]
    judged, accepted = [0] * MAX_DRAFT_TOKENS, [0] * MAX_DRAFT_TOKENS
    for step in active:
        for position, count in enumerate(step.num_judged):
            judged[position] += count
            accepted[position] += step.num_accepted[position]
    depth = max((i + 1 for i, count in enumerate(judged) if count), default=0)
    return StepRecord(
        num_rows=max((step.num_rows for step in active), default=0),
        num_tokens=max((step.num_tokens for step in active), default=0),
        is_decode=all(step.is_decode for step in active),
        num_judged=tuple(judged[:depth]),
        num_accepted=tuple(accepted[:depth]),
        num_passes=max((step.num_passes for step in active), default=0),
        step_time_us=max((step.step_time_us for step in active), default=0),
        draft_time_us=max((step.draft_time_us for step in active), default=0),
    )
