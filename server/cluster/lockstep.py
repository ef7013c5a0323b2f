"""What a group of ranks does next, as a pure function of their records.

Every rank feeds the same records to its own `Lockstep` and comes to the same decision; nothing here
measures, waits or sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from whalepod.ep_comm.dispatcher import ModeName
from whalepod.ep_comm.handshake import HandshakeError
from whalepod.mtp.depth import Depth
from whalepod.server.cluster.rank_record import RankRecord, StepOutcome, group_step


@dataclass(frozen=True, slots=True)
class Park:
    """No rank has work: sleep until one has."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Some ranks do not come any more: they leave the membership.

    by  the lowest live rank: it commits the next membership, the others wait for it
    """

    ranks: frozenset[int]
    by: int


@dataclass(frozen=True, slots=True)
class Step:
    """All ranks step together, those without rows as well.

    mode        how tokens reach the experts, for all ranks and rows of the step
    num_drafts  guesses asked for after each row; the draft layer runs this often on every rank
    renumber    None, or the calls above which all ranks number theirs first: some rank failed
    patience    factor of all timeouts
    """

    mode: ModeName
    num_drafts: int
    renumber: tuple[int, int] | None
    patience: int = 1


MAX_PATIENCE = 16
CALM_STEPS = 64
"""Steps without a failure after which timeouts are halved again."""
Decision = Park | Remove | Step


class Lockstep:
    """Decides for one membership epoch.

    max_low_latency_tokens  M: the most tokens of a rank for which the low-latency mode serves
    new_depth               makes the chooser of the number of drafts; None: no drafts. It starts
                            anew in each epoch, because a rank that has just come knows nothing of
                            the steps before
    """

    def __init__(
        self, *, max_low_latency_tokens: int, new_depth: Callable[[], Depth] | None = None
    ) -> None:
        self._max_low_latency_tokens = max_low_latency_tokens
        self._new_depth = new_depth
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget what was learned from the steps of another membership; renumber all calls."""
        self._depth = self._new_depth() if self._new_depth else None
        self._must_renumber = True
        self._patience = 1
        self._num_calm = 0

    def decide(self, records: Mapping[int, RankRecord]) -> Decision:
        """Return what the group does; `records` are those of all live ranks, by rank.

        Raises HandshakeError if ranks differ in what they must agree on.
        """
        late = _late(records)
        if late:
            return Remove(late, min(set(records) - late))
        versions = {rank: record.version for rank, record in records.items()}
        if len(set(versions.values())) > 1:
            raise HandshakeError(f"ranks of one epoch differ: {versions}")
        if self._depth is not None:
            self._depth.observe(group_step(records.values()))
        most_tokens = max(record.num_tokens for record in records.values())
        self._settle_patience([record.outcome for record in records.values()])
        renumber = self._renumber(records)
        if not most_tokens:
            self._must_renumber = renumber is not None
            return Park()
        return Step(
            mode="low_latency" if most_tokens <= self._max_low_latency_tokens else "throughput",
            num_drafts=self._num_drafts(records),
            renumber=renumber,
            patience=self._patience,
        )

    def _settle_patience(self, outcomes: Collection[StepOutcome]) -> None:
        """Wait longer where a step failed although no rank raised and all have come here since: a
        rank is slow, and would be late again."""
        if StepOutcome.FAILED_ELSEWHERE in outcomes and StepOutcome.FAILED_HERE not in outcomes:
            self._patience, self._num_calm = min(2 * self._patience, MAX_PATIENCE), 0
        elif self._patience > 1:
            self._num_calm += 1
            if self._num_calm == CALM_STEPS:
                self._patience, self._num_calm = self._patience // 2, 0

    def _num_drafts(self, records: Mapping[int, RankRecord]) -> int:
        wanted = max(record.num_drafts for record in records.values())
        return min(self._depth.choose(), wanted) if self._depth is not None and wanted else 0

    def _renumber(self, records: Mapping[int, RankRecord]) -> tuple[int, int] | None:
        """Return the most calls of any rank if they may have come out of step."""
        calls = [record.calls for record in records.values()]
        failed = any(record.outcome is not StepOutcome.DONE for record in records.values())
        must = self._must_renumber or failed or len(set(calls)) > 1
        self._must_renumber = False
        return (max(low for low, _ in calls), max(bulk for _, bulk in calls)) if must else None


def _late(records: Mapping[int, RankRecord]) -> frozenset[int]:
    """Return whom others found late. Of two that name each other the lower rank is believed."""
    late: set[int] = set()
    for rank in sorted(records):
        if rank not in late:
            late |= records[rank].late
    return frozenset(late)
