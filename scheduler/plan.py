"""One step as a value: what the runner computes, and what it found.

What is made anew for every row of every step is a named tuple: a frozen dataclass takes four times
as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """The tokens of one sequence in a step.

    `token_ids[i]` sits at position `start + i`; everything before `start` is in the cache.
    `block_ids` covers `start + len(token_ids) + num_drafts_wanted` tokens. `sample` says that the
    last token (with drafts: each of the last `num_drafts + 1`) yields a next token, and at most
    `num_drafts_wanted` guesses of the tokens after it may come with it.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    num_drafts: int = 0
    num_drafts_wanted: int = 0


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` rows of block `source` to `target` before the step."""

    source: int
    target: int
    num_tokens: int


class Plan(NamedTuple):
    """One step: first the copies, then the rows; preempted sequences lost their cache rows."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprob(NamedTuple):
    """Log-probability of a token and of the likeliest ones, best first, as (id, logprob) pairs."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()


class RowResult(NamedTuple):
    """What a row yielded: accepted new tokens in order (empty when the row did not sample)."""

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when the request asked for them, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One per computed prompt position that has a successor in the prompt, when asked for."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of the tokens after the last accepted one, to be verified in a later step."""
    error: str | None = None
    """The row failed (a numerical fault): its request ends with this message."""


class StepResult(NamedTuple):
    step: int
    rows: tuple[RowResult, ...]
    step_time_us: int = 0
    """Measured by the runner; adaptive choices read this logged integer only."""
    draft_time_us: int = 0
    """The part of it that went into making drafts."""


class SequenceOutput(NamedTuple):
    """What one sequence gained in a step, already cut at its end."""

    sequence_id: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    """Which of the request's answers."""
    token_ids: tuple[int, ...] = ()
    """New tokens in order; an end-of-sequence or stop token that ends the answer is the last."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache at the request's first admission; the same in
    every output of the request."""
    queue_us: int = 0
    """Microseconds from the request's arrival to its first admission, by the noted clock."""
    finish_reason: str | None = None
    """"stop" (end of sequence or a stop token), "length", "abort", "error"."""
    stop_token_id: int | None = None
    num_accepted_drafts: int = 0
    """How many of `token_ids` had been guessed."""
    num_rejected_drafts: int = 0
    """Guesses that were computed and are not in the answer."""
    error: str | None = None

    def join(self, later: SequenceOutput) -> SequenceOutput:
        """Return this output and a later one of the same sequence as one."""
        return later._replace(
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            num_accepted_drafts=self.num_accepted_drafts + later.num_accepted_drafts,
            num_rejected_drafts=self.num_rejected_drafts + later.num_rejected_drafts,
        )
