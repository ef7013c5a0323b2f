"""Drafts of a step's sequences: who makes them, and what is kept until they are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.draft import Drafter, DraftStart, KnownStates, StepStates
from whalepod.mtp.lookup import TextLookup
from whalepod.mtp.stats import (
    ONE,
    REQUEST_MEMORY,
    AcceptanceAverage,
    StepRecord,
    count_by_position,
)
from whalepod.scheduler.plan import BlockCopy, Plan, Row, StepResult
from whalepod.server.engine.sampler import Sampler, Wanted
from whalepod.server.engine.sampling_state import SamplingState

LOOKUP_FIRST_GUESS = ONE // 2
"""Acceptance that is assumed of looked-up drafts: the model's own layer is tried first."""


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
    def accepted(self) -> tuple[int, ...]:
        """Right drafts: the sampling state has not seen them as the row's own."""
        num_own = len(self.row.token_ids) - self.row.num_drafts
        return tuple(self.row.token_ids[num_own : self.num_true])

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What the row yielded."""
        return self.accepted if self.token_id is None else (*self.accepted, self.token_id)


@dataclass(slots=True)
class _Speculation:
    """What is kept of one sequence between steps."""

    made_by: Literal["mtp", "lookup"] | None = None
    """Who made the drafts that the next step judges."""
    log_qs: list[Tensor | None] = field(default_factory=list)
    """What they were drawn from, with acceptance by rejection."""
    lookup: TextLookup | None = None
    looked_up: tuple[int, ...] = ()
    """What lookup would guess; compared with the text whether it is used or not."""
    by_lookup: AcceptanceAverage = field(
        default_factory=lambda: AcceptanceAverage(
            MAX_DRAFT_TOKENS, first_guess=LOOKUP_FIRST_GUESS, memory=REQUEST_MEMORY
        )
    )
    by_mtp: AcceptanceAverage = field(
        default_factory=lambda: AcceptanceAverage(MAX_DRAFT_TOKENS, memory=REQUEST_MEMORY)
    )

    def learn(self, end: TextEnd) -> None:
        """Compare what was guessed with what a row yielded."""
        new = end.new_token_ids
        if self.made_by == "mtp" and end.row.num_drafts:
            self.by_mtp.observe(*count_by_position([(end.row.num_drafts, len(end.accepted))]))
        judged = self.looked_up[: len(new)]
        if judged:
            num_right = next(
                (i for i, token_id in enumerate(judged) if token_id != new[i]), len(judged)
            )
            self.by_lookup.observe(*count_by_position([(len(judged), num_right)]))

    def prefers_lookup(self, num_guessed: int, num_wanted: int) -> bool:
        """Say whether looked-up drafts promise at least as much as the model's own."""
        return self.by_lookup.expected_tokens(num_guessed) >= self.by_mtp.expected_tokens(
            num_wanted
        )


