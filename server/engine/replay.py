"""Runs a recorded journal again, model included, and finds the first step that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

from whalepod.scheduler.journal import Divergence, replay
from whalepod.scheduler.plan import Plan, RowResult, SequenceOutput, StepResult
from whalepod.scheduler.request import Request
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampling_state import SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first row that the model computed otherwise than when it was recorded."""

    step: int
    recorded: RowResult
    computed: RowResult


def replay_with_model(file: BinaryIO, runner: Runner) -> Difference | Divergence | None:
    """Feed a journal to a fresh scheduler and run its steps; None when all is as recorded.

    Exact for the same model, machine, threads and versions. `runner` is idle, and its cache has
    at least the recorded number of blocks. Steps that failed are not run; rows that ended with an
    error, and texts with a grammar cannot be repeated and are not
    compared.
    """
    made: list[_ExecutingScheduler] = []

    def new_scheduler(*arguments: Any, **settings: Any) -> Scheduler:
        made.append(_ExecutingScheduler(runner, *arguments, **settings))
        return made[0]

    divergence = replay(file, new_scheduler)
    return made[0].difference or divergence


class _ExecutingScheduler(Scheduler):
    """Takes recorded results, but computes each step as well and compares."""

    def __init__(self, runner: Runner, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.difference: Difference | None = None
        self._runner = runner
        self._plan: Plan | None = None
        self._sequence_ids: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        for sequence in request.sequences:
            state = SamplingState.of_sequence(sequence, self.eos_token_ids)
            self._runner.add(sequence.sequence_id, state)
        self._sequence_ids[request.request_id] = [s.sequence_id for s in request.sequences]

    def cancel(self, request_id: str, index: int | None = None) -> None:
        super().cancel(request_id, index)
        for number, sequence_id in enumerate(self._sequence_ids.get(request_id, ())):
            if index in (None, number):
                self._runner.drop(sequence_id)

    def step(self, num_drafts: int = 0, max_tokens: int | None = None) -> Plan | None:
        self._plan = super().step(num_drafts, max_tokens)
        return self._plan

    def finish(self, result: StepResult) -> list[SequenceOutput]:
        if self._plan is not None and self.difference is None:
            self._compare(result, self._runner.run(self._plan))
        outputs = super().finish(result)
        for output in outputs:
            if output.finish_reason is not None:
                self._runner.drop(output.sequence_id)
        return outputs

    def _compare(self, recorded: StepResult, computed: StepResult) -> None:
        for was, now in zip(recorded.rows, computed.rows, strict=True):
            if was.error is None and was != now and not self._is_constrained(was.sequence_id):
                self.difference = Difference(step=recorded.step, recorded=was, computed=now)
                return

    def _is_constrained(self, sequence_id: int) -> bool:
        return self.sequence(sequence_id).request.params.constraint is not None
