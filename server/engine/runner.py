"""Runs a plan: copies, one forward pass, logits where they are wanted, the next tokens, drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.scheduler.plan import Plan, Row, RowResult, StepResult, TokenLogprob
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.logprobs import logprobs
from whalepod.server.engine.sampler import Sampler, SamplerOutput
from whalepod.server.engine.sampling_state import SampleRequest, SamplingState
from whalepod.server.engine.speculation import JudgedRow, Speculator

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits exist at a time: a row of V3's vocabulary takes half a MiB."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        """Return the hidden states `[T, H]` after the final norm; cache rows are written."""
        ...

    def join(self) -> None:
        """Take part in a step of other ranks, without tokens of this one."""
        ...

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return f32 logits `[B, V]`."""
        ...


@dataclass(slots=True)
class _Rows:
    """Which rows of the hidden states a plan row owns, and which of the step's choices are its."""

    row: Row
    state: SamplingState
    begin: int
    drafts: SequenceOf[int]
    first_choice: int = 0
    token_ids: tuple[int, ...] = ()
    """What the row yields, once drafts are judged."""
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    def hidden_row(self, position: int) -> int:
        """Return the row of hidden states that predicts the token at `position`."""
        return self.begin + position - 1 - self.row.start

    def text_end(self) -> JudgedRow:
        """Return where the text ends. One that failed gets no drafts."""
        num_true = len(self.row.token_ids) - self.row.num_drafts + max(len(self.token_ids) - 1, 0)
        return JudgedRow(
            row=self.row,
            state=self.state,
            num_true=num_true,
            token_id=self.token_ids[-1] if self.token_ids else None,
            hidden_row=self.begin + num_true - 1,
            wants_drafts=bool(self.token_ids) and not self.error,
        )


class Runner:
    """Owns the model's cache rows and the sequences' sampling states; one `run` per step."""

    def __init__(
        self,
        model: Model,
        cache: LatentCache,
        sampler: Sampler,
        batches: BatchBuilder,
        speculator: Speculator | None = None,
    ) -> None:
        self.model = model
        self._cache = cache
        self.sampler = sampler
        self.batches = batches
        self._speculator = speculator
        self._states: dict[int, SamplingState] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._states)

    @property
    def makes_drafts(self) -> bool:
        """Whether drafts are made here."""
        return self._speculator is not None

    @property
    def draft_makers(self) -> tuple[str, ...]:
        """Who guesses ahead: "mtp", "lookup"."""
        return () if self._speculator is None else self._speculator.makers

    def add(self, sequence_id: int, state: SamplingState) -> None:
        """Take a sequence before its first row."""
        self._states[sequence_id] = state

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that ended."""
        self._states.pop(sequence_id, None)
        if self._speculator is not None:
            self._speculator.forget(sequence_id)

    @torch.inference_mode()
    def join(self, num_passes: int) -> None:
        """Take part in a step of other ranks, in which the draft layer runs `num_passes` times."""
        self.model.join()
        if self._speculator is not None:
            self._speculator.join(num_passes)

    @torch.inference_mode()
    def run(self, plan: Plan, num_passes: int = 0) -> StepResult:
        """Compute the plan's rows; the results come in their order.

        num_passes  how often the draft layer runs in this step on every rank of a group

        A row whose logits are not finite carries an error; what fails the whole step is raised,
        and the step may be run again.
        """
        started = time.perf_counter_ns()
        for copy in plan.copies:
            self._cache.copy_rows(copy.source, copy.target, copy.num_tokens)
            if self._speculator is not None:
                self._speculator.note_copy(copy)
        if self._speculator is not None:
            for sequence_id in plan.preempted:
                self._speculator.note_preempted(sequence_id)
        results, draft_ns = self._run_rows(plan.rows, num_passes) if plan.rows else ((), 0)
        step_time_us = (time.perf_counter_ns() - started) // 1000
        return StepResult(plan.step, results, step_time_us, draft_ns // 1000)

    def _run_rows(
        self, rows: SequenceOf[Row], num_passes: int
    ) -> tuple[tuple[RowResult, ...], int]:
        """Return the results of rows and the nanoseconds spent on drafts."""
        batch = self.batches.build(rows)
        hidden_TH = self.model.forward(batch, self._cache)
        spans = self._spans(rows)
        if self._speculator is not None:
            self._speculator.note_forward(rows, batch, hidden_TH)
        self._choose_tokens(hidden_TH, spans)
        results = [self._result(span, hidden_TH) for span in spans]
        if self._speculator is None:
            return tuple(results), 0
        started = time.perf_counter_ns()
        _add_drafts(self._speculator, results, spans, num_passes)
        return tuple(results), time.perf_counter_ns() - started

    def _spans(self, rows: SequenceOf[Row]) -> list[_Rows]:
        """Find the runner's part of each row, and let its sampling state see the row's tokens."""
        spans, begin = [], 0
        for row in rows:
            state, token_ids = self._states[row.sequence_id], row.token_ids
            num_own = len(token_ids) - row.num_drafts
            state.observe(row.start, token_ids[:num_own])
            spans.append(_Rows(row, state, begin, token_ids[num_own:]))
            begin += len(token_ids)
        return spans

    def _choose_tokens(self, hidden_TH: Tensor, spans: list[_Rows]) -> None:
        """Choose a token after each row that samples, and after each of its drafts, all in one
        pass; then judge the drafts."""
        wanted: list[SampleRequest] = []
        hidden_rows: list[int] = []
        for span in spans:
            span.first_choice = len(wanted)
            if span.row.sample:
                stop = span.begin + len(span.row.token_ids)
                hidden_rows += range(stop - 1 - len(span.drafts), stop)
                _want(span, wanted)
        if not wanted:
            return
        every_row = len(hidden_rows) == hidden_TH.shape[0]
        logits_BV = self.model.logits(hidden_TH if every_row else hidden_TH[hidden_rows])
        samples = self.sampler.sample(logits_BV, wanted)
        for span in spans:
            if span.row.sample:
                _judge(span, samples)

    def _result(self, span: _Rows, hidden_TH: Tensor) -> RowResult:
        sequence_id = span.row.sequence_id
        if span.error is not None:
            return RowResult(sequence_id, error=span.error)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if span.state.wants_prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(span, hidden_TH)
        return RowResult(sequence_id, span.token_ids, span.logprobs, prompt_logprobs)

    def _prompt_logprobs(self, span: _Rows, hidden_TH: Tensor) -> tuple[TokenLogprob, ...]:
        """Score the prompt tokens that follow the row's tokens."""
        state, start = span.state, span.row.start
        num_top = state.params.prompt_logprobs or 0
        end = min(start + len(span.row.token_ids) + 1, state.num_prompt_tokens)
        found: list[TokenLogprob] = []
        for first in range(start + 1, end, PROMPT_LOGPROB_ROWS):
            next_ids = state.prompt_token_ids[first : min(first + PROMPT_LOGPROB_ROWS, end)]
            begin = span.hidden_row(first)
            logits_TV = self.model.logits(hidden_TH[begin : begin + len(next_ids)])
            found += logprobs(logits_TV, next_ids, num_top)
        return tuple(found)


