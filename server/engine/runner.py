"""Runs a plan: copies, one forward pass, logits where they are wanted, the next tokens, drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.mtp.verify import count_accepted
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row, RowResult, StepResult, TokenLogprob
from whalepod.scheduler.request import Sequence
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.grammar import GrammarState
from whalepod.server.engine.sampler import Sampler, Wanted, logprobs
from whalepod.server.engine.sampling_state import SamplingState, seed_of_branch
from whalepod.server.engine.scripted import Script, ScriptError
from whalepod.server.engine.speculation import Speculator, TextEnd

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
    accepted: list[_Choice] = field(default_factory=list)
    """What the row yields, once drafts are judged."""
    error: str | None = None

    @property
    def drafts(self) -> SequenceOf[int]:
        return self.row.token_ids[len(self.row.token_ids) - self.row.num_drafts :]

    @property
    def wanted_positions(self) -> range:
        """Positions of the next tokens: one, with drafts one more for each of them."""
        end = self.row.start + len(self.row.token_ids)
        return range(end - self.row.num_drafts, end + 1) if self.row.sample else range(0)

    def hidden_row(self, position: int) -> int:
        """Return the row of hidden states that predicts the token at `position`."""
        return self.begin + position - 1 - self.row.start

    def text_end(self) -> TextEnd:
        """Return where the text ends. A scripted text, which the model would not write, and one
        that failed get no drafts."""
        num_true = len(self.row.token_ids) - self.row.num_drafts + max(len(self.accepted) - 1, 0)
        return TextEnd(
            row=self.row,
            state=self.sequence.state,
            num_true=num_true,
            token_id=self.accepted[-1].token_id if self.accepted else None,
            hidden_row=self.begin + num_true - 1,
            wants_drafts=bool(self.accepted) and not self.error and not self.sequence.script,
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
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._batches = batches
        self._speculator = speculator
        self._sequences: dict[int, RunnerSequence] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def makes_drafts(self) -> bool:
        """Whether anyone here guesses ahead."""
        return self._speculator is not None

    def add(self, sequence_id: int, sequence: RunnerSequence) -> None:
        """Take a sequence before its first row."""
        self._sequences[sequence_id] = sequence

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that ended."""
        self._sequences.pop(sequence_id, None)
        self._batches.forget(sequence_id)
        if self._speculator is not None:
            self._speculator.forget(sequence_id)

    @torch.inference_mode()
    def join(self, num_passes: int) -> None:
        """Take part in a step of other ranks, in which the draft layer runs `num_passes` times."""
        self._model.join()
        if self._speculator is not None:
            self._speculator.join(num_passes)

    @torch.inference_mode()
    def run(self, plan: Plan, num_passes: int = 0) -> StepResult:
        """Compute the plan's rows; the results come in their order.

        num_passes  how often the draft layer runs in this step on every rank of a group

        A row whose logits are not finite, or whose script fails, carries an error; what fails the
        whole step is raised, and the step may be run again.
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
        return StepResult(
            step=plan.step,
            rows=results,
            step_time_us=(time.perf_counter_ns() - started) // 1000,
            draft_time_us=draft_ns // 1000,
        )

    def _run_rows(
        self, rows: SequenceOf[Row], num_passes: int
    ) -> tuple[tuple[RowResult, ...], int]:
        """Return the results of rows and the nanoseconds spent on drafts."""
        batch = self._batches.build(rows)
        hidden_TH = self._model.forward(batch, self._cache)
        spans, begin = [], 0
        for row in rows:
            sequence = self._sequences[row.sequence_id]
            num_own = len(row.token_ids) - row.num_drafts
            sequence.state.observe(row.start, row.token_ids[:num_own])
            spans.append(_Rows(row, sequence, begin))
            begin += len(row.token_ids)
        if self._speculator is not None:
            self._speculator.note_forward(rows, batch, hidden_TH)
        for span, choices in zip(spans, self._sample(hidden_TH, spans), strict=True):
            _judge(span, choices)
        results = [self._result(span, hidden_TH) for span in spans]
        if self._speculator is None:
            return tuple(results), 0
        started = time.perf_counter_ns()
        _add_drafts(self._speculator, results, spans, num_passes)
        return tuple(results), time.perf_counter_ns() - started

    def _sample(self, hidden_TH: Tensor, spans: list[_Rows]) -> list[list[_Choice]]:
        """Choose a token at each wanted position of each row, all rows in one pass."""
        wanted, hidden_rows = [], []
        for span in spans:
            for index, position in enumerate(span.wanted_positions):
                wanted.append(self._wanted(span, index, position))
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

    def _wanted(self, span: _Rows, index: int, position: int) -> Wanted:
        """Ask for the token behind the first `index` drafts, as if they were right: if one is
        not, nobody looks at what comes behind it."""
        state, drafts = span.sequence.state, span.drafts
        if index == len(drafts) or not self._sampler.by_rejection:
            return Wanted(state, position, drafts[:index])
        log_q_V = None
        if self._speculator is not None:
            log_q_V = self._speculator.log_q(span.row, index)
        return Wanted(state, position, drafts[:index], drafts[index], log_q_V)

    def _result(self, span: _Rows, hidden_TH: Tensor) -> RowResult:
        sequence_id, accepted = span.row.sequence_id, span.accepted
        if span.error is not None:
            return RowResult(sequence_id=sequence_id, error=span.error)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if span.sequence.wants_prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(span, hidden_TH)
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


def _add_drafts(
    speculator: Speculator, results: list[RowResult], spans: list[_Rows], num_passes: int
) -> None:
    """Put drafts into the results. What is known of the texts grows here, at the end of a step, so
    that one that is run again finds what it found the first time."""
    ends = [span.text_end() for span in spans]
    for i, drafts in enumerate(speculator.draft(ends, num_passes)):
        if drafts:
            results[i] = replace(results[i], draft_token_ids=tuple(drafts))
        if accepted := ends[i].accepted:
            spans[i].sequence.state.observe(ends[i].position - len(accepted), accepted)


def _judge(span: _Rows, choices: list[_Choice]) -> None:
    """Keep the choices up to the first that is not the draft; it is the row's last token."""
    num_accepted = count_accepted(span.drafts, [choice.token_id for choice in choices])
    span.accepted = choices[: num_accepted + 1]
    if any(choice.is_fault for choice in span.accepted):
        span.error = "the model's logits are not finite"
    elif span.sequence.script is not None and choices:
        try:
            span.accepted = [_scripted(span, choices[0])]
        except ScriptError as error:
            span.error = str(error)


def _scripted(span: _Rows, choice: _Choice) -> _Choice:
    """Replace the sampler's choice by the token of the script, scored with the same logits."""
    script, state = span.sequence.script, span.sequence.state
    assert script is not None
    num_generated = span.row.start + len(span.row.token_ids) - state.num_prompt_tokens
    token_id, logprob = script.token(num_generated), choice.logprob
    if logprob is not None:
        (logprob,) = logprobs(choice.logits_BV[choice.index][None], [token_id], len(logprob.top))
    return replace(choice, token_id=token_id, logprob=logprob)
