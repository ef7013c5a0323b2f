"""Runs a plan: copies, one forward pass, logits where they are wanted, the next tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row, RowResult, StepResult, TokenLogprob
from whalepod.scheduler.request import Sequence
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.grammar import GrammarState
from whalepod.server.engine.sampler import Sampler, Wanted, logprobs
from whalepod.server.engine.sampling_state import SamplingState, seed_of_branch
from whalepod.server.engine.scripted import Script, ScriptError

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits exist at a time: a row of V3's vocabulary takes half a MiB."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        """Return the hidden states `[T, H]` after the final norm; cache rows are written."""
        ...

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return f32 logits `[B, V]`."""
        ...


@dataclass(slots=True, kw_only=True)
class RunnerSequence:
    """What the runner knows of one sequence beside its rows."""

    state: SamplingState
    wants_prompt_logprobs: bool = False
    script: Script | None = None

    @property
    def params(self) -> SamplingParams:
        return self.state.params


def new_runner_sequence(
    sequence: Sequence,
    eos_token_ids: frozenset[int],
    script: Script | None = None,
    grammar: GrammarState | None = None,
) -> RunnerSequence:
    """Return what the runner needs of a sequence that the scheduler has queued."""
    request, params = sequence.request, sequence.request.params
    assert params.seed is not None, "the seed is fixed when a request is taken"
    state = SamplingState(
        params,
        request.prompt_token_ids,
        seed_of_branch(params.seed, sequence.index),
        eos_token_ids.union(params.stop_token_ids),
        grammar,
    )
    return RunnerSequence(
        state=state, wants_prompt_logprobs=sequence.reports_prompt_logprobs, script=script
    )


@dataclass(slots=True)
class _Rows:
    """Which rows of the hidden states a plan row owns, and which of them yield a token."""

    row: Row
    sequence: RunnerSequence
    begin: int

    @property
    def wanted_positions(self) -> range:
        """Positions of the next tokens: one, with drafts one more for each of them."""
        end = self.row.start + len(self.row.token_ids)
        return range(end - self.row.num_drafts, end + 1) if self.row.sample else range(0)

    def hidden_row(self, position: int) -> int:
        """Return the row of hidden states that predicts the token at `position`."""
        return self.begin + position - 1 - self.row.start


