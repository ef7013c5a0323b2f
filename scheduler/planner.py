"""Who runs: the running sequences, the waiting ones, and the making of a plan from both."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from whalepod.scheduler.admission import (
    Reuse,
    count_shared_blocks,
    find_reuse,
    may_start,
)
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.plan import Row
from whalepod.scheduler.request import Sequence, Status
from whalepod.scheduler.residency import Residency
from whalepod.scheduler.waiting import WaitingQueue

# Blocks that an admission leaves free, so that decoding sequences can grow for a while.
SEQUENCES_PER_SPARE_BLOCK = 8
_ORDER = attrgetter("order")


class Share:
    """What one sequence gets of a step: pending tokens, and drafts behind them."""

    __slots__ = ("num_drafts", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_drafts = num_drafts

    @property
    def is_last(self) -> bool:
        """Whether nothing of the sequence's text stays pending."""
        sequence = self.sequence
        return sequence.num_computed + self.num_tokens == len(sequence.token_ids)


class Sketch:
    """A plan in the making: shares by sequence, and what is left of the token budget."""

    __slots__ = ("admitted", "budget", "preempted", "shares")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[int, Share] = {}
        self.preempted: list[int] = []
        self.admitted: list[Sequence] = []

    def add(self, share: Share) -> None:
        self.shares[share.sequence.sequence_id] = share
        self.budget -= share.num_tokens + share.num_drafts

    def withdraw(self, sequence_id: int) -> None:
        share = self.shares.pop(sequence_id, None)
        if share is not None:
            self.budget += share.num_tokens + share.num_drafts


