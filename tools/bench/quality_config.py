"""The flags of `whalepod bench quality`, apart from what loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """What is compared."""

    num_prompts: Annotated[int, "prompts of random tokens"] = 16
    prompt_tokens: Annotated[int, "tokens of each; all positions count"] = 64
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
