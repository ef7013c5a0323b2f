"""Which sequences run, which wait, and what each gets of a step."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.kv_cache_manager import KVCacheManager
from whalepod.scheduler.plan import Row
from whalepod.scheduler.prefix import PrefixHit
from whalepod.scheduler.request import Sequence, Status
from whalepod.scheduler.waiting import WaitingQueue

# Blocks that an admission leaves free, so that decoding sequences can grow for a while.
SEQUENCES_PER_SPARE_BLOCK = 8
_ORDER = attrgetter("order")


class ScheduledSequence:
    """What one sequence gets of a step: pending tokens, and drafts after them."""

    __slots__ = ("num_drafts", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_drafts = num_drafts

    @property
    def is_last(self) -> bool:
        """Whether nothing of the sequence's text stays pending."""
        return self.sequence.num_pending == self.num_tokens


class ScheduleBuilder:
    """A plan in the making: what each sequence gets, and what is left of the token budget."""

    __slots__ = ("admitted", "budget", "preempted", "scheduled")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[int, ScheduledSequence] = {}
        self.preempted: list[int] = []
        self.admitted: list[Sequence] = []

    def add(self, entry: ScheduledSequence) -> None:
        self.scheduled[entry.sequence.sequence_id] = entry
        self.budget -= entry.num_tokens + entry.num_drafts

    def remove(self, sequence_id: int) -> None:
        entry = self.scheduled.pop(sequence_id, None)
        if entry is not None:
            self.budget += entry.num_tokens + entry.num_drafts


