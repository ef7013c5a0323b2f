"""The engine without a process: messages in, one step at a time, outputs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import BinaryIO

from whalepod.mtp.depth import Depth, FixedDepth
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import Plan, RowResult, SequenceOutput, StepResult
from whalepod.scheduler.request import Request
from whalepod.scheduler.scheduler import Scheduler
from whalepod.scheduler.stats import Stats
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.grammar_queue import GrammarQueue
from whalepod.server.engine.input_processor import InputProcessor
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampling_state import SamplingState
from whalepod.server.engine.speculation import step_record
from whalepod.server.messages import (
    STATS_INTERVAL_US,
    Abort,
    EngineInfo,
    Ping,
    Pong,
    Recall,
    Recalled,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    ToGateway,
)
from whalepod.server.structured.interface import GrammarError, Matcher

logger = logging.getLogger(__name__)


class EngineCore:
    """Owns the scheduler and the runner, and turns messages into steps and steps into messages.

    The loop around it is `receive(messages)`, then `step()`. A step that raises is run once more;
    when that fails too the requests in it end with an error, and the engine goes on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        *,
        depth: Depth | None = None,
        seed: int = 0,
        grammars: GrammarStore | None = None,
        journal: BinaryIO | None = None,
    ) -> None:
        """Start idle.

        depth    chooses the number of drafts of each step, and may be replaced between two of
                 them; None: no drafts
        seed     starts the generator of the seeds of requests that bring none
        grammars compiles what requests constrain their answers to; None: such are refused
        journal  the file that the scheduler records to; flushed when idle, closed at the end
        """
        self.info = info
        self.runner = runner
        self.is_stopping = False
        self.may_sleep = True
        self.scheduler = scheduler
        self.depth = depth or FixedDepth(0)
        self._num_drafts = 0
        self._inputs = InputProcessor(info.vocab_size, seed)
        self._grammar_queue = GrammarQueue(grammars)
        self._journal = journal
        self._now_us = 0
        self._due = StatsDue()

    def reseed(self, seed: str) -> None:
        """Start the generator of the seeds of requests that bring none: ranks must not draw the
        same ones."""
        self._inputs.reseed(seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._grammar_queue)

    @property
    def stats(self) -> Stats:
        """Gauges and counters of now."""
        stats = self.scheduler.stats()
        stats.num_compiling = len(self._grammar_queue)
        stats.num_waiting += stats.num_compiling
        stats.num_speculative_tokens = self._num_drafts
        return stats

    def check(self) -> None:
        """Raise AssertionError unless every block and every sequence has exactly one owner."""
        self.scheduler.check()
        live = [len(self.scheduler.live_sequences(r)) for r in self.scheduler.request_ids]
        assert self.runner.num_sequences == sum(live), (
            f"the runner keeps {self.runner.num_sequences} sequences, {sum(live)} are alive"
        )

    def on_idle(self) -> None:
        """Use a pause: check the invariants, and put the journal on disk."""
        self.check()
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Close the journal and end the thread that compiles grammars."""
        self._grammar_queue.close()
        if self._journal is not None:
            self._journal.close()

    # -- messages in ----------------------------------------------------------------------------

    def receive(self, messages: Iterable[ToEngine]) -> list[ToGateway]:
        """Take messages in their order; return what is answered at once.

        These are refusals, pongs, and counters after an abort that leaves nothing to run.
        """
        replies: list[ToGateway] = []
        for message in messages:
            reply = self._receive(message)
            if reply is not None:
                replies.append(reply)
        return replies

    def _receive(self, message: ToEngine) -> ToGateway | None:
        match message:
            case Submit():
                return self._submit(message)
            case Abort(request_id=request_id, index=index):
                return self._abort(request_id, index)
            case Recall(request_id=request_id):
                return self._recall(request_id)
            case Ping(nonce=nonce):
                return Pong(nonce=nonce, stats=self.stats)
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
            case Shutdown():
                self.is_stopping = True
        return None

    def _submit(self, submit: Submit) -> Rejected | None:
        """Queue a request, or keep it until its grammar is compiled.

        All refusals are answered here: a queued request can fail, but is not refused.
        """
        try:
            self._take(submit)
        except RequestRejected as error:
            return Rejected(
                request_id=submit.request_id,
                code=error.code,
                message=error.message,
                param=error.param,
            )
        return None

    def _take(self, submit: Submit) -> None:
        if submit.request_id in self._grammar_queue:
            raise RequestRejected("invalid_request", f"request id {submit.request_id!r} is in use")
        try:
            request = self._inputs.take(submit)
            self.scheduler.check_request(request, num_coming=len(self._grammar_queue))
        except ValueError as error:
            raise RequestRejected("invalid_request", str(error)) from error
        constraint = submit.params.constraint
        if constraint is None:
            self._start(request, None)
        else:
            self._grammar_queue.add(request, constraint)
        self._due.at_once = True

    def admit_compiled(self) -> list[SequenceOutput]:
        """Queue the requests whose grammars are ready; return the failures of the others."""
        failures = []
        for request, future in self._grammar_queue.take_ready():
            try:
                matcher = future.result()
            except GrammarError as error:
                failures.append(_failed_output(request.request_id, str(error)))
            else:
                self._start(request, matcher)
        return failures

    def _start(self, request: Request, matcher: Matcher | None) -> None:
        self._note_clock()
        self.scheduler.add(request)
        self._due.at_once = True
        eos_token_ids, vocab_size = self.scheduler.eos_token_ids, self.info.vocab_size
        for sequence in request.sequences:
            state = SamplingState.of_sequence(sequence, eos_token_ids, matcher, vocab_size)
            self.runner.add(sequence.sequence_id, state)

    def _note_clock(self) -> None:
        self._now_us = time.monotonic_ns() // 1000
        self.scheduler.note_clock(self._now_us)

    def _abort(self, request_id: str, index: int | None = None) -> StepOutputs | None:
        """Free a request, or one answer of a queued one; without a step to come, say here what the
        counters are now."""
        self._due.at_once = True
        if index is None:
            self._grammar_queue.discard(request_id)
        live = self.scheduler.live_sequences(request_id)
        ending = [sequence for sequence in live if index in (None, sequence.index)]
        self.scheduler.cancel(request_id, index)
        for sequence in ending:
            self.runner.drop(sequence.sequence_id)
        if self.has_work or not ending:
            return None
        return StepOutputs(outputs=(), stats=self.stats)

    def _recall(self, request_id: str) -> Recalled | None:
        if request_id not in self._grammar_queue and not self.scheduler.is_queued(request_id):
            return None
        self._abort(request_id)
        return Recalled(request_id=request_id)

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> StepOutputs | None:
        """Run one step and return its outputs, perhaps none; None when nothing could run."""
        outputs = self._step() if self.has_work else None
        self.may_sleep = outputs is None
        return outputs

    def _step(self) -> StepOutputs | None:
        if self._grammar_queue and not self.scheduler.has_work:
            self._grammar_queue.wait()
        outputs = self.admit_compiled()
        if not self.scheduler.has_work:
            return StepOutputs(outputs=tuple(outputs), stats=self.stats)
        plan = self.plan(self.depth.choose())
        if plan is None:
            return StepOutputs(outputs=tuple(outputs), stats=self.stats) if outputs else None
        plan, result = self._run(plan)
        if self.runner.makes_drafts:
            self.depth.observe(step_record(plan, result))
        outputs += self.finish(result)
        stats = self.stats if self._due.is_due(self._now_us) else None
        return StepOutputs(outputs=tuple(outputs), stats=stats)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammars or for their first admission."""
        return len(self._grammar_queue) + self.scheduler.num_queued_requests

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._grammar_queue)

    def count_tokens_at_most(self) -> int:
        """Return a bound on the tokens of the next step; 0: nothing can run."""
        return self.scheduler.count_tokens_at_most()

    def plan(self, num_drafts: int, max_tokens: int | None = None) -> Plan | None:
        """Decide what the next step computes; `finish`, `fail` or `give_up` ends it.

        num_drafts  guesses that each row is asked for
        max_tokens  a bound that was announced; None: as many as the limits allow
        """
        self._note_clock()
        self._num_drafts = num_drafts
        return self.scheduler.step(num_drafts, max_tokens)

    def finish(self, result: StepResult) -> list[SequenceOutput]:
        """Take the results of the step in flight; keep nothing of what ended with it."""
        outputs = self.scheduler.finish(result)
        for output in outputs:
            if output.finish_reason is not None:
                self.runner.drop(output.sequence_id)
                self._due.at_once = True
        return outputs

    def fail(self, plan: Plan) -> None:
        """Keep nothing of the step in flight: its tokens are planned again."""
        self.scheduler.finish_failed(plan.step)

    def give_up(self, plan: Plan, error: Exception) -> list[SequenceOutput]:
        """End the requests of the step in flight with an error."""
        logger.error("step %d failed again: its requests end: %r", plan.step, error)
        return self.finish(_failed_result(plan))

    def refuse_all(self, code: str, message: str) -> list[ToGateway]:
        """Drop every request and say why; none may be in a step."""
        request_ids = [*self._grammar_queue, *self.scheduler.request_ids]
        for request_id in request_ids:
            self._abort(request_id)
        return [Rejected(request_id=r, code=code, message=message) for r in request_ids]

    def _run(self, plan: Plan) -> tuple[Plan, StepResult]:
        """Run a step, once more if it fails. Returns the plan now in flight and its result."""
        try:
            return plan, self.runner.run(plan)
        except Exception:
            logger.exception("step %d failed and is run again", plan.step)
        self.fail(plan)
        again = self.scheduler.step(self._num_drafts)
        assert again is not None, f"step {plan.step} failed and cannot be planned again"
        try:
            return again, self.runner.run(again)
        except Exception:
            logger.exception("step %d failed again: its requests end", again.step)
            return again, _failed_result(again)


class StatsDue:
    """When a step's outputs bring the counters along: if requests came or went (`at_once`), else
    every STATS_INTERVAL_US."""

    def __init__(self) -> None:
        self.at_once = True
        self._due_us = 0

    def is_due(self, now_us: int) -> bool:
        """Return whether to send them now; the next time is counted from now then."""
        if not self.at_once and now_us < self._due_us:
            return False
        self.at_once, self._due_us = False, now_us + STATS_INTERVAL_US
        return True


def _failed_output(request_id: str, error: str) -> SequenceOutput:
    """Return the end of a request that was taken and cannot be run."""
    return SequenceOutput(
        sequence_id=-1, request_id=request_id, index=0, finish_reason="error", error=error
    )


def _failed_result(plan: Plan) -> StepResult:
    error = "the engine failed at this step; its log says why"  # its own words are not for clients
    rows = tuple([RowResult(sequence_id=row.sequence_id, error=error) for row in plan.rows])
    return StepResult(step=plan.step, rows=rows)
