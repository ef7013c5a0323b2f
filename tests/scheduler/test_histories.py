"""Random histories: whatever happens, every answer is its reference and no block is lost."""

from __future__ import annotations

import io
from dataclasses import dataclass

from hypothesis import event, given, strategies as st

from tests.scheduler.simulated_engine import (
    EOS,
    SimulatedEngine,
    make_request,
    reference_answer,
)
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.journal import RecordedScheduler, replay
from whalepod.scheduler.limits import RequestRejected, max_total_tokens
from whalepod.scheduler.request import Request

BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Arrival:
    base: int
    num_shared: int
    tail: tuple[int, ...]
    n: int
    max_tokens: int | None
    min_tokens: int
    priority: int
    salt: str
    ignore_eos: bool
    stop: tuple[int, ...]
    prompt_logprobs: bool

    def prompt(self) -> tuple[int, ...]:
        shared = tuple(1 + (i * (self.base + 2) + i // 3) % 5 for i in range(self.num_shared))
        return (*shared, *self.tail) or (1,)

    def request(self, request_id: str) -> Request:
        min_tokens = self.min_tokens if self.max_tokens is None else 0
        return make_request(
            request_id,
            self.prompt(),
            n=self.n,
            max_tokens=self.max_tokens,
            min_tokens=min_tokens,
            priority=self.priority,
            salt=self.salt,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop,
            prompt_logprobs=0 if self.prompt_logprobs else None,
        )


@dataclass(frozen=True)
class Cancel:
    which: int
    index: int | None
    """One answer only; None: all of the request."""


@dataclass(frozen=True)
class Step:
    """One step, and what happens before its end."""

    outcome: str
    cancels: tuple[Cancel, ...]
    arrivals: tuple[Arrival, ...]
    which: int


@dataclass(frozen=True)
class History:
    config: SchedulerConfig
    num_blocks: int
    num_drafts: int
    events: tuple[Arrival | Cancel | Step, ...]


tokens = st.integers(1, 5)
arrivals = st.builds(
    Arrival,
    base=st.integers(0, 1),
    num_shared=st.integers(0, 18),
    tail=st.lists(tokens, max_size=5).map(tuple),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.sampled_from([None, 0, 1, 2, 5, 9, 14]),
    min_tokens=st.sampled_from([0, 0, 3]),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    salt=st.sampled_from(["", "", "", "pepper"]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), (), (3,)]),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)
indices = st.integers(0, 7)
cancels = st.builds(Cancel, indices, st.sampled_from([None, 0, 1, 2]))
steps = st.builds(
    Step,
    outcome=st.sampled_from(["ok", "ok", "ok", "ok", "failed", "row error"]),
    cancels=st.one_of(st.just(()), st.just(()), st.lists(cancels, max_size=2).map(tuple)),
    arrivals=st.one_of(st.just(()), st.just(()), arrivals.map(lambda arrival: (arrival,))),
    which=indices,
)
configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([5, 6, 9, 16, 64]),
    max_model_len=st.sampled_from([24, 40]),
    max_num_queued_reqs=st.sampled_from([3, 100]),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    max_admission_skips=st.sampled_from([0, 1, 16]),
)
histories = st.builds(
    History,
    config=configs,
    num_blocks=st.sampled_from([3, 5, 8, 12, 40]),
    num_drafts=st.sampled_from([0, 0, 1, 3]),
    events=st.lists(st.one_of(arrivals, steps, steps, cancels), max_size=40).map(tuple),
)


