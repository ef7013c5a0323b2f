"""Drafts of a step's sequences: what makes them, and what is kept until they are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.draft_batch import GREEDY, DraftInput, Draw
from whalepod.mtp.drafter import Choose, Drafter
from whalepod.mtp.lookup import TextLookup
from whalepod.mtp.stats import (
    ONE,
    REQUEST_MEMORY,
    AcceptanceAverage,
    StepRecord,
    count_by_position,
)
from whalepod.scheduler.plan import BlockCopy, Plan, Row, StepResult
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.sampling_state import SampleRequest, SamplingState

Maker: TypeAlias = Literal["mtp", "lookup"]

LOOKUP_FIRST_GUESS = ONE // 2
"""Acceptance that is assumed of looked-up drafts: the model's own layer is tried first."""


class JudgedRow(NamedTuple):
    """Where a row's text ends once its drafts are judged.

    num_true   tokens of the row that belong to the text: all that are no drafts, and right drafts
    token_id   the token after them, which the row yielded; None: it did not sample
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
        """Position after the last true token."""
        return self.row.start + self.num_true

    @property
    def num_accepted(self) -> int:
        """How many drafts were right."""
        return self.num_true - len(self.row.token_ids) + self.row.num_drafts

    @property
    def accepted(self) -> tuple[int, ...]:
        """Right drafts: the sampling state has not seen them as the row's own."""
        num_own = len(self.row.token_ids) - self.row.num_drafts
        return tuple(self.row.token_ids[num_own : self.num_true])

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What the row yielded."""
        return self.accepted if self.token_id is None else (*self.accepted, self.token_id)


class _Speculation:
    """What is kept of one sequence between steps.

    made_by    what made the drafts that the next step judges
    looked_up  what lookup would guess; compared with the text whether it is used or not
    draw       how its tokens are chosen from position `drawn_from` on, if that is all; else None
    """

    __slots__ = ("by_lookup", "by_mtp", "draw", "drawn_from", "looked_up", "lookup", "made_by")

    def __init__(self, state: SamplingState) -> None:
        self.made_by: Maker | None = None
        self.lookup: TextLookup | None = None
        self.looked_up: tuple[int, ...] = ()
        self.by_lookup = AcceptanceAverage(
            MAX_DRAFT_TOKENS, first_guess=LOOKUP_FIRST_GUESS, memory=REQUEST_MEMORY
        )
        self.by_mtp = AcceptanceAverage(MAX_DRAFT_TOKENS, memory=REQUEST_MEMORY)
        self.draw = _draw_of(state)
        self.drawn_from = state.num_prompt_tokens + state.params.min_tokens

    def learn(self, end: JudgedRow) -> None:
        """Compare what was guessed with what a row yielded."""
        num_right = end.num_accepted
        if self.made_by == "mtp" and end.row.num_drafts:
            self.by_mtp.observe_run(end.row.num_drafts, num_right)
        if self.looked_up:
            new = end.new_token_ids
            judged = self.looked_up[: len(new)]
            if judged:
                num_right = 0
                while num_right < len(judged) and judged[num_right] == new[num_right]:
                    num_right += 1
                self.by_lookup.observe_run(len(judged), num_right)

    def prefers_lookup(self, num_guessed: int, num_wanted: int) -> bool:
        """Return whether looked-up drafts promise at least as much as the model's own."""
        return self.by_lookup.expected_tokens(num_guessed) >= self.by_mtp.expected_tokens(
            num_wanted
        )


