"""The scheduler of one engine: requests in, one step at a time as a value, tokens out."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from whalepod.scheduler.admission import (
    Reuse,
    count_shared_blocks,
    find_reuse,
    must_wait_for_sibling,
)
from whalepod.scheduler.blocks import BlockPool
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.errors import QueueFull, TooLong
from whalepod.scheduler.invariants import check_results, check_sequences, held_blocks
from whalepod.scheduler.plan import BlockCopy, Output, Plan, Row, RowResult, StepResult
from whalepod.scheduler.prefix import PrefixTree
from whalepod.scheduler.request import Request, Sequence, Status, find_ending
from whalepod.scheduler.stats import SchedulerStats
from whalepod.scheduler.waiting import WaitingQueue

_ORDER = attrgetter("order")


class _Draft:
    """A plan in the making: rows by sequence, and what is left of the token budget."""

    __slots__ = ("budget", "preempted", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[int, Row] = {}
        self.preempted: list[int] = []

    def add(self, row: Row) -> None:
        self.rows[row.sequence_id] = row
        self.budget -= len(row.token_ids)

    def drop(self, sequence_id: int) -> None:
        row = self.rows.pop(sequence_id, None)
        if row is not None:
            self.budget += len(row.token_ids)
        self.preempted.append(sequence_id)


class Scheduler:
    """Decides which tokens are computed when, and where their cache rows live.

    The engine's loop is `plan = step()`, run it, `finish(result)` or `finish_failed(step)`. One
    step is in flight at a time; `add` and `cancel` are allowed at every moment. A sequence that
    runs or waits, every block and every counter have one owner: this object.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix_seed: bytes = b"",
        block_tokens: int = 64,
    ) -> None:
        """Start empty. `prefix_seed` names the model and its weights: rows of others never match.

        Raises ValueError when there is no block.
        """
        self.config = config
        self.block_tokens = block_tokens
        self.eos_token_ids = eos_token_ids
        self.tree = PrefixTree(block_tokens=block_tokens, seed=prefix_seed)
        self.pool = BlockPool(num_blocks, self.tree)
        self.running: list[Sequence] = []  # by priority, then age
        self.waiting = WaitingQueue(config.max_admission_skips)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: Plan | None = None
        self._unreported_preemptions: list[int] = []
        self._cancelled: list[Request] = []
        self._num_arrivals = 0
        self._next_sequence_id = 0
        self._num_queued_requests = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._queries_tokens = 0
        self._hits_tokens = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_step_tokens = 0
        self._step_time_us = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is alive: waiting, running, or cancelled in the step in flight."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises TooLong or QueueFull before anything is queued, and ValueError for an id that is
        alive already.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use already")
        max_total_tokens = self._max_total_tokens(request)
        if self._num_queued_requests >= self.config.max_num_queued_reqs:
            raise QueueFull(self._num_queued_requests, self.config.max_num_queued_reqs)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._num_queued_requests += 1
        self._requests[request.request_id] = request
        for index in range(request.num_sequences):
            sequence = self._new_sequence(request, index, max_total_tokens)
            request.sequences.append(sequence)
            self.waiting.add(sequence)

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

    def _max_total_tokens(self, request: Request) -> int:
        """Clamp prompt and answer to what fits. Raises TooLong when not even one token does."""
        num_prompt_tokens = len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        least = num_prompt_tokens + (0 if wanted == 0 else 1)
        longest = self.config.max_model_len
        if least > longest:
            raise TooLong(
                "context_length_exceeded",
                f"This model's maximum context length is {longest} tokens, and the prompt has "
                f"{num_prompt_tokens}: shorten the prompt or ask for fewer tokens",
            )
        capacity = self.pool.num_blocks * self.block_tokens
        if least > capacity:
            raise TooLong(
                "too_large",
                f"The prompt has {num_prompt_tokens} tokens and the cache of this server holds "
                f"{capacity}: shorten the prompt, or give the server more cache memory",
            )
        limit = min(longest, capacity)
        return limit if wanted is None else min(limit, num_prompt_tokens + wanted)

    def cancel(self, request_id: str) -> None:
        """End a request in any state; unknown ids are ignored (it may just have ended).

        Its blocks are free at once, or after the step in flight, which may still write them.
        """
        request = self._requests.get(request_id)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if self._in_flight is None:
            self._drop(request)
        else:
            self._cancelled.append(request)

    def owner(self, sequence_id: int) -> tuple[str, int]:
        """Return request id and index of a live sequence. Raises KeyError."""
        sequence = self._sequences[sequence_id]
        return sequence.request.request_id, sequence.index

    def sequence(self, sequence_id: int) -> Sequence:
        """Return a live sequence, to be read only. Raises KeyError."""
        return self._sequences[sequence_id]

    # ---- one step

    def step(self) -> Plan | None:
        """Spend one token budget: running sequences by priority and age, then admissions.

        A decoding sequence is never short of its one token: chunks of prompts take what is left
        after one for each of them. None when nothing can run. Raises RuntimeError while another
        step is in flight.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} is in flight: finish it first")
        draft = _Draft(self.config.max_num_batched_tokens)
        self._plan_running(draft)
        if not draft.preempted:  # blocks are short: to admit now would only thrash
            self._plan_admissions(draft)
        self._unreported_preemptions += draft.preempted
        if not draft.rows:
            return None
        self._in_flight = self._seal(draft)
        return self._in_flight

    def _seal(self, draft: _Draft) -> Plan:
        rows = tuple(draft.rows.values())
        pending = (self._sequences[row.sequence_id].pending_copy for row in rows)
        self._num_steps += 1
        return Plan(
            step=self._num_steps,
            rows=rows,
            copies=tuple(copy for copy in pending if copy is not None),
            preempted=tuple(self._unreported_preemptions),
        )

    def _plan_running(self, draft: _Draft) -> None:
        num_reserved = sum(1 for sequence in self.running if sequence.num_pending == 1)
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            sequence = self.running[position]
            position += 1
            if sequence.num_pending == 1:
                num_reserved -= 1
            budget = draft.budget - num_reserved
            if budget > 0 and self._grow(sequence, min(sequence.num_pending, budget), draft):
                draft.add(self._row(sequence, budget))

    def _row(self, sequence: Sequence, budget: int) -> Row:
        """Take as many pending tokens and drafts as budget and blocks allow."""
        start = sequence.num_computed
        token_ids = tuple(sequence.token_ids[start : start + budget])
        is_last = start + len(token_ids) == len(sequence.token_ids)
        draft_token_ids: tuple[int, ...] = ()
        if sequence.draft_token_ids and is_last:
            draft_token_ids = self._take_drafts(sequence, budget - len(token_ids))
        return Row(
            sequence_id=sequence.sequence_id,
            token_ids=token_ids + draft_token_ids,
            start=start,
            block_ids=self._block_table(sequence),
            sample=is_last and sequence.samples,
            num_drafts=len(draft_token_ids),
        )

    def _block_table(self, sequence: Sequence) -> tuple[int, ...]:
        if len(sequence.block_table) != len(sequence.block_ids):
            sequence.block_table = tuple(sequence.block_ids)
        return sequence.block_table

    def _take_drafts(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Choose the drafts to verify; their blocks come from what is available, or they wait."""
        num_tokens = len(sequence.token_ids)
        num_wanted = min(budget, sequence.max_total_tokens - num_tokens - 1)
        drafts = sequence.draft_token_ids[: max(num_wanted, 0)]
        num_missing = self._num_blocks(num_tokens + len(drafts)) - len(sequence.block_ids)
        for _ in range(min(num_missing, self.pool.num_available)):
            sequence.block_ids.append(self.pool.allocate())
        return drafts[: len(sequence.block_ids) * self.block_tokens - num_tokens]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Give a sequence the blocks for `num_tokens` more, preempting from the end of the order;
        False when it had to go itself."""
        num_blocks = self._num_blocks(sequence.num_computed + num_tokens)
        while len(sequence.block_ids) < num_blocks:
            while not self.pool.num_available:
                victim = self.running[-1]
                self._preempt(victim, draft)
                if victim is sequence:
                    return False
            sequence.block_ids.append(self.pool.allocate())
        return True

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        """Take slot and blocks of a running sequence; its text stays cached as long as it can."""
        self._stop_running(victim, keep_text=True)
        victim.was_preempted = True
        victim.status = Status.WAITING
        self.waiting.add(victim)
        draft.drop(victim.sequence_id)
        self._num_preemptions += 1

    # ---- admissions

    def _plan_admissions(self, draft: _Draft) -> None:
        while draft.budget > 0:
            sequence = self.waiting.choose(self._may_start, self._count_shared_blocks)
            if sequence is None or sequence.sequence_id in draft.preempted:
                return
            if not self._has_slot(sequence, draft):
                return
            reuse = self._reserve(sequence, draft)
            if reuse is None:
                return
            self._start(sequence, reuse)
            draft.add(self._row(sequence, draft.budget))

    def _may_start(self, sequence: Sequence) -> bool:
        return not sequence.request.cancelled and not must_wait_for_sibling(sequence)

    def _count_shared_blocks(self, sequence: Sequence) -> int:
        if not self.config.enable_prefix_caching:
            return 0
        return count_shared_blocks(sequence, self.tree)

    def _has_slot(self, sequence: Sequence, draft: _Draft) -> bool:
        """Find a free slot, or one of a sequence of strictly lower priority."""
        if len(self.running) < self.config.max_num_seqs:
            return True
        victim = self.running[-1]
        if victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim, draft)
        return True

    def _reserve(self, sequence: Sequence, draft: _Draft) -> Reuse | None:
        """Hold what the cache has of a sequence, if there are blocks for the rest; else None."""
        reuse = find_reuse(sequence, self.tree, has_cache=self.config.enable_prefix_caching)
        held = list(reuse.block_ids)
        if reuse.copy_source is not None:
            held.append(reuse.copy_source)
        for block_id in held:
            self.pool.acquire(block_id)
        priority = sequence.request.priority
        num_peers = sum(1 for peer in self.running if peer.request.priority <= priority)
        num_blocks = self._num_blocks(len(sequence.token_ids)) - len(reuse.block_ids)
        num_blocks += -(-num_peers // 8)  # spare ones, or the next step would preempt
        if reuse.copy_source is not None and self.pool.num_available < num_blocks:
            self.pool.release(held.pop())
            reuse.copy_source, reuse.num_copied_tokens = None, 0
        self._displace(sequence, num_blocks, draft)
        if self.pool.num_available >= num_blocks:
            return reuse
        for block_id in reversed(held):
            self.pool.release(block_id)
        return None

    def _displace(self, sequence: Sequence, num_blocks: int, draft: _Draft) -> None:
        """Preempt sequences of strictly lower priority while blocks are short, if that helps."""
        priority = sequence.request.priority
        lower = [victim for victim in self.running if victim.request.priority > priority]
        num_held = sum(len(victim.block_ids) for victim in lower)
        if self.pool.num_available + num_held < num_blocks:
            return
        while lower and self.pool.num_available < num_blocks:
            self._preempt(lower.pop(), draft)

    def _start(self, sequence: Sequence, reuse: Reuse) -> None:
        """Give a sequence its slot and blocks, and account for what the cache had."""
        self.waiting.note_admission(sequence)
        sequence.status = Status.RUNNING
        sequence.was_preempted = False
        sequence.num_skips = 0
        sequence.block_ids = reuse.block_ids
        sequence.path = reuse.path
        sequence.publishes = reuse.publishes
        sequence.num_computed = len(reuse.block_ids) * self.block_tokens + reuse.num_copied_tokens
        while len(sequence.block_ids) < self._num_blocks(len(sequence.token_ids)):
            sequence.block_ids.append(self.pool.allocate())
        if reuse.copy_source is not None:
            sequence.pending_copy = BlockCopy(
                source=reuse.copy_source,
                target=sequence.block_ids[sequence.num_computed // self.block_tokens],
                num_tokens=reuse.num_copied_tokens,
            )
        insort(self.running, sequence, key=_ORDER)
        sequence.request.running.append(sequence)
        self._count_admission(sequence)

    def _count_admission(self, sequence: Sequence) -> None:
        """Report cached tokens once, at the request's first admission: later ones, and its other
        answers, find its own rows there."""
        request = sequence.request
        if request.was_admitted:
            return
        request.was_admitted = True
        request.num_cached_tokens = sequence.num_computed
        self._num_queued_requests -= 1
        self._queries_tokens += sequence.num_prompt_tokens
        self._hits_tokens += sequence.num_computed
        self._prompt_tokens += sequence.num_prompt_tokens

    # ---- results

    def finish(self, result: StepResult) -> list[Output]:
        """Take the results of the step in flight and return what each sequence gained.

        Raises ValueError, and changes nothing, when they do not fit the plan.
        """
        plan = self._check_in_flight(result.step)
        results = {row.sequence_id: row for row in result.rows}
        check_results(plan, results)
        self._in_flight = None
        self._unreported_preemptions.clear()
        self._num_step_tokens = plan.num_tokens
        self._step_time_us = result.step_time_us
        outputs: list[Output] = []
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

    def _finish_row(self, row: Row, result: RowResult, outputs: list[Output]) -> None:
        sequence = self._sequences.get(row.sequence_id)
        if sequence is None or sequence.status is Status.ENDED:
            return  # a sibling's error ended the request
        if result.error is not None:
            self._fail(sequence.request, result.error, outputs)
            return
        if sequence.pending_copy is not None:
            self.pool.release(sequence.pending_copy.source)
            sequence.pending_copy = None
        output = self._accept(sequence, row, result)
        if output is not None and not sequence.request.cancelled:
            outputs.append(output)

    def _accept(self, sequence: Sequence, row: Row, result: RowResult) -> Output | None:
        """Add a row's tokens, publish its full blocks, and end the sequence where it ends."""
        ending = find_ending(sequence, result.token_ids)
        token_ids = list(result.token_ids[: ending.num_kept])
        sequence.token_ids += token_ids
        num_accepted = max(len(result.token_ids) - 1, 0)
        num_computed = row.start + len(row.token_ids) - row.num_drafts + num_accepted
        sequence.num_computed = min(num_computed, len(sequence.token_ids))
        sequence.draft_token_ids = result.draft_token_ids
        self._publish(sequence)
        prompt_logprobs = sequence.take_prompt_logprobs(row.start, result.prompt_logprobs)
        self._generation_tokens += len(token_ids)
        finish_reason = ending.finish_reason
        if not sequence.num_pending and finish_reason is None:
            finish_reason = "length"  # the prompt is computed, and no token was asked for
        if finish_reason is not None:
            self._end(sequence)
        elif not token_ids and not prompt_logprobs:
            return None
        else:
            self._trim(sequence)
        return Output(
            sequence_id=sequence.sequence_id,
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            logprobs=list(result.logprobs[: ending.num_kept]),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=sequence.request.num_cached_tokens,
            finish_reason=finish_reason,
            stop_token_id=ending.stop_token_id,
        )

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full now."""
        size, path = self.block_tokens, sequence.path
        while sequence.publishes and (len(path) + 1) * size <= sequence.num_computed:
            index = len(path)
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = path[-1] if path else self.tree.root(sequence.request.cache_salt)
            if index == len(sequence.block_keys):
                sequence.block_keys.append(self.tree.key(parent, token_ids))
            key, block_id = sequence.block_keys[index], sequence.block_ids[index]
            node = self.pool.publish(parent, token_ids, key, block_id)
            if node is None:  # another text has the same hash
                sequence.publishes = False
                return
            if node.block_id != block_id:
                sequence.block_ids[index] = node.block_id
                sequence.block_table = ()
            path.append(node)

    def _trim(self, sequence: Sequence) -> None:
        """Return the blocks of drafts that were not accepted."""
        num_blocks = self._num_blocks(len(sequence.token_ids))
        while len(sequence.block_ids) > num_blocks:
            self.pool.release(sequence.block_ids.pop())

    def _fail(self, request: Request, error: str, outputs: list[Output]) -> None:
        """End all answers of a request; the blocks of this step are not shared."""
        for sequence in list(request.sequences):
            if sequence.status is Status.ENDED:
                continue
            if not request.cancelled:
                outputs.append(
                    Output(
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

    def _stop_running(self, sequence: Sequence, *, keep_text: bool) -> None:
        """Take slot and blocks of a sequence; `keep_text`: its last, partly filled block too may
        serve later requests."""
        size, path = self.block_tokens, sequence.path
        start = len(path) * size
        has_partial = sequence.num_computed > start and sequence.pending_copy is None
        if keep_text and sequence.publishes and has_partial:
            token_ids = tuple(sequence.token_ids[start : sequence.num_computed])
            parent = path[-1] if path else self.tree.root(sequence.request.cache_salt)
            self.pool.publish_partly(parent, token_ids, sequence.block_ids[len(path)])
        if sequence.pending_copy is not None:
            self.pool.release(sequence.pending_copy.source)
        for block_id in reversed(sequence.block_ids):
            self.pool.release(block_id)
        sequence.forget_blocks()
        self.running.remove(sequence)
        sequence.request.running.remove(sequence)

    def _end(self, sequence: Sequence, *, keep_text: bool = True) -> None:
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence, keep_text=keep_text)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.ENDED
        del self._sequences[sequence.sequence_id]
        request = sequence.request
        if all(sibling.status is Status.ENDED for sibling in request.sequences):
            del self._requests[request.request_id]
            if not request.was_admitted:
                self._num_queued_requests -= 1

    def _drop(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not Status.ENDED:
                self._end(sequence)

    def _drop_cancelled(self) -> None:
        for request in self._cancelled:
            self._drop(request)
        self._cancelled.clear()

    # ---- what others may know

    def stats(self) -> SchedulerStats:
        """Read gauges and counters."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_owned_blocks=self.pool.num_owned,
            num_quarantined_blocks=self.pool.num_quarantined,
            num_blocks=self.pool.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries_tokens=self._queries_tokens,
            prefix_cache_hits_tokens=self._hits_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_step_tokens=self._num_step_tokens,
            step_time_us=self._step_time_us,
        )

    def check(self) -> None:
        """Compare every count with a fresh one. Raises AssertionError with both values."""
        check_sequences(
            running=self.running,
            waiting=list(self.waiting),
            block_tokens=self.block_tokens,
            max_num_seqs=self.config.max_num_seqs,
        )
        self.pool.check(held_blocks(self.running))
        num_alive = len(self.running) + len(self.waiting)
        assert num_alive == len(self._sequences), (
            f"{num_alive} sequences run or wait, {len(self._sequences)} are alive"
        )
