"""An engine that steps together with the other ranks of its group.

Each turn of the loop: receive, tell the group the most that this rank could compute, hear what all
do, step with the others (with rows or without), send. A step that failed is still a step: who
failed keeps no token of it and plans the same ones again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from whalepod.ep_comm.dispatcher import Dispatcher
from whalepod.ep_comm.group import CallFailed
from whalepod.ep_comm.handshake import HandshakeError
from whalepod.mtp.stats import StepRecord
from whalepod.scheduler.plan import Plan, SequenceOutput, StepResult
from whalepod.scheduler.stats import Stats
from whalepod.server.cluster.balancing_messages import BalancingMessages
from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.group_member import GroupMember
from whalepod.server.cluster.lockstep import Park, Step
from whalepod.server.cluster.rank_record import RankRecord, StepOutcome
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.speculation import step_record
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.messages import (
    EngineInfo,
    PlaceExperts,
    Pong,
    Rejected,
    StepOutputs,
    Submit,
    ToEngine,
    ToGateway,
)

JOIN_POLL_S = 0.02
"""How often a rank looks whether all others are ready."""
MAX_FAILURES = 4
"""Steps in a row that raise on this rank before it ends: something is broken for good."""

logger = logging.getLogger(__name__)


class LockstepEngine:
    """Wraps an `EngineCore`; its loop is the same: `receive(messages)`, then `step()`.

    max_num_drafts    k max of the group
    return_timeout_s  how long requests wait while the group cannot compute; then they are refused
    begin_turn        called at the start of each step, before this rank looks at what others did
    """

    def __init__(
        self,
        core: EngineCore,
        member: GroupMember,
        dispatcher: Dispatcher,
        *,
        max_num_drafts: int,
        return_timeout_s: float,
        begin_turn: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._member = member
        self._dispatcher = dispatcher
        self._max_num_drafts = max_num_drafts
        self._return_timeout_s = return_timeout_s
        self._begin_turn = begin_turn
        self._clock = clock
        self._is_parked = False
        self._outcome = StepOutcome.DONE
        self._last_step = StepRecord()
        self._num_failures = 0
        self._stalled_since: float | None = None
        self._stall_reason = ""
        self._has_run = False
        self.may_sleep = False
        self._balancing = BalancingMessages(dispatcher.balancer)

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    @property
    def is_stopping(self) -> bool:
        return self._core.is_stopping

    def on_idle(self) -> None:
        self._core.on_idle()

    def close(self) -> None:
        """Leave the group: the others' connections to this rank end."""
        self._core.close()
        self._dispatcher.group.transport.close()

    def join(self, should_stop: Callable[[], bool], timeout_s: float) -> None:
        """Become a member and wait until all ranks are. Raises StartupError."""
        self._member.join()
        told = "told to stop before all ranks were ready"
        deadline = Deadline(timeout_s, lambda: told if should_stop() else None)
        try:
            while self._member.missing:
                self.step()
                missing = f"ranks {self._member.missing} to load their weights"
                if not deadline.allows(missing):
                    raise StartupError(f"waited {timeout_s:g} s for {missing}")
                time.sleep(JOIN_POLL_S)
        except (HandshakeError, GroupLost) as error:
            raise StartupError(str(error)) from error

    # -- messages in ----------------------------------------------------------------------------

    def receive(self, messages: Iterable[ToEngine]) -> list[ToGateway]:
        """Take messages; while the group has been stalled for too long, refuse new requests."""
        replies: list[ToGateway] = []
        excuse = self._excuse()
        for message in messages:
            if excuse and isinstance(message, Submit):
                request_id = message.request_id
                replies.append(Rejected(request_id=request_id, code="engine_lost", message=excuse))
            elif isinstance(message, PlaceExperts):
                self._balancing.place(message)
            else:
                replies += self._core.receive([message])
        if excuse and self._core.has_work:
            logger.error("all requests of rank %d are refused: %s", self._member.rank, excuse)
            replies += self._core.refuse_all("engine_lost", excuse)
        return [
            replace(reply, stats=self._stats) if isinstance(reply, Pong | StepOutputs) else reply
            for reply in replies
        ]

    @property
    def _stats(self) -> Stats:
        waited_ms = tuple(int(ms) for ms in self._dispatcher.group.wait_ms_R.tolist())
        return self._balancing.add_to(replace(self._core.stats, waited_ms=waited_ms))

    def _excuse(self) -> str:
        """Return why requests are refused; "": they wait, or can run."""
        since, timeout_s = self._stalled_since, self._return_timeout_s
        if since is None or self._clock() - since <= timeout_s:
            return ""
        return f"{self._stall_reason}, and this did not change within {timeout_s:g} s: retry later"

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> StepOutputs | None:
        """Take one turn. None: there is nothing to send; `may_sleep` says whether to wait for a
        message, or for another rank's event."""
        self._begin_turn()
        self.may_sleep, self._has_run = False, False
        outputs = self._core.admit_compiled()
        outputs += self._take_turn()
        if not outputs and not self._has_run:
            return None
        experts = self._balancing.news(is_speaker=self._member.is_lowest)
        return StepOutputs(outputs=tuple(outputs), stats=self._stats, experts=experts)

    def _take_turn(self) -> Sequence[SequenceOutput]:
        member = self._member
        if not member.is_current:
            member.adopt()
            self._is_parked = False
        if not member.has_all_experts:
            ranks = ", ".join(str(rank) for rank in member.missing)
            self._note_stall(f"rank {ranks} of the group is gone, and its experts with it")
            self.may_sleep = True
            return ()
        num_tokens = self._core.count_tokens_at_most()
        if self._is_parked and not num_tokens and not member.has_begun():
            self.may_sleep = not self._core.num_compiling
            return ()
        record = RankRecord(
            outcome=self._outcome,
            num_tokens=num_tokens,
            num_drafts=self._max_num_drafts if num_tokens else 0,
            last_step=self._last_step,
        )
        decision = member.agree(record, is_asleep=self._is_parked)
        self._is_parked = isinstance(decision, Park)
        if decision is None:
            return ()
        self._outcome, self._last_step = StepOutcome.DONE, StepRecord()
        if isinstance(decision, Step):
            return self._run(decision, num_tokens)
        self._stalled_since = None
        return ()

    def _run(self, step: Step, num_tokens: int) -> Sequence[SequenceOutput]:
        """Compute what this rank has, and its experts' part of what the others have."""
        plan = self._core.plan(step.num_drafts, num_tokens) if num_tokens else None
        self._dispatcher.enter(step.mode)
        try:
            result = self._compute(plan, step.num_drafts)
        except CallFailed as error:
            logger.error("rank %d: the step failed in %s", self._member.rank, error)
            self._note_stall(f"the group's step failed ({error})")
            return self._fail(plan, StepOutcome.FAILED_ELSEWHERE)
        except Exception as error:
            logger.exception("rank %d: the step failed", self._member.rank)
            return self._fail_here(plan, error)
        self._num_failures, self._stalled_since = 0, None
        if plan is None or result is None:
            return ()
        self._has_run = True
        self._last_step = step_record(plan, result)
        return self._core.finish(result)

    def _compute(self, plan: Plan | None, num_drafts: int) -> StepResult | None:
        """Run the plan; whatever is raised here, the other ranks hear of it at once."""
        try:
            if plan is not None:
                return self._core.runner.run(plan, num_drafts)
            self._core.runner.join(num_drafts)
        except BaseException:
            self._dispatcher.abort()
            raise
        return None

    def _fail(self, plan: Plan | None, outcome: StepOutcome) -> Sequence[SequenceOutput]:
        self._outcome = outcome
        if plan is not None:
            self._core.fail(plan)
        return ()

    def _fail_here(self, plan: Plan | None, error: Exception) -> Sequence[SequenceOutput]:
        """Let the step be tried once more; the second time its requests end."""
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise error
        if self._num_failures == 1 or plan is None:
            return self._fail(plan, StepOutcome.FAILED_HERE)
        self._outcome = StepOutcome.FAILED_HERE
        return self._core.give_up(plan, error)

    def _note_stall(self, reason: str) -> None:
        self._stall_reason = reason
        if self._stalled_since is None:
            self._stalled_since = self._clock()