def _draw_of(state: SamplingState) -> Draw | None:
    """Return how the tokens of a sequence are chosen, if nothing but a temperature shapes them."""
    params = state.params
    if state.has_penalties or len(state.bias_ids) or state.grammar is not None:
        return None
    if state.is_greedy:
        return GREEDY
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        return None
    return Draw(temperature=params.temperature, seed=state.seed)


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

    @property
    def makers(self) -> tuple[str, ...]:
        """What makes drafts, for people."""
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

    def note_preempted(self, sequence_id: int) -> None:
        """Note that a sequence lost its cache rows."""
        if self._drafter is not None:
            self._drafter.note_preempted(sequence_id)

    def note_forward(self, rows: Sequence[Row], batch: ForwardBatch, hidden_TH: Tensor) -> None:
        """Store what the draft layers keep of the step's tokens. `batch` may be overwritten."""
        if self._drafter is not None:
            self._drafter.note_forward(rows, batch, hidden_TH)

    def join(self, num_passes: int) -> None:
        """Take part in other ranks' passes of the draft layers, without tokens of this one."""
        if self._drafter is not None:
            self._drafter.join(num_passes)

    def draft(self, ends: Sequence[JudgedRow], num_passes: int = 0) -> list[Sequence[int]]:
        """Guess what follows each text, at most as many tokens as its row wants.

        All ranks of a group run the draft layer `num_passes` times in a step.
        What is kept changes at the end only, where nothing can fail any more: a step that is run
        again finds what it found the first time.
        """
        kept = [self._kept_of(end) for end in ends]
        looked_up: list[tuple[int, ...]] = [()] * len(ends)
        if self._with_lookup:
            looked_up = list(map(self._look_up, ends, kept))
        makers = list(map(self._choose_maker, ends, kept, looked_up))
        guesses: list[Sequence[int]] = [()] * len(ends)
        if self._drafter is not None:
            known = list(map(_draft_input, ends, kept, makers))
            guesses[:] = self._drafter.draft(known, self._choose(ends), num_passes)
            self._drafter.keep(known)
        for i, end in enumerate(ends):
            if makers[i] == "lookup":
                guesses[i] = looked_up[i][: end.row.num_drafts_wanted]
            self._keep(end, kept[i], makers[i], looked_up[i])
        return guesses

    def _kept_of(self, end: JudgedRow) -> _Speculation:
        kept = self._kept.get(end.row.sequence_id)
        if kept is None:
            kept = _Speculation(end.state)
            self._kept[end.row.sequence_id] = kept
        return kept

    def _look_up(self, end: JudgedRow, kept: _Speculation) -> tuple[int, ...]:
        if not end.wants_drafts:
            return ()
        if end.state.params.num_speculative_tokens == 0:
            return ()
        if kept.lookup is None:
            kept.lookup = TextLookup(end.state.prompt_token_ids)
        return kept.lookup.guess(end.new_token_ids, MAX_DRAFT_TOKENS)

    def _choose_maker(
        self, end: JudgedRow, kept: _Speculation, looked_up: tuple[int, ...]
    ) -> Maker | None:
        num_wanted = end.row.num_drafts_wanted
        if not num_wanted or not end.wants_drafts:
            return None
        if not looked_up:
            return None if self._drafter is None else "mtp"
        num_guessed = min(len(looked_up), num_wanted)
        if self._drafter is None or kept.prefers_lookup(num_guessed, num_wanted):
            return "lookup"
        return "mtp"

    def _choose(self, ends: Sequence[JudgedRow]) -> Choose:
        """Return what chooses drafts by their logits."""

        def choose(
            logits_BV: Tensor, active: Sequence[int], drafts: Sequence[Sequence[int]]
        ) -> list[int]:
            wanted = [_wanted(ends[i], so_far) for i, so_far in zip(active, drafts, strict=True)]
            return self._sampler.draft(logits_BV, wanted)

        return choose

    def _keep(
        self,
        end: JudgedRow,
        kept: _Speculation,
        maker: Maker | None,
        looked_up: tuple[int, ...],
    ) -> None:
        kept.learn(end)
        kept.made_by, kept.looked_up = maker, looked_up
        # a text of which it did not see every token (a warm-up's) is of no use to it
        lookup = kept.lookup
        if lookup is not None and len(lookup) == end.position - end.num_accepted:
            lookup.extend(end.new_token_ids)


def _draft_input(end: JudgedRow, kept: _Speculation, maker: Maker | None) -> DraftInput:
    """Return what the drafter is told of a text; it guesses only if it is the maker."""
    row, asks, num_accepted = end.row, maker == "mtp", end.num_accepted
    position = end.position
    return DraftInput(
        sequence_id=row.sequence_id,
        token_ids=end.new_token_ids if asks else end.accepted,
        start=position - num_accepted,
        num_wrong=row.num_drafts - num_accepted,
        hidden_row=end.hidden_row - num_accepted,
        block_ids=row.block_ids,
        num_wanted=row.num_drafts_wanted if asks else 0,
        draw=kept.draw if position + 1 >= kept.drawn_from else None,
    )


def _wanted(end: JudgedRow, drafts: Sequence[int]) -> SampleRequest:
    """Ask for the token after the drafts; the state has not seen the text's last tokens."""
    return SampleRequest(end.state, end.position + 1 + len(drafts), (*end.new_token_ids, *drafts))


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
