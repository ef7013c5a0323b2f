"""What a user may ask of one request, checked at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MAX_SPECULATIVE_TOKENS = 4
"""Tokens that may be guessed ahead of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar that the answer, or what follows its reasoning, must fulfil."""

    kind: Literal["json_schema", "regex", "lark", "gbnf", "rules", "any"]
    """"rules": of our own making; "any": no grammar, only what the other fields say."""
    grammar: str
    starts_after: int | None = None
    """The token after which the grammar begins; None: at the start of the answer."""
    is_optional: bool = False
    """Whether the answer may end before the grammar has begun."""
    banned_before: tuple[int, ...] = ()
    """Tokens that must not come before the grammar begins."""
    reasoning_start: int | None = None
    """The token after which a reasoning of bounded length begins; None: with the answer."""
    reasoning_ends: tuple[int, ...] = ()
    """The tokens that end a reasoning of bounded length."""
    max_reasoning_tokens: int | None = None
    """After this many tokens the first of `reasoning_ends` is the only choice; None: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Defaults follow OpenAI's API.

    Raises ValueError that names the parameter, its value and the allowed range.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: up to the model's context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """0: the likeliest token."""
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: the engine draws one at admission, so that a resumed request goes on the same way."""
    logprobs: int | None = None
    """None: no log-probabilities; n: those of the chosen token and of the n likeliest."""
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    num_speculative_tokens: int | None = None
    """Most tokens guessed ahead for this request, 0 for none; None: as many as the engine wants.
    The text is the same for every value."""

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "in 0..100")
        self._check("top_p", 0.0 <= self.top_p <= 1.0, "in 0..1")
        self._check("top_k", self.top_k >= -1, "-1, 0 or more")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "in 0..1")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in -2..2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in -2..2")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "in (0, 100]")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "in 0..20")
        self._check(
            "prompt_logprobs",
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
            "in 0..20",
        )
        k = self.num_speculative_tokens
        self._check(
            "num_speculative_tokens",
            k is None or 0 <= k <= MAX_SPECULATIVE_TOKENS,
            f"in 0..{MAX_SPECULATIVE_TOKENS}",
        )
        biases = self.logit_bias.values()
        self._check("logit_bias", all(-100.0 <= b <= 100.0 for b in biases), "in -100..100")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.constraint is not None and self.constraint.kind != "any" and self.min_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must be 0 with a grammar, which says where to end"
            )

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name} must be {allowed}, got {value}")