class Runner:
    """Owns the model's cache rows and the sequences' sampling states; one `run` per step."""

    def __init__(
        self, model: Model, cache: LatentCache, sampler: Sampler, batches: BatchBuilder
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._batches = batches
        self._sequences: dict[int, RunnerSequence] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def add(self, sequence_id: int, sequence: RunnerSequence) -> None:
        """Take a sequence before its first row."""
        self._sequences[sequence_id] = sequence

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that ended."""
        self._sequences.pop(sequence_id, None)
        self._batches.forget(sequence_id)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Compute the plan's rows; the results come in their order.

        A row whose logits are not finite, or whose script fails, carries an error; what fails the
        whole step is raised, and the step may be run again.
        """
        started = time.perf_counter_ns()
        for copy in plan.copies:
            self._cache.copy_rows(copy.source, copy.target, copy.num_tokens)
        results = self._run_rows(plan.rows) if plan.rows else ()
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return StepResult(step=plan.step, rows=results, step_time_us=elapsed_us)

    def _run_rows(self, rows: SequenceOf[Row]) -> tuple[RowResult, ...]:
        hidden_TH = self._model.forward(self._batches.build(rows), self._cache)
        spans, begin = [], 0
        for row in rows:
            sequence = self._sequences[row.sequence_id]
            num_accepted = len(row.token_ids) - row.num_drafts
            sequence.state.observe(row.start, row.token_ids[:num_accepted])
            spans.append(_Rows(row, sequence, begin))
            begin += len(row.token_ids)
        sampled = self._sample(hidden_TH, spans)
        return tuple([
            self._result(span, choices, hidden_TH)
            for span, choices in zip(spans, sampled, strict=True)
        ])  # fmt: skip

    def _sample(self, hidden_TH: Tensor, spans: list[_Rows]) -> list[list[_Choice]]:
        """Choose a token at each wanted position of each row, all rows in one pass."""
        wanted, hidden_rows = [], []
        for span in spans:
            for position in span.wanted_positions:
                wanted.append(Wanted(span.sequence.state, position))
                hidden_rows.append(span.hidden_row(position))
        if not wanted:
            return [[] for _ in spans]
        every_row = len(hidden_rows) == hidden_TH.shape[0]
        logits_BV = self._model.logits(hidden_TH if every_row else hidden_TH[hidden_rows])
        samples = self._sampler.sample(logits_BV, wanted)
        choices = iter([
            _Choice(logits_BV, index, token_id, logprob, is_fault)
            for index, (token_id, logprob, is_fault) in enumerate(
                zip(samples.token_ids, samples.logprobs, samples.is_fault, strict=True)
            )
        ])  # fmt: skip
        return [[next(choices) for _ in span.wanted_positions] for span in spans]

    def _result(self, span: _Rows, choices: list[_Choice], hidden_TH: Tensor) -> RowResult:
        sequence_id = span.row.sequence_id
        if any(choice.is_fault for choice in choices):
            return RowResult(sequence_id=sequence_id, error="the model's logits are not finite")
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if span.sequence.wants_prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(span, hidden_TH)
        accepted = _accepted_run(span.row, choices)
        if span.sequence.script is not None and choices:
            try:
                accepted = [_scripted(span, choices[0])]
            except ScriptError as error:
                return RowResult(sequence_id=sequence_id, error=str(error))
        return RowResult(
            sequence_id=sequence_id,
            token_ids=tuple([choice.token_id for choice in accepted]),
            logprobs=tuple([c.logprob for c in accepted if c.logprob is not None]),
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, span: _Rows, hidden_TH: Tensor) -> tuple[TokenLogprob, ...]:
        """Score the prompt tokens that follow the row's tokens."""
        state, start = span.sequence.state, span.row.start
        num_top = state.params.prompt_logprobs or 0
        end = min(start + len(span.row.token_ids) + 1, state.num_prompt_tokens)
        found: list[TokenLogprob] = []
        for first in range(start + 1, end, PROMPT_LOGPROB_ROWS):
            next_ids = state.prompt_token_ids[first : min(first + PROMPT_LOGPROB_ROWS, end)]
            begin = span.hidden_row(first)
            logits_TV = self._model.logits(hidden_TH[begin : begin + len(next_ids)])
            found += logprobs(logits_TV, next_ids, num_top)
        return tuple(found)


@dataclass(slots=True)
class _Choice:
    """The token chosen at one position, and where its logits are."""

    logits_BV: Tensor
    index: int
    token_id: int
    logprob: TokenLogprob | None
    is_fault: bool


def _accepted_run(row: Row, choices: list[_Choice]) -> list[_Choice]:
    """Return the choices up to the first that is not the draft: acceptance by coupling.

    The choice at a position is the model's own, so a draft is right iff it equals it; the first
    choice that differs, or the one after the last draft, is the step's last token.
    """
    drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
    for num_accepted, draft in enumerate(drafts):
        if choices[num_accepted].token_id != draft:
            return choices[: num_accepted + 1]
    return choices


def _scripted(span: _Rows, choice: _Choice) -> _Choice:
    """Replace the sampler's choice by the token of the script, scored with the same logits."""
    script, state = span.sequence.script, span.sequence.state
    assert script is not None
    num_generated = span.row.start + len(span.row.token_ids) - state.num_prompt_tokens
    token_id, logprob = script.token(num_generated), choice.logprob
    if logprob is not None:
        (logprob,) = logprobs(choice.logits_BV[choice.index][None], [token_id], len(logprob.top))
    return replace(choice, token_id=token_id, logprob=logprob)