class Planner:
    """Owns the order of running and waiting sequences; the cache manager gives them blocks."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.running: list[Sequence] = []  # by priority, then age
        self.waiting = WaitingQueue(config.max_admission_skips)
        self._config = config
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool

    def count_tokens_at_most(self) -> int:
        """Return a bound on the tokens of the next plan, without making it.

        It counts who waits only if the next of them finds a slot and blocks, so that a full rank
        is not taken for one that is about to compute prompts.
        """
        limit = self._config.max_num_batched_tokens
        num_tokens = sum(s.num_pending + len(s.draft_token_ids) for s in self.running)
        if num_tokens < limit and self.waiting and self._may_find_room():
            for sequence in self.waiting:
                num_tokens += len(sequence.token_ids)
                if num_tokens >= limit:
                    break
        return min(num_tokens, limit)

    def _may_find_room(self) -> bool:
        """Return whether the next admission can succeed: True may be wrong, False never is."""
        sequence = self.waiting.choose(self._kv_cache.count_shared_blocks)
        if sequence is None:
            return False
        lower = [s for s in self.running if s.request.priority > sequence.request.priority]
        if lower:
            return True
        if len(self.running) >= self._config.max_num_seqs:
            return False
        num_blocks = self._kv_cache.num_blocks(len(sequence.token_ids))
        return num_blocks - self._kv_cache.count_shared_blocks(sequence) <= self._pool.num_available

    def plan(self, max_tokens: int | None = None) -> ScheduleBuilder:
        """Spend one token budget: running sequences by priority and age, then admissions."""
        budget = self._config.max_num_batched_tokens
        builder = ScheduleBuilder(budget if max_tokens is None else min(budget, max_tokens))
        self._plan_running(builder)
        if not builder.preempted:  # blocks are short: to admit now would only thrash
            self._plan_admissions(builder)
        return builder

    def end(self, sequence: Sequence, *, keep_text: bool) -> None:
        """End a sequence that runs or waits; `keep_text`: as KVCacheManager.release."""
        if sequence.status is Status.RUNNING:
            self._remove_running(sequence, keep_text=keep_text)
        else:
            self.waiting.remove(sequence)
        sequence.end()

    def _remove_running(self, sequence: Sequence, *, keep_text: bool) -> None:
        self._kv_cache.release(sequence, keep_text=keep_text)
        self.running.remove(sequence)

    def _plan_running(self, builder: ScheduleBuilder) -> None:
        num_reserved = 0
        for sequence in self.running:
            if len(sequence.token_ids) - sequence.num_computed == 1:
                num_reserved += 1
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            sequence = self.running[position]
            position += 1
            num_pending = len(sequence.token_ids) - sequence.num_computed
            if num_pending == 1:
                num_reserved -= 1
            budget = builder.budget - num_reserved
            if budget > 0 and self._grow(sequence, min(num_pending, budget), builder):
                builder.add(_schedule(sequence, budget))

    def rows(self, builder: ScheduleBuilder, num_drafts: int) -> tuple[Row, ...]:
        """Turn entries into rows. Blocks for drafts come from what is left now that every entry has
        its own: drafts preempt no sequence.

        num_drafts  most guesses that a row may be asked for
        """
        scheduled = list(builder.scheduled.values())
        # all of them must find a place in the budget of the next step
        most = self._config.max_num_batched_tokens // max(len(scheduled), 1) - 1
        num_drafts = min(num_drafts, most)
        return tuple([self._row(entry, num_drafts) for entry in scheduled])

    def _row(self, entry: ScheduledSequence, num_drafts: int) -> Row:
        sequence = entry.sequence
        start = sequence.num_computed
        stop = start + entry.num_tokens
        token_ids = tuple(sequence.token_ids[start:stop])
        sample = entry.is_last and sequence.samples
        drafts: tuple[int, ...] = ()
        if entry.num_drafts:
            num_fitting = self._stretch(sequence, stop + entry.num_drafts) - stop
            drafts = sequence.draft_token_ids[: min(entry.num_drafts, num_fitting)]
            stop += len(drafts)
        num_wanted = 0
        most = sequence.request.params.num_speculative_tokens
        num_drafts = num_drafts if most is None else min(num_drafts, most)
        if num_drafts and sample:  # the last allowed token is never worth a guess
            stop_wanted = min(stop + num_drafts, sequence.max_total_tokens - 2)
            num_wanted = max(min(self._stretch(sequence, stop_wanted), stop_wanted) - stop, 0)
        return Row(
            sequence.sequence_id,
            token_ids + drafts,
            start,
            sequence.block_table,
            sample,
            num_drafts=len(drafts),
            num_drafts_wanted=num_wanted,
        )

    def _stretch(self, sequence: Sequence, num_tokens: int) -> int:
        """Extend a sequence as far as there are blocks; returns how many tokens have a place."""
        self._kv_cache.extend(sequence, num_tokens)
        return len(sequence.block_ids) * self._kv_cache.block_tokens

    def _grow(self, sequence: Sequence, num_tokens: int, builder: ScheduleBuilder) -> bool:
        """Give a sequence the blocks for `num_tokens` more, preempting from the end of the order;
        False when it had to go itself."""
        while not self._kv_cache.extend(sequence, sequence.num_computed + num_tokens):
            victim = self.running[-1]
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, builder: ScheduleBuilder) -> None:
        """Take slot and blocks of a running sequence; its text stays cached as long as it can."""
        self._remove_running(victim, keep_text=True)
        victim.preempt()
        self.waiting.add(victim)
        builder.remove(victim.sequence_id)
        builder.preempted.append(victim.sequence_id)

    # ---- admissions

    def _plan_admissions(self, builder: ScheduleBuilder) -> None:
        while self._may_admit(builder):
            sequence = self.waiting.choose(self._kv_cache.count_shared_blocks)
            if sequence is None or sequence.sequence_id in builder.preempted:
                return
            if not self._has_slot(sequence, builder):
                return
            hit = self._reserve(sequence, builder)
            if hit is None:
                return
            if not self._has_budget(sequence, builder):
                self._kv_cache.release_hit(hit)
                return
            self._start(sequence, hit)
            builder.admitted.append(sequence)
            builder.add(_schedule(sequence, builder.budget))

    def _may_admit(self, builder: ScheduleBuilder) -> bool:
        """Rule out the common case cheaply: full, and no sequence of lower priority to give way."""
        if not self.waiting:
            return False
        if builder.budget > 0 and len(self.running) < self._config.max_num_seqs:
            return True
        return self.running[-1].request.priority > self.waiting.first_priority

    def _has_slot(self, sequence: Sequence, builder: ScheduleBuilder) -> bool:
        """Find a free slot, or one of a sequence of strictly lower priority."""
        if len(self.running) < self._config.max_num_seqs:
            return True
        victim = self.running[-1]
        if victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim, builder)
        return True

    def _has_budget(self, sequence: Sequence, builder: ScheduleBuilder) -> bool:
        """Find unspent tokens, or those of a longer row of strictly lower priority, which then
        waits for a later step."""
        for other in reversed(self.running):
            if builder.budget > 0 or other.request.priority <= sequence.request.priority:
                break
            entry = builder.scheduled.get(other.sequence_id)
            if entry is not None and entry.num_tokens + entry.num_drafts > 1:
                builder.remove(other.sequence_id)
        return builder.budget > 0

    def _reserve(self, sequence: Sequence, builder: ScheduleBuilder) -> PrefixHit | None:
        """Hold what the cache has of a sequence, if there are blocks for the rest; else None."""
        hit = self._kv_cache.find_prefix(sequence)
        num_blocks = self._kv_cache.num_blocks(len(sequence.token_ids)) - len(hit.block_ids)
        num_blocks += self._num_spare_blocks(sequence)
        if self._pool.num_available < num_blocks:
            self._kv_cache.release_copy(hit)
        self._displace(sequence, num_blocks, builder)
        if self._pool.num_available < num_blocks:
            self._kv_cache.release_hit(hit)
            return None
        return hit

    def _num_spare_blocks(self, sequence: Sequence) -> int:
        """Leave some to running sequences that will not be displaced, or the next steps would
        preempt what is admitted now; and what they, and it, will need for their answers."""
        priority = sequence.request.priority
        peers = [peer for peer in self.running if peer.request.priority <= priority]
        num_spare = -(-len(peers) // SEQUENCES_PER_SPARE_BLOCK)
        if not self._config.reserve_output_tokens:
            return num_spare
        num_future = sum(self._count_future_blocks(peer) for peer in peers)
        now = self._kv_cache.num_blocks(len(sequence.token_ids))
        num_future += self._count_future_blocks(sequence) - (now if not sequence.block_ids else 0)
        return max(num_spare, num_future)

    def _count_future_blocks(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence does not hold yet and is likely to ask for."""
        reserved = sequence.num_prompt_tokens + self._config.reserve_output_tokens
        num_tokens = max(min(reserved, sequence.max_total_tokens), len(sequence.token_ids))
        return max(self._kv_cache.num_blocks(num_tokens) - len(sequence.block_ids), 0)

    def _displace(self, sequence: Sequence, num_blocks: int, builder: ScheduleBuilder) -> None:
        """Preempt sequences of strictly lower priority while blocks are short, if that helps."""
        priority = sequence.request.priority
        lower = [victim for victim in self.running if victim.request.priority > priority]
        num_held = sum(len(victim.block_ids) for victim in lower)
        if self._pool.num_available + num_held < num_blocks:
            return
        while lower and self._pool.num_available < num_blocks:
            self._preempt(lower.pop(), builder)

    def _start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Give a sequence its slot and blocks."""
        self.waiting.note_admission(sequence)
        self._kv_cache.start(sequence, hit)
        insort(self.running, sequence, key=_ORDER)


def _schedule(sequence: Sequence, budget: int) -> ScheduledSequence:
    """Take as many pending tokens as the budget allows, and drafts if the text ends with them."""
    num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
    entry = ScheduledSequence(sequence, num_tokens, 0)
    if sequence.draft_token_ids and entry.is_last:
        num_allowed = sequence.max_total_tokens - len(sequence.token_ids) - 1
        num_drafts = min(len(sequence.draft_token_ids), budget - num_tokens, num_allowed)
        entry.num_drafts = max(num_drafts, 0)
    return entry
