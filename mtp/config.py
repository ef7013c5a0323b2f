"""What a user may say about speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

MAX_DRAFT_TOKENS = 4
"""Guesses of one sequence in a step; attention kernels see one query token more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How many tokens are guessed ahead, and by whom."""

    speculation: Annotated[
        Literal["auto", "adaptive", "fixed", "off"],
        "auto: fixed if --num-speculative-tokens is given, else adaptive if the model has an MTP "
        "layer",
    ] = "auto"
    num_speculative_tokens: Annotated[
        int | None, "tokens guessed ahead, 0..4; with --speculation adaptive: the most"
    ] = None
    speculation_method: Annotated[
        Literal["auto", "mtp", "lookup"],
        "mtp: the model's own layer; lookup: repetitions in the text; auto: per request the better",
    ] = "auto"

    @property
    def is_off(self) -> bool:
        """Whether no model gets drafts."""
        return self.speculation == "off" or self.num_speculative_tokens == 0

    @property
    def is_explicit(self) -> bool:
        """Whether drafts were asked for, so that they are made for models without a layer of
        their own too."""
        return (
            self.speculation in ("adaptive", "fixed")
            or bool(self.num_speculative_tokens)
            or self.speculation_method == "lookup"
        )

    @property
    def is_fixed(self) -> bool:
        if self.speculation == "auto":
            return self.num_speculative_tokens is not None
        return self.speculation == "fixed"

    @property
    def max_depth(self) -> int:
        """Return the fixed depth, or the largest of the adaptive choice."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return 1 if self.is_fixed else MAX_DRAFT_TOKENS

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        if k is not None and not 0 <= k <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens must be in 0..{MAX_DRAFT_TOKENS}, got {k}")
        if self.speculation == "off" and k:
            raise ValueError(f"speculation is off, but num_speculative_tokens is {k}: drop one")