class Planner:
    """Owns the order of running and waiting sequences; their blocks are the residency's."""

    def __init__(self, config: SchedulerConfig, residency: Residency) -> None:
        self.running: list[Sequence] = []  # by priority, then age
        self.waiting = WaitingQueue(config.max_admission_skips)
        self._config = config
        self._residency = residency
        self._pool = residency.pool

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
        """Say whether the next admission can succeed; may say so wrongly, but not the contrary."""
        sequence = self.waiting.choose(may_start, self._count_shared_blocks)
        if sequence is None:
            return False
        lower = [s for s in self.running if s.request.priority > sequence.request.priority]
        if lower:
            return True
        if len(self.running) >= self._config.max_num_seqs:
            return False
        num_blocks = self._residency.num_blocks(len(sequence.token_ids))
        return num_blocks - self._count_shared_blocks(sequence) <= self._pool.num_available

    def plan(self, max_tokens: int | None = None) -> Sketch:
        """Spend one token budget: running sequences by priority and age, then admissions."""
        budget = self._config.max_num_batched_tokens
        sketch = Sketch(budget if max_tokens is None else min(budget, max_tokens))
        self._plan_running(sketch)
        if not sketch.preempted:  # blocks are short: to admit now would only thrash
            self._plan_admissions(sketch)
        return sketch

    def remove(self, sequence: Sequence, *, keep_text: bool) -> None:
        """Take a sequence out of its queue or slot; `keep_text`: as Residency.leave."""
        if sequence.status is Status.RUNNING:
            self._residency.leave(sequence, keep_text=keep_text)
            self.running.remove(sequence)
            sequence.request.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _plan_running(self, sketch: Sketch) -> None:
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
            budget = sketch.budget - num_reserved
            if budget > 0 and self._grow(sequence, min(num_pending, budget), sketch):
                sketch.add(_share(sequence, budget))

    def rows(self, sketch: Sketch, num_drafts: int) -> tuple[Row, ...]:
        """Turn shares into rows. Blocks for drafts come from what is left now that every share has
        its own: drafts preempt nobody.

        num_drafts  most guesses that a row may be asked for
        """
        shares = list(sketch.shares.values())
        # all of them must find a place in the budget of the next step
        most = self._config.max_num_batched_tokens // max(len(shares), 1) - 1
        num_drafts = min(num_drafts, most)
        return tuple([self._row(share, num_drafts) for share in shares])

    def _row(self, share: Share, num_drafts: int) -> Row:
        sequence = share.sequence
        start = sequence.num_computed
        stop = start + share.num_tokens
        token_ids = tuple(sequence.token_ids[start:stop])
        sample = share.is_last and sequence.samples
        drafts: tuple[int, ...] = ()
        if share.num_drafts:
            num_fitting = self._stretch(sequence, stop + share.num_drafts) - stop
            drafts = sequence.draft_token_ids[: min(share.num_drafts, num_fitting)]
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
            self._residency.block_table(sequence),
            sample,
            num_drafts=len(drafts),
            num_drafts_wanted=num_wanted,
        )

    def _stretch(self, sequence: Sequence, num_tokens: int) -> int:
        """Extend a sequence as far as there are blocks; returns how many tokens have a place."""
        self._residency.extend(sequence, num_tokens)
        return len(sequence.block_ids) * self._residency.block_tokens

    def _grow(self, sequence: Sequence, num_tokens: int, sketch: Sketch) -> bool:
        """Give a sequence the blocks for `num_tokens` more, preempting from the end of the order;
        False when it had to go itself."""
        while not self._residency.extend(sequence, sequence.num_computed + num_tokens):
            victim = self.running[-1]
            self._preempt(victim, sketch)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, sketch: Sketch) -> None:
        """Take slot and blocks of a running sequence; its text stays cached as long as it can."""
        self.remove(victim, keep_text=True)
        victim.was_preempted = True
        victim.status = Status.WAITING
        self.waiting.add(victim)
        sketch.withdraw(victim.sequence_id)
        sketch.preempted.append(victim.sequence_id)

    # ---- admissions

    def _plan_admissions(self, sketch: Sketch) -> None:
        while self._may_admit(sketch):
            sequence = self.waiting.choose(may_start, self._count_shared_blocks)
            if sequence is None or sequence.sequence_id in sketch.preempted:
                return
            if not self._has_slot(sequence, sketch):
                return
            reuse = self._reserve(sequence, sketch)
            if reuse is None:
                return
            if not self._has_budget(sequence, sketch):
                self._residency.let_go(reuse)
                return
            self._start(sequence, reuse)
            sketch.admitted.append(sequence)
            sketch.add(_share(sequence, sketch.budget))

    def _may_admit(self, sketch: Sketch) -> bool:
        """Rule out the common case cheaply: full, and nobody of lower priority to give way."""
        if not self.waiting:
            return False
        if sketch.budget > 0 and len(self.running) < self._config.max_num_seqs:
            return True
        return self.running[-1].request.priority > self.waiting.first_priority

    def _count_shared_blocks(self, sequence: Sequence) -> int:
        has_cache = self._config.enable_prefix_caching
        return count_shared_blocks(sequence, self._residency.tree, has_cache=has_cache)

    def _has_slot(self, sequence: Sequence, sketch: Sketch) -> bool:
        """Find a free slot, or one of a sequence of strictly lower priority."""
        if len(self.running) < self._config.max_num_seqs:
            return True
        victim = self.running[-1]
        if victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim, sketch)
        return True

    def _has_budget(self, sequence: Sequence, sketch: Sketch) -> bool:
        """Find unspent tokens, or those of a longer row of strictly lower priority, which then
        waits for a later step."""
        for other in reversed(self.running):
            if sketch.budget > 0 or other.request.priority <= sequence.request.priority:
                break
            share = sketch.shares.get(other.sequence_id)
            if share is not None and share.num_tokens + share.num_drafts > 1:
                sketch.withdraw(other.sequence_id)
        return sketch.budget > 0

    def _reserve(self, sequence: Sequence, sketch: Sketch) -> Reuse | None:
        """Hold what the cache has of a sequence, if there are blocks for the rest; else None."""
        reuse = find_reuse(
            sequence, self._residency.tree, has_cache=self._config.enable_prefix_caching
        )
        self._residency.hold(reuse)
        num_blocks = self._residency.num_blocks(len(sequence.token_ids)) - len(reuse.block_ids)
        num_blocks += self._num_spare_blocks(sequence)
        if self._pool.num_available < num_blocks:
            self._residency.drop_copy(reuse)
        self._displace(sequence, num_blocks, sketch)
        if self._pool.num_available < num_blocks:
            self._residency.let_go(reuse)
            return None
        return reuse

    def _num_spare_blocks(self, sequence: Sequence) -> int:
        """Leave some to running sequences that will not be displaced, or the next steps would
        preempt what is admitted now; and what they, and it, will need for their answers."""
        priority = sequence.request.priority
        peers = [peer for peer in self.running if peer.request.priority <= priority]
        num_spare = -(-len(peers) // SEQUENCES_PER_SPARE_BLOCK)
        if not self._config.reserve_output_tokens:
            return num_spare
        num_future = sum(self._count_future_blocks(peer) for peer in peers)
        now = self._residency.num_blocks(len(sequence.token_ids))
        num_future += self._count_future_blocks(sequence) - (now if not sequence.block_ids else 0)
        return max(num_spare, num_future)

    def _count_future_blocks(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence does not hold yet and is likely to ask for."""
        reserved = sequence.num_prompt_tokens + self._config.reserve_output_tokens
        num_tokens = max(min(reserved, sequence.max_total_tokens), len(sequence.token_ids))
        return max(self._residency.num_blocks(num_tokens) - len(sequence.block_ids), 0)

    def _displace(self, sequence: Sequence, num_blocks: int, sketch: Sketch) -> None:
        """Preempt sequences of strictly lower priority while blocks are short, if that helps."""
        priority = sequence.request.priority
        lower = [victim for victim in self.running if victim.request.priority > priority]
        num_held = sum(len(victim.block_ids) for victim in lower)
        if self._pool.num_available + num_held < num_blocks:
            return
        while lower and self._pool.num_available < num_blocks:
            self._preempt(lower.pop(), sketch)

    def _start(self, sequence: Sequence, reuse: Reuse) -> None:
        """Give a sequence its slot and blocks."""
        self.waiting.note_admission(sequence)
        sequence.status = Status.RUNNING
        sequence.was_preempted = False
        sequence.num_skips = 0
        self._residency.enter(sequence, reuse)
        insort(self.running, sequence, key=_ORDER)
        sequence.request.running.append(sequence)


def _share(sequence: Sequence, budget: int) -> Share:
    """Take as many pending tokens as the budget allows, and drafts if the text ends with them."""
    num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
    share = Share(sequence, num_tokens, 0)
    if sequence.draft_token_ids and share.is_last:
        num_allowed = sequence.max_total_tokens - len(sequence.token_ids) - 1
        num_drafts = min(len(sequence.draft_token_ids), budget - num_tokens, num_allowed)
        share.num_drafts = max(num_drafts, 0)
    return share