class Run:
    """Plays a history and remembers what must come out of it."""

    def __init__(self, history: History) -> None:
        self.journal = io.BytesIO()
        self.scheduler = RecordedScheduler(
            history.config,
            file=self.journal,
            num_blocks=history.num_blocks,
            eos_token_ids=frozenset({EOS}),
            prefix_seed=b"seed",
            block_tokens=BLOCK_TOKENS,
        )
        self.engine = SimulatedEngine(self.scheduler)
        self.engine.num_drafts = history.num_drafts
        self.expected: dict[str, tuple[Request, int]] = {}
        self.lost: set[tuple[str, int]] = set()
        self.num_tokens = 0
        for item in history.events:
            self._play(item)
            self.scheduler.check()

    def _play(self, item: Arrival | Cancel | Step) -> None:
        if isinstance(item, Arrival):
            self._arrive(item)
        elif isinstance(item, Cancel):
            self._cancel(item)
        else:
            self._step(item)

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request(f"r{len(self.expected)}")
        before = self.scheduler.stats()
        try:
            self.scheduler.add(request)
        except RequestRejected:
            event("rejected")
            assert self.scheduler.stats() == before
            return
        limit = max_total_tokens(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            max_model_len=self.scheduler.config.max_model_len,
            capacity_tokens=self.scheduler.pool.num_blocks * BLOCK_TOKENS,
        )
        self.expected[request.request_id] = (request, limit)
        self.num_tokens += limit * arrival.n

    def _cancel(self, item: Cancel) -> None:
        request_id = f"r{item.which}"
        self.scheduler.cancel(request_id, item.index)
        if request_id in self.expected:
            self._lose(request_id, item.index)

    def _lose(self, request_id: str, index: int | None = None) -> None:
        num_answers = self.expected[request_id][0].num_sequences
        self.lost |= {(request_id, i) for i in range(num_answers) if index in (None, i)}

    def _step(self, item: Step) -> None:
        plan = self.engine.step()
        if plan is None:
            assert not self.scheduler.has_work, "requests are alive, but no step is planned"
            return
        for cancel in item.cancels:
            self._cancel(cancel)
        for arrival in item.arrivals:
            self._arrive(arrival)
        if item.outcome == "failed":
            self.engine.fail(plan)
        elif item.outcome == "row error":
            row = plan.rows[item.which % len(plan.rows)]
            self._lose(self.scheduler.sequence(row.sequence_id).request.request_id)
            self.engine.finish(plan, failing=frozenset({row.sequence_id}))
        else:
            self.engine.finish(plan)

    def drain(self) -> None:
        """Finish what is alive. Each step computes at least one token of the first in order, and
        a preempted sequence starts over at most once for each one before it."""
        self.engine.run(max_steps=20 + 4 * self.num_tokens)

    def check_answers(self) -> None:
        for request_id, (request, limit) in self.expected.items():
            for index in range(request.num_sequences):
                if (request_id, index) not in self.lost:
                    self._check_answer(request, index, limit)

    def _check_answer(self, request: Request, index: int, limit: int) -> None:
        answer = self.engine.answers[request.request_id, index]
        wanted = reference_answer(request, index, limit)
        assert (answer.token_ids, answer.finish_reason) == wanted
        assert [logprob.token_id for logprob in answer.logprobs] == answer.token_ids
        if index == 0 and request.params.prompt_logprobs is not None:
            found = [logprob.token_id for logprob in answer.prompt_logprobs]
            assert found == list(request.prompt_token_ids[1:])
        assert answer.num_cached_tokens < len(request.prompt_token_ids)


@given(histories)
def test_any_history_ends_with_reference_answers_and_all_blocks_back(history: History) -> None:
    run = Run(history)
    run.drain()
    run.check_answers()
    stats = run.scheduler.stats()
    for name, happened in (
        ("preemption", stats.num_preemptions),
        ("prefix hit", stats.prefix_cache_hits_tokens),
        ("copy", sum(len(plan.copies) for plan in run.engine.plans)),
        ("drafts", sum(row.num_drafts for plan in run.engine.plans for row in plan.rows)),
        ("lost answer", len(run.lost)),
    ):
        if happened:
            event(name)
    assert stats.num_owned_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting) == (0, 0)


@given(histories)
def test_any_recorded_history_replays_to_the_same_plans_and_outputs(history: History) -> None:
    run = Run(history)
    run.drain()
    run.journal.seek(0)
    assert replay(run.journal) is None
