"""Drafts of a step's sequences: who makes them, and what is kept until they are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.mtp.draft import Drafter, DraftStart
from whalepod.mtp.stats import StepRecord, count_by_position
from whalepod.scheduler.plan import BlockCopy, Plan, Row, StepResult
from whalepod.server.engine.sampler import Sampler, Wanted
from whalepod.server.engine.sampling_state import SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnd:
    """Where a row's text ends once its drafts are judged.

    num_true   tokens of the row that belong to the text: all that are no drafts, and right drafts
    token_id   the token behind them, which the row yielded; None: it did not sample
    hidden_row the row of hidden states of the last true token
    """

    row: Row
    state: SamplingState
    num_true: int
    token_id: int | None
    hidden_row: int
    wants_drafts: bool

    @property
    def position(self) -> int:
        """Position behind the last true token."""
        return self.row.start + self.num_true

    @property
    def unobserved(self) -> tuple[int, ...]:
        """True tokens that the sampling state has not seen as the row's own: right drafts."""
        num_own = len(self.row.token_ids) - self.row.num_drafts
        return tuple(self.row.token_ids[num_own : self.num_true])


@dataclass(slots=True)
class _Drawn:
    """What drafts were drawn from, until they are judged."""

    token_ids: tuple[int, ...]
    log_qs: list[Tensor | None]


class Speculator:
    """Makes drafts with the model's own layer. Owned by the runner."""

    def __init__(self, drafter: Drafter, sampler: Sampler) -> None:
        self._drafter = drafter
        self._sampler = sampler
        self._drawn: dict[int, _Drawn] = {}

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._drafter.forget(sequence_id)
        self._drawn.pop(sequence_id, None)

    def note_copy(self, copy: BlockCopy) -> None:
        """Follow a copy of cache rows."""
        self._drafter.copy_block(copy.source, copy.target)

    def note_forward(self, rows: Sequence[Row], batch: ForwardBatch, hidden_TH: Tensor) -> None:
        """Store what the draft layer keeps of the step's tokens."""
        self._drafter.write_rows(rows, batch, hidden_TH)

    def log_q(self, row: Row, index: int) -> Tensor | None:
        """Return what a row's draft was drawn from, if it was not certain."""
        drawn = self._drawn.get(row.sequence_id)
        if drawn is None:
            return None
        return drawn.log_qs[index]

    def draft(self, ends: Sequence[TextEnd], hidden_TH: Tensor) -> list[tuple[int, ...]]:
        """Guess what follows each text; as many tokens as its row wants."""
        hidden_BH = hidden_TH[[end.hidden_row for end in ends]]
        asking = [i for i, end in enumerate(ends) if end.wants_drafts and end.row.num_drafts_wanted]
        starts = [_start(ends[i], hidden_BH[i]) for i in asking]
        drawn = [_Drawn((), []) for _ in asking]

        def choose(
            logits_BV: Tensor, active: Sequence[int], drafts: Sequence[Sequence[int]]
        ) -> list[int]:
            wanted = [_wanted(ends[asking[i]], drafts[i]) for i in active]
            token_ids, log_qs = self._sampler.draft(logits_BV, wanted)
            for i, log_q_V in zip(active, log_qs, strict=True):
                drawn[i].log_qs.append(log_q_V)
            return token_ids

        guesses: list[tuple[int, ...]] = [()] * len(ends)
        for i, drafts, kept in zip(asking, self._drafter.draft(starts, choose), drawn, strict=True):
            guesses[i] = kept.token_ids = tuple(drafts)
            if self._sampler.by_rejection:
                self._drawn[ends[i].row.sequence_id] = kept
        self._keep(ends, hidden_BH)
        return guesses

    def _keep(self, ends: Sequence[TextEnd], hidden_BH: Tensor) -> None:
        """Keep the ends of all texts: nothing after this fails, so a step that is run again finds
        what it found the first time."""
        for end, hidden_H in zip(ends, hidden_BH, strict=True):
            self._drafter.keep(end.row.sequence_id, end.position - 1, hidden_H)


def _start(end: TextEnd, hidden_H: Tensor) -> DraftStart:
    assert end.token_id is not None, "drafts follow a sampled token"
    return DraftStart(
        sequence_id=end.row.sequence_id,
        token_id=end.token_id,
        position=end.position,
        block_ids=end.row.block_ids,
        hidden_H=hidden_H,
        num_wanted=end.row.num_drafts_wanted,
    )


def _wanted(end: TextEnd, drafts: Sequence[int]) -> Wanted:
    """Ask for the token behind the drafts; the state has not seen the text's last tokens."""
    assert end.token_id is not None, "drafts follow a sampled token"
    before = (*end.unobserved, end.token_id, *drafts)
    return Wanted(end.state, end.position + 1 + len(drafts), before)


def step_record(plan: Plan, result: StepResult) -> StepRecord:
    """Sum up a step: all that the choice of the next step's depth may depend on."""
    drafts, num_rows, num_passes, is_decode = [], 0, 0, True
    for row, found in zip(plan.rows, result.rows, strict=True):
        num_rows += row.sample
        num_passes = max(num_passes, len(found.draft_token_ids))
        is_decode &= row.sample and len(row.token_ids) == 1 + row.num_drafts
        if row.num_drafts and found.token_ids:
            drafts.append((row.num_drafts, len(found.token_ids) - 1))
    judged, accepted = count_by_position(drafts)
    return StepRecord(
        num_rows=num_rows,
        num_tokens=plan.num_tokens,
        is_decode=is_decode,
        num_judged=judged,
        num_accepted=accepted,
        num_passes=num_passes,
        step_time_us=result.step_time_us,
        draft_time_us=result.draft_time_us,
    )
