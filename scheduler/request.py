"""A request, its sequences (one per answer), and all that can happen to one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import BlockCopy, Row, RowResult, TokenLogprob
from whalepod.scheduler.prefix import Node, PrefixHit


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and the `num_sequences` answers that it asks for.

    Raises ValueError when the prompt is empty or no answer is asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_sequences: int = 1
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Prefixes are shared between requests of equal salt only."""
    arrival: int = field(default=0, init=False)
    """Position in the order of arrival, given by the scheduler."""
    arrival_us: int = field(default=0, init=False)
    """The clock of its arrival, as last noted by the scheduler."""
    queue_us: int = field(default=0, init=False)
    """Time from its arrival to its first admission."""
    sequences: list[Sequence] = field(default_factory=list, init=False)
    running: list[Sequence] = field(default_factory=list, init=False)
    """Those that hold a slot, in the order of their admission."""
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the cache when the first sequence was admitted."""
    was_admitted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"the prompt of request {self.request_id!r} has no tokens")
        if not 0 <= min(self.prompt_token_ids) <= max(self.prompt_token_ids) < 1 << 32:
            raise ValueError(
                f"token ids of a prompt must be in 0..2**32 - 1, got "
                f"{min(self.prompt_token_ids)}..{max(self.prompt_token_ids)}"
            )
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences must be at least 1, got {self.num_sequences}")

    def arrive(self, arrival: int, clock_us: int) -> None:
        """Take a place in the order of arrival."""
        self.arrival, self.arrival_us = arrival, clock_us

    def note_admission(self, num_cached_tokens: int, clock_us: int) -> bool:
        """Note what the first admitted sequence found in the cache; False if one was admitted
        before: later ones find the request's own rows there."""
        if self.was_admitted:
            return False
        self.was_admitted = True
        self.num_cached_tokens = num_cached_tokens
        self.queue_us = clock_us - self.arrival_us
        return True

    @property
    def has_ended(self) -> bool:
        return all(sequence.status is Status.ENDED for sequence in self.sequences)

    def find_prefilled(self) -> Sequence | None:
        """Return a running sequence whose prompt is in the cache, not only about to be copied
        there."""
        for sequence in self.running:
            is_copied = sequence.pending_copy is None
            if sequence.num_computed >= sequence.num_prompt_tokens and is_copied:
                return sequence
        return None


class FinishDecision(NamedTuple):
    """How much of a run of new tokens is kept, and why the sequence ends there, if it does."""

    num_kept: int
    finish_reason: str | None = None
    stop_token_id: int | None = None


