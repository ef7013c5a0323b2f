"""A request, its sequences (one per answer), and where a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import BlockCopy, TokenLogprob
from whalepod.scheduler.prefix import Node


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


class Sequence:
    """One answer of a request: its tokens, how many are computed, and the blocks they live in.

    A sequence has no phase. `token_ids[num_computed:]` is pending, and steps compute it.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "block_table",
        "cancelled",
        "draft_token_ids",
        "index",
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
        self.cancelled = False
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_logprobs = 0
        self.num_skips = 0
        self.was_preempted = False
        self.block_keys: list[bytes] = []
        self.shared_blocks_at = (-1, 0)  # version of the tree, and what it had then
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """Start over without cache rows; the blocks were released or were never there."""
        self.num_computed = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.block_ids: list[int] = []
        self.block_table: tuple[int, ...] = ()
        self.path: list[Node] = []
        self.is_shared = True
        self.pending_copy: BlockCopy | None = None

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
    def max_reused_tokens(self) -> int:
        """Tokens that may come from the cache: never the last, whose logits are needed, and none
        whose prompt log-probability is still to be reported."""
        num_tokens = len(self.token_ids) - 1
        if self.reports_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1:
            return min(num_tokens, self.num_prompt_logprobs)
        return num_tokens

    def take_prompt_logprobs(
        self, start: int, logprobs: SequenceOf[TokenLogprob]
    ) -> tuple[TokenLogprob, ...]:
        """Keep those of a row from position `start` that were not reported before a preemption."""
        if not logprobs or not self.reports_prompt_logprobs:
            return ()
        fresh = tuple(logprobs[max(self.num_prompt_logprobs - start, 0) :])
        self.num_prompt_logprobs += len(fresh)
        return fresh

    @property
    def reports_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.request.params.prompt_logprobs is not None


class FinishDecision(NamedTuple):
    """How much of a run of new tokens is kept, and why the sequence ends there, if it does."""

    num_kept: int
    finish_reason: str | None = None
    stop_token_id: int | None = None


def decide_finish(sequence: Sequence, token_ids: SequenceOf[int]) -> FinishDecision:
    """Cut new tokens at the first that ends the sequence, judged one by one in order.

    A stop token ends it with "stop" (and is kept), the last allowed token with "length"; of both
    at once "stop" wins.
    """
    num_total = len(sequence.token_ids)
    num_total_to_stop = sequence.num_prompt_tokens + sequence.request.params.min_tokens
    stop_token_ids, max_total_tokens = sequence.stop_token_ids, sequence.max_total_tokens
    num_kept = 0
    for token_id in token_ids:
        num_kept += 1
        num_total += 1
        if token_id in stop_token_ids and num_total > num_total_to_stop:
            return FinishDecision(num_kept, "stop", token_id)
        if num_total >= max_total_tokens:
            return FinishDecision(num_kept, "length")
    return FinishDecision(num_kept)
