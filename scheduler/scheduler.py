"""The scheduler of one engine: requests in, one step at a time as a value, tokens out."""

from __future__ import annotations

from whalepod.scheduler.block_pool import BlockPool
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.invariants import check_results, check_sequences, held_blocks
from whalepod.scheduler.kv_cache_manager import KVCacheManager
from whalepod.scheduler.limits import max_total_tokens, queue_full
from whalepod.scheduler.plan import Plan, Row, RowResult, SequenceOutput, StepResult
from whalepod.scheduler.planner import Planner, ScheduleBuilder
from whalepod.scheduler.prefix import PrefixTree
from whalepod.scheduler.request import FinishDecision, Request, Sequence, Status
from whalepod.scheduler.stats import Stats


class Scheduler:
    """Decides which tokens are computed when, and where their cache rows live.

    The engine's loop is `plan = step()`, run it, `finish(result)` or `finish_failed(step)`. One
    step is in flight at a time; `add` and `cancel` are allowed at every moment. A sequence that
    runs or waits, every block and every counter have one owner: this object. What happens to a
    sequence is decided here and in the planner; how its record changes is written in `Sequence`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix_seed: bytes = b"",
        block_tokens: int = 64,
        num_lookback_tokens: int = 0,
    ) -> None:
        """Start empty. `prefix_seed` names the model and its weights: rows of others never match.

        num_lookback_tokens  copied rows that are computed again when a sequence starts inside a
                             block: a drafter needs the hidden states there, and they are kept for
                             the ends of full blocks only

        Raises ValueError when there is no block.
        """
        assert config.max_model_len > 0, "max_model_len is settled when the model is loaded"
        self.config = config
        self.block_tokens = block_tokens
        self.eos_token_ids = eos_token_ids
        self.tree = PrefixTree(block_tokens=block_tokens, seed=prefix_seed)
        self.pool = BlockPool(num_blocks, self.tree)
        self._kv_cache = KVCacheManager(
            self.pool,
            self.tree,
            enable_prefix_caching=config.enable_prefix_caching,
            num_lookback_tokens=num_lookback_tokens,
        )
        self._planner = Planner(config, self._kv_cache)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: Plan | None = None
        self._unreported_preemptions: list[int] = []
        self._cancelled: list[Sequence] = []
        self._num_arrivals = 0
        self._next_sequence_id = 0
        self._num_queued_requests = 0
        self._clock_us = 0
        self._stats = Stats(num_blocks=num_blocks)

    @property
    def has_work(self) -> bool:
        """Whether a request is alive: waiting, running, or cancelled in the step in flight."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestRejected before anything is queued, and ValueError for an id that is alive
        already.
        """
        num_tokens = self.check_request(request)
        request.arrive(self._num_arrivals, self._clock_us)
        self._num_arrivals += 1
        self._num_queued_requests += 1
        self._requests[request.request_id] = request
        for index in range(request.num_sequences):
            sequence = self._new_sequence(request, index, num_tokens)
            request.sequences.append(sequence)
            self._planner.waiting.add(sequence)

    def check_request(self, request: Request, num_coming: int = 0) -> int:
        """Return the most tokens of an answer, prompt included; raises what `add` would.

        num_coming  requests that will be queued before it, though they are not yet
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use already")
        num_tokens = max_total_tokens(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            max_model_len=self.config.max_model_len,
            capacity_tokens=self.pool.num_blocks * self.block_tokens,
        )
        num_queued = self._num_queued_requests + num_coming
        if num_queued >= self.config.max_num_queued_reqs:
            raise queue_full(num_queued, self.config.max_num_queued_reqs)
        return num_tokens

    @property
    def num_queued_requests(self) -> int:
        """Requests that wait for their first admission."""
        return self._num_queued_requests

    def _new_sequence(self, request: Request, index: int, max_total_tokens: int) -> Sequence:
        eos_token_ids = frozenset() if request.params.ignore_eos else self.eos_token_ids
        sequence = Sequence(
            sequence_id=self._next_sequence_id,
            request=request,
            index=index,
            max_total_tokens=max_total_tokens,
            stop_token_ids=eos_token_ids.union(request.params.stop_token_ids),
        )
        self._sequences[sequence.sequence_id] = sequence
        self._next_sequence_id += 1
        return sequence

    def is_queued(self, request_id: str) -> bool:
        """Return whether a request waits and has never run."""
        request = self._requests.get(request_id)
        if request is None or request.was_admitted:
            return False
        return any(sequence.is_live for sequence in request.sequences)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or its answer `index` alone, in any state; what is unknown is ignored
        (it may just have ended).

        Its blocks are free at once, or after the step in flight, which may still write them.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if index in (None, sequence.index) and sequence.cancel():
                self._cancelled.append(sequence)
        if self._in_flight is None:
            self._drop_cancelled()

    def reset_prefix_cache(self) -> int:
        """Forget the texts that no live request uses; return how many blocks that frees."""
        return self.pool.forget_cached()

    @property
    def request_ids(self) -> list[str]:
        """The requests that are alive, in the order of their arrival."""
        return list(self._requests)

    def live_sequences(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that go on: neither ended nor cancelled."""
        request = self._requests.get(request_id)
        return [] if request is None else [s for s in request.sequences if s.is_live]

    def sequence(self, sequence_id: int) -> Sequence:
        """Return a live sequence, to be read only. Raises KeyError."""
        return self._sequences[sequence_id]

    # ---- one step

    def count_tokens_at_most(self) -> int:
        """Return a bound on the tokens of the next step: what a rank tells its group before all
        of them plan. 0 while nothing can run. Changes nothing."""
        return self._planner.count_tokens_at_most()

    def step(self, num_drafts: int = 0, max_tokens: int | None = None) -> Plan | None:
        """Spend one token budget: running sequences by priority and age, then admissions.

        A decoding sequence is never short of its one token: chunks of prompts take what is left
        after one for each of them. Each row that samples asks for `num_drafts` guesses, or fewer
        where blocks, budget or the end of the answer leave less room. `max_tokens` lowers the
        budget (a bound that others were told). None when nothing can run.
        Raises RuntimeError while another step is in flight.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} is in flight: finish it first")
        builder = self._planner.plan(max_tokens)
        self._unreported_preemptions += builder.preempted
        self._stats.num_preemptions += len(builder.preempted)
        for sequence in builder.admitted:
            self._count_admission(sequence)
        if builder.scheduled:
            self._in_flight = self._seal(builder, num_drafts)
        return self._in_flight

    def _seal(self, builder: ScheduleBuilder, num_drafts: int) -> Plan:
        rows = self._planner.rows(builder, num_drafts)
        pending = [entry.sequence.pending_copy for entry in builder.scheduled.values()]
        self._stats.num_steps += 1
        return Plan(
            step=self._stats.num_steps,
            rows=rows,
            copies=tuple([copy for copy in pending if copy is not None]),
            preempted=tuple(self._unreported_preemptions),
        )

    def _count_admission(self, sequence: Sequence) -> None:
        """Report cached tokens once, at the request's first admission: later ones, and its other
        answers, find its own rows there."""
        if not sequence.request.note_admission(sequence.num_computed, self._clock_us):
            return
        self._num_queued_requests -= 1
        self._stats.prefix_cache_queries_tokens += sequence.num_prompt_tokens
        self._stats.prefix_cache_hits_tokens += sequence.num_computed
        self._stats.prompt_tokens += sequence.num_prompt_tokens

    # ---- results

    def finish(self, result: StepResult) -> list[SequenceOutput]:
        """Take the results of the step in flight and return what each sequence gained.

        Raises ValueError, and changes nothing, when they do not fit the plan.
        """
        plan = self._check_in_flight(result.step)
        results = {row.sequence_id: row for row in result.rows}
        check_results(plan, results)
        self._in_flight = None
        self._unreported_preemptions.clear()
        self._stats.num_step_tokens = plan.num_tokens
        self._stats.step_time_us = result.step_time_us
        outputs: list[SequenceOutput] = []
        for row in plan.rows:
            self._finish_row(row, results[row.sequence_id], outputs)
        self._drop_cancelled()
        return outputs

    def finish_failed(self, step: int) -> None:
        """Note that the step in flight failed: no token of it counts, none of its blocks is
        shared, and the next step plans the same tokens again."""
        self._check_in_flight(step)
        self._in_flight = None
        self._drop_cancelled()

    def _check_in_flight(self, step: int) -> Plan:
        plan = self._in_flight
        if plan is None or plan.step != step:
            in_flight = "none" if plan is None else plan.step
            raise ValueError(f"result of step {step}, but the step in flight is {in_flight}")
        return plan

    def _finish_row(self, row: Row, result: RowResult, outputs: list[SequenceOutput]) -> None:
        sequence = self._sequences.get(row.sequence_id)
        if sequence is None:
            return  # a sibling's error ended the request
        if result.error is not None:
            self._fail(sequence.request, result.error, outputs)
            return
        if sequence.pending_copy is not None:
            self._kv_cache.finish_copy(sequence)
        decision = sequence.accept(row, result)
        output = self._output(sequence, row, result, decision)
        self._stats.generation_tokens += decision.num_kept
        if row.num_drafts:
            self._stats.note_drafts(row.num_drafts, output.num_accepted_drafts)
        if sequence.num_computed >= (len(sequence.path) + 1) * self.block_tokens:
            self._kv_cache.cache(sequence)
        if decision.finish_reason is not None:
            self._end(sequence)
        elif row.num_drafts or row.num_drafts_wanted:
            self._kv_cache.trim(sequence)
        gained = output.token_ids or output.prompt_logprobs or output.finish_reason
        if gained and not sequence.is_cancelled:
            outputs.append(output)

    def _output(
        self, sequence: Sequence, row: Row, result: RowResult, decision: FinishDecision
    ) -> SequenceOutput:
        request, num_kept = sequence.request, decision.num_kept
        num_accepted = min(len(result.token_ids) - 1, num_kept) if row.num_drafts else 0
        return SequenceOutput(
            sequence_id=sequence.sequence_id,
            request_id=request.request_id,
            index=sequence.index,
            token_ids=result.token_ids[:num_kept],
            logprobs=result.logprobs[:num_kept],
            prompt_logprobs=sequence.take_prompt_logprobs(row.start, result.prompt_logprobs),
            num_cached_tokens=request.num_cached_tokens,
            queue_us=request.queue_us,
            finish_reason=decision.finish_reason,
            stop_token_id=decision.stop_token_id,
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=row.num_drafts - num_accepted,
        )

    def _fail(self, request: Request, error: str, outputs: list[SequenceOutput]) -> None:
        """End all answers of a request; the blocks of this step are not shared."""
        for sequence in list(request.sequences):
            if sequence.status is Status.ENDED:
                continue
            if not sequence.is_cancelled:
                outputs.append(
                    SequenceOutput(
                        sequence_id=sequence.sequence_id,
                        request_id=request.request_id,
                        index=sequence.index,
                        num_cached_tokens=request.num_cached_tokens,
                        finish_reason="error",
                        error=error,
                    )
                )
            self._end(sequence, keep_text=False)

    # ---- the end of a sequence

    def _end(self, sequence: Sequence, *, keep_text: bool = True) -> None:
        self._planner.end(sequence, keep_text=keep_text)
        del self._sequences[sequence.sequence_id]
        request = sequence.request
        if request.has_ended:
            del self._requests[request.request_id]
            if not request.was_admitted:
                self._num_queued_requests -= 1

    def _drop_cancelled(self) -> None:
        for sequence in self._cancelled:
            if sequence.status is not Status.ENDED:
                self._end(sequence)
        self._cancelled.clear()

    def note_clock(self, now_us: int) -> None:
        """Take the caller's clock reading of a step. Nothing here decides by it yet; it is an
        input like the others, so a journal has it."""
        self._clock_us = now_us

    # ---- what others may know

    def stats(self) -> Stats:
        """Return gauges and counters of now, in a record that is the caller's."""
        stats = self._stats.copy()
        stats.num_running = len(self._planner.running)
        stats.num_waiting = len(self._planner.waiting)
        stats.num_free_blocks = self.pool.num_free
        stats.num_cached_blocks = self.pool.num_cached
        stats.num_owned_blocks = self.pool.num_owned
        return stats

    def check(self) -> None:
        """Compare every count with a fresh one. Raises AssertionError with both values."""
        running, waiting = self._planner.running, list(self._planner.waiting)
        check_sequences(
            running=running,
            waiting=waiting,
            block_tokens=self.block_tokens,
            max_num_seqs=self.config.max_num_seqs,
        )
        self.pool.check(held_blocks(running))
        num_live = len(running) + len(waiting)
        num_known = len(self._sequences)
        assert num_live == num_known, f"{num_live} sequences run or wait, {num_known} are known"
        cancelled = [sequence.sequence_id for sequence in self._cancelled]
        assert self._in_flight or not cancelled, f"{cancelled} wait for a step, none is in flight"
        queued = [r.request_id for r in self._requests.values() if not r.was_admitted]
        num_queued = self._num_queued_requests
        assert num_queued == len(queued), f"{num_queued} requests are counted in {queued}"