class Sequence:
    """One answer of a request: its tokens, how many are computed, and the blocks they live in.

    A sequence has no phase. `token_ids[num_computed:]` is pending, and steps compute it. Others
    read its attributes; only its own methods change them:

        waiting -- start --> running -- end --> ended        waiting -- end --> ended
        waiting <-- preempt -- running
    """

    __slots__ = (
        "_block_table",
        "block_ids",
        "block_keys",
        "draft_token_ids",
        "index",
        "is_cancelled",
        "is_shared",
        "max_total_tokens",
        "num_computed",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_skips",
        "order",
        "path",
        "pending_copy",
        "request",
        "sequence_id",
        "shared_blocks_at",
        "status",
        "stop_token_ids",
        "token_ids",
        "was_preempted",
    )

    def __init__(
        self,
        *,
        sequence_id: int,
        request: Request,
        index: int,
        max_total_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.order = (request.priority, request.arrival, index)
        self.max_total_tokens = max_total_tokens
        self.stop_token_ids = stop_token_ids
        self.status = Status.WAITING
        self.is_cancelled = False
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_logprobs = 0
        self.num_skips = 0
        """How often a younger one was admitted before it."""
        self.was_preempted = False
        self.block_keys: list[bytes] = []
        """Hashes of its full blocks, as far as they were asked for."""
        self.shared_blocks_at = (-1, 0)
        """A version of the prefix tree, and how many of its full blocks were there."""
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self.num_computed = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.block_ids: list[int] = []
        self._block_table: tuple[int, ...] = ()
        self.path: list[Node] = []
        """The nodes of its leading blocks, which it shares through the prefix tree."""
        self.is_shared = True
        self.pending_copy: BlockCopy | None = None

    # -- what follows from its state ------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        return self.status is not Status.ENDED and not self.is_cancelled

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def samples(self) -> bool:
        return len(self.token_ids) < self.max_total_tokens

    @property
    def may_start(self) -> bool:
        """False while another answer of the request computes the prompt, to be shared then."""
        if not self.request.running or self.num_generated:
            return True
        return self.request.find_prefilled() is not None

    @property
    def max_reused_tokens(self) -> int:
        """Tokens that may come from the cache: never the last, whose logits are needed, and none
        whose prompt log-probability is still to be reported."""
        num_tokens = len(self.token_ids) - 1
        if self.reports_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1:
            return min(num_tokens, self.num_prompt_logprobs)
        return num_tokens

    @property
    def reports_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def block_table(self) -> tuple[int, ...]:
        """Its blocks as a value: the same object while they stay the same."""
        if not self._block_table:
            self._block_table = tuple(self.block_ids)
        return self._block_table

    # -- its life -------------------------------------------------------------------------------

    def skip(self) -> None:
        """A younger sequence is admitted before this one."""
        self.num_skips += 1

    def start(self, hit: PrefixHit, num_computed: int) -> None:
        """Take a slot, and the blocks that the cache has of the text."""
        self.status = Status.RUNNING
        self.was_preempted, self.num_skips = False, 0
        self.block_ids, self.path, self.is_shared = hit.block_ids, hit.path, hit.is_shared
        self.block_keys[: len(hit.path)] = [node.key for node in hit.path]
        self.num_computed = num_computed
        self.request.running.append(self)

    def preempt(self) -> None:
        """Wait again, with the text so far and without blocks, which were released."""
        self._leave(Status.WAITING)
        self.was_preempted = True

    def end(self) -> None:
        """Be over; the blocks were released."""
        self._leave(Status.ENDED)

    def _leave(self, status: Status) -> None:
        if self.status is Status.RUNNING:
            self.request.running.remove(self)
        self.status = status
        self._forget_blocks()

    def cancel(self) -> bool:
        """Be over after the step in flight, if there is one; False if it was cancelled before."""
        was_cancelled, self.is_cancelled = self.is_cancelled, True
        return not was_cancelled

    def accept(self, row: Row, result: RowResult) -> FinishDecision:
        """Add what a row yielded, cut at the end of the text, and forget drafts that were wrong."""
        decision = self._decide_finish(result.token_ids)
        num_computed = row.start + len(row.token_ids)
        if row.num_drafts:
            num_rejected = row.num_drafts + 1 - len(result.token_ids)
            num_past_end = max(len(result.token_ids) - 1 - decision.num_kept, 0)
            num_computed -= num_rejected + num_past_end
        self.num_computed = num_computed
        self.token_ids += result.token_ids[: decision.num_kept]
        self.draft_token_ids = result.draft_token_ids
        if decision.finish_reason is None and len(self.token_ids) == num_computed:
            return FinishDecision(decision.num_kept, "length")  # no token was asked for
        return decision

    def _decide_finish(self, token_ids: SequenceOf[int]) -> FinishDecision:
        """Cut new tokens at the first that ends the sequence, judged one by one in order.

        A stop token ends it with "stop" (and is kept), the last allowed token with "length"; of
        both at once "stop" wins.
        """
        num_total = len(self.token_ids)
        num_total_to_stop = self.num_prompt_tokens + self.request.params.min_tokens
        num_kept = 0
        for token_id in token_ids:
            num_kept += 1
            num_total += 1
            if token_id in self.stop_token_ids and num_total > num_total_to_stop:
                return FinishDecision(num_kept, "stop", token_id)
            if num_total >= self.max_total_tokens:
                return FinishDecision(num_kept, "length")
        return FinishDecision(num_kept)

    def take_prompt_logprobs(
        self, start: int, logprobs: SequenceOf[TokenLogprob]
    ) -> tuple[TokenLogprob, ...]:
        """Keep those of a row from position `start` that were not reported before a preemption."""
        if not logprobs or not self.reports_prompt_logprobs:
            return ()
        fresh = tuple(logprobs[max(self.num_prompt_logprobs - start, 0) :])
        self.num_prompt_logprobs += len(fresh)
        return fresh

    # -- its blocks, which the cache manager allocates and releases -------------------------------

    def note_shared_blocks(self, version: int, count: int) -> None:
        self.shared_blocks_at = (version, count)

    def add_block(self, block_id: int) -> None:
        self.block_ids.append(block_id)
        self._block_table = ()

    def pop_block(self) -> int:
        self._block_table = ()
        return self.block_ids.pop()

    def await_copy(self, copy: BlockCopy) -> None:
        """Begin with rows of another block: its next step copies them first."""
        self.pending_copy = copy

    def finish_copy(self) -> None:
        """The step with the copy succeeded."""
        self.pending_copy = None

    def add_shared_block(self, node: Node) -> None:
        """Share the next full block through the tree, where another block may hold its text."""
        index = len(self.path)
        self.path.append(node)
        if self.block_ids[index] != node.block_id:
            self.block_ids[index] = node.block_id
            self._block_table = ()

    def stop_sharing(self) -> None:
        """Keep further blocks to itself."""
        self.is_shared = False