def _add_drafts(
    speculator: Speculator, results: list[RowResult], spans: list[_Rows], num_passes: int
) -> None:
    """Put drafts into the results. What is known of the texts grows here, at the end of a step, so
    that one that is run again finds what it found the first time."""
    ends = [span.text_end() for span in spans]
    for i, drafts in enumerate(speculator.draft(ends, num_passes)):
        if drafts:
            results[i] = results[i]._replace(draft_token_ids=tuple(drafts))
        if accepted := ends[i].accepted:
            spans[i].state.observe(ends[i].position - len(accepted), accepted)


def _want(span: _Rows, wanted: list[SampleRequest]) -> None:
    """Ask for a token after each number of drafts, as if they were right: if one is not,
    what comes after it is not looked at."""
    state, drafts = span.state, span.drafts
    position = span.row.start + len(span.row.token_ids) - len(drafts)
    for index in range(len(drafts) + 1):
        wanted.append(SampleRequest(state, position + index, drafts[:index]))


def _judge(span: _Rows, samples: SamplerOutput) -> None:
    """Keep the choices up to the first that is not the draft; it is the row's last token."""
    first = span.first_choice
    num_accepted = 0
    if span.drafts:
        num_accepted = count_accepted(span.drafts, samples.token_ids[first:])
    stop = first + num_accepted + 1
    span.token_ids = tuple(samples.token_ids[first:stop])
    if samples.logprobs[first] is not None:
        span.logprobs = tuple([x for x in samples.logprobs[first:stop] if x is not None])
    if True in samples.is_fault[first:stop]:
        span.error = "the model's logits are not finite"


def count_accepted(drafts: SequenceOf[int], choices: SequenceOf[int]) -> int:
    """Count the drafts that stand: those before the first that was not chosen.

    `choices[i]` was chosen at the position of `drafts[i]`, given all drafts before it. The step
    yields `choices[: count + 1]`: what was chosen instead of the first wrong draft, or after the
    last right one, is a token of the answer too.
    """
    for count, draft in enumerate(drafts):
        if choices[count] != draft:
            return count
    return len(drafts)