class Speculator:
    """Makes drafts, with the model's own layer and by lookup. Owned by the runner.

    drafter      the model's own layer; None: it has none
    with_lookup  look drafts up in the text too, where they were right more often
    """

    def __init__(
        self, drafter: Drafter | None, sampler: Sampler, *, with_lookup: bool = False
    ) -> None:
        self._drafter = drafter
        self._sampler = sampler
        self._with_lookup = with_lookup
        self._kept: dict[int, _Speculation] = {}
        self._states: StepStates | None = None

    @property
    def makers(self) -> tuple[str, ...]:
        """Who makes drafts, for people."""
        return ("mtp",) * (self._drafter is not None) + ("lookup",) * self._with_lookup

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._kept.pop(sequence_id, None)
        if self._drafter is not None:
            self._drafter.forget(sequence_id)

    def note_copy(self, copy: BlockCopy) -> None:
        """Follow a copy of cache rows."""
        if self._drafter is not None:
            self._drafter.copy_block(copy.source, copy.target)

    def note_forward(self, rows: Sequence[Row], batch: ForwardBatch, hidden_TH: Tensor) -> None:
        """Store what the draft layers keep of the step's tokens. `batch` may be overwritten."""
        if self._drafter is not None:
            self._states = self._drafter.write_rows(rows, batch, hidden_TH)

    def log_q(self, row: Row, index: int) -> Tensor | None:
        """Return what a row's draft was drawn from, if it was not certain."""
        log_qs = self._kept[row.sequence_id].log_qs
        return log_qs[index] if log_qs else None

    def join(self, num_passes: int) -> None:
        """Take part in other ranks' passes of the draft layers, without tokens of this one."""
        if self._drafter is not None:
            self._drafter.join(num_passes)

    def draft(self, ends: Sequence[TextEnd], num_passes: int = 0) -> list[tuple[int, ...]]:
        """Guess what follows each text, at most as many tokens as its row wants.

        All ranks of a group run the draft layer `num_passes` times in a step.
        What is kept changes at the end only, where nothing can fail any more: a step that is run
        again finds what it found the first time.
        """
        looked_up = [self._look_up(end) for end in ends]
        guesses: list[tuple[int, ...]] = [()] * len(ends)
        makers: list[Literal["mtp", "lookup"] | None] = [None] * len(ends)
        asking = []
        for i, end in enumerate(ends):
            if not end.wants_drafts or not end.row.num_drafts_wanted:
                continue
            if self._takes_lookup(end, looked_up[i]):
                guesses[i] = looked_up[i][: end.row.num_drafts_wanted]
                makers[i] = "lookup" if guesses[i] else None
            else:
                asking.append(i)
                makers[i] = "mtp"
        known = self._known_states(ends)
        log_qs: list[list[Tensor | None]] = [[] for _ in ends]
        if asking:
            starts = [_start(ends[i], known[i]) for i in asking]
            for i, drafts, drawn_from in self._ask_model(ends, starts, asking, num_passes):
                guesses[i], log_qs[i] = drafts, drawn_from
        elif self._drafter is not None:
            self._drafter.join_passes(num_passes)
        for i, end in enumerate(ends):
            self._keep(end, makers[i], log_qs[i], looked_up[i])
        if self._drafter is not None:
            for end, states in zip(ends, known, strict=True):
                self._drafter.keep(end.row.sequence_id, states)
        return guesses

    def _known_states(self, ends: Sequence[TextEnd]) -> list[KnownStates]:
        """Return the states of each text's last true token; none without draft layers."""
        if self._states is None:
            return []
        return self._states.at([end.hidden_row for end in ends], [end.position - 1 for end in ends])

    def _look_up(self, end: TextEnd) -> tuple[int, ...]:
        kept = self._kept.get(end.row.sequence_id)
        is_off = end.state.params.num_speculative_tokens == 0
        if not self._with_lookup or not end.wants_drafts or is_off:
            return ()
        if kept is None or kept.lookup is None:
            lookup = TextLookup(end.state.prompt_token_ids)
            self._kept.setdefault(end.row.sequence_id, _Speculation()).lookup = lookup
        else:
            lookup = kept.lookup
        return lookup.guess(end.new_token_ids, MAX_DRAFT_TOKENS)

    def _takes_lookup(self, end: TextEnd, looked_up: tuple[int, ...]) -> bool:
        if self._drafter is None:
            return True
        num_wanted = end.row.num_drafts_wanted
        num_guessed = min(len(looked_up), num_wanted)
        if not num_guessed:
            return False
        return self._kept[end.row.sequence_id].prefers_lookup(num_guessed, num_wanted)

    def _ask_model(
        self,
        ends: Sequence[TextEnd],
        starts: Sequence[DraftStart],
        asking: Sequence[int],
        num_passes: int,
    ) -> Iterator[tuple[int, tuple[int, ...], list[Tensor | None]]]:
        """Yield (number of the text, the layer's drafts, what they were drawn from)."""
        assert self._drafter is not None, "lookup never asks the model"
        log_qs: list[list[Tensor | None]] = [[] for _ in starts]

        def choose(
            logits_BV: Tensor, active: Sequence[int], drafts: Sequence[Sequence[int]]
        ) -> list[int]:
            wanted = [_wanted(ends[asking[i]], drafts[i]) for i in active]
            token_ids, drawn_from = self._sampler.draft(logits_BV, wanted)
            for i, log_q_V in zip(active, drawn_from, strict=True):
                log_qs[i].append(log_q_V)
            return token_ids

        drafts = self._drafter.draft(starts, choose, num_passes)
        for i, token_ids, drawn_from in zip(asking, drafts, log_qs, strict=True):
            yield i, tuple(token_ids), drawn_from

    def _keep(
        self,
        end: TextEnd,
        maker: Literal["mtp", "lookup"] | None,
        log_qs: list[Tensor | None],
        looked_up: tuple[int, ...],
    ) -> None:
        sequence_id = end.row.sequence_id
        kept = self._kept.setdefault(sequence_id, _Speculation())
        kept.learn(end)
        kept.made_by, kept.looked_up = maker, looked_up
        kept.log_qs = log_qs if self._sampler.by_rejection else []
        # a text of which it did not see every token (a warm-up's) is of no use to it
        if kept.lookup is not None and len(kept.lookup) == end.position - len(end.accepted):
            kept.lookup.extend(end.new_token_ids)


def _start(end: TextEnd, known: KnownStates) -> DraftStart:
    assert end.token_id is not None, "drafts follow a sampled token"
    return DraftStart(
        sequence_id=end.row.sequence_id,
        token_id=end.token_id,
        block_ids=end.row.block_ids,
        known=known,
        num_wanted=end.row.num_drafts_wanted,
    )


def _wanted(end: TextEnd, drafts: Sequence[int]) -> Wanted:
    """Ask for the token behind the drafts; the state has not seen the text's last tokens."""
    return Wanted(end.state, end.position + 1 + len(drafts), (*end.new_token_ids, *drafts))


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
