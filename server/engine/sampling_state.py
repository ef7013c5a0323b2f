"""What the sampler keeps of one sequence: its settings, its seed, and its token counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.request import Sequence as QueuedSequence
from whalepod.server.engine.grammar import GrammarState
from whalepod.server.engine.token_counts import FloatArray, IntArray, TokenCounts
from whalepod.server.structured.interface import Matcher

SMALLEST_TEMPERATURE = 1e-5
"""Below it dividing by the temperature overflows; the limit is the greedy choice anyway."""


class SamplingState:
    """One sequence as the sampler sees it. Its owner is the runner, which drops it at the end.

    `seed` is a 64-bit integer, `stop_token_ids` are those that `min_tokens` keeps away.
    """

    __slots__ = (
        "_counts", "bias_ids", "bias_values", "grammar", "has_penalties", "is_greedy",
        "num_prompt_tokens", "params", "plain_from", "prompt_token_ids", "seed", "stop_token_ids",
        "unedited_from", "wants_logprobs", "wants_prompt_logprobs",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        seed: int,
        stop_token_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
        *,
        wants_prompt_logprobs: bool = False,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.seed = as_int64(seed)
        self.stop_token_ids = np.array(sorted(stop_token_ids), dtype=np.int64)
        self.is_greedy = params.temperature < SMALLEST_TEMPERATURE
        self.bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.wants_logprobs = params.logprobs is not None
        self.wants_prompt_logprobs = wants_prompt_logprobs
        is_always_edited = self.has_penalties or len(self.bias_ids) or self.grammar
        # the first position whose token is drawn from the model's logits as they are ...
        self.unedited_from = (
            math.inf if is_always_edited else self.num_prompt_tokens + params.min_tokens
        )
        # ... and the first whose token is simply the likeliest of them
        self.plain_from = self.unedited_from if self.is_greedy else math.inf
        self._counts: TokenCounts | None = None

    @classmethod
    def of_sequence(
        cls,
        sequence: QueuedSequence,
        eos_token_ids: frozenset[int],
        matcher: Matcher | None = None,
        vocab_size: int = 0,
    ) -> SamplingState:
        """Return the state of a sequence that the scheduler has queued.

        matcher     of its grammar, to be copied; None: it has none
        vocab_size  of the model; needed with a grammar only
        """
        request, params = sequence.request, sequence.request.params
        assert params.seed is not None, "the seed is fixed when a request is taken"
        stop_token_ids = eos_token_ids.union(params.stop_token_ids)
        grammar = None
        if matcher is not None and params.constraint is not None:
            grammar = GrammarState(
                matcher.copy(),
                params.constraint,
                num_prompt_tokens=sequence.num_prompt_tokens,
                vocab_size=vocab_size,
                stop_token_ids=stop_token_ids,
            )
        return cls(
            params,
            request.prompt_token_ids,
            seed_of_branch(params.seed, sequence.index),
            stop_token_ids,
            grammar,
            wants_prompt_logprobs=sequence.reports_prompt_logprobs,
        )

    def masks_stops(self, position: int) -> bool:
        """Return whether `min_tokens` still keeps the text from ending at `position`."""
        return position - self.num_prompt_tokens < self.params.min_tokens

    def observe(self, start: int, token_ids: Sequence[int]) -> None:
        """Count the tokens of a row that starts at position `start`, each position once.

        Counting what rows bring, not what was sampled, makes a repeated step, a recomputed
        sequence and a rejected draft harmless.
        """
        if self.grammar is not None:
            self.grammar.observe(start, token_ids)
        if self.has_penalties:
            self.counts.observe(start, token_ids)

    @property
    def counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self.prompt_token_ids)
        return self._counts

    def counts_after(self, token_ids: Sequence[int]) -> tuple[IntArray, FloatArray]:
        """Return the distinct tokens of the text, and how often the answer holds each, as if
        `token_ids` had been generated after what was observed."""
        if not token_ids:
            return self.counts.ids, self.counts.generated
        return self.counts.with_tokens(token_ids)


@dataclass(slots=True)
class SampleRequest:
    """One token to choose: `position` is its index in the sequence's whole text, `before` are the
    tokens before it that the state has not observed."""

    state: SamplingState
    position: int
    before: Sequence[int] = ()


def seed_of_branch(seed: int, index: int) -> int:
    """Return the seed of answer `index` of a request: its own seed for answer 0, else a mix.

    So the first of several answers is the one that a request for one answer gets.
    """
    return seed if index == 0 else as_int64(splitmix64(seed ^ index * 0xD1342543DE82EF95))


def splitmix64(value: int) -> int:
    """Scramble 64 bits (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


def as_int64(value: int) -> int:
    """Return the low 64 bits of a Python integer as a signed number."""
    return (value + 2**63) % 2**64 - 2**63
