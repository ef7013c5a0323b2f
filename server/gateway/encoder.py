"""What the encoders of all APIs share: frames of a stream, options, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from whalepod.server.gateway.events import Event, FoldedAnswer, UsageReady

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot be."""


def named_frame(event: str, data: object) -> bytes:
    """Return `data` as one event that also has a name."""
    return b"event: " + event.encode() + b"\n" + frame(data)


def frame(data: object) -> bytes:
    """Return `data` as one event; JSON never holds a raw line break, so one line is enough."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """What a request wants to see of its answer."""

    include_usage: bool = False
    num_top_logprobs: int | None = None
    """None: no log-probabilities."""
    return_token_ids: bool = False
    prompts_token_ids: Sequence[Sequence[int]] = ()
    num_choices_per_prompt: int = 1

    @property
    def shows_tokens(self) -> bool:
        """Whether the stream tells of tokens that make no text yet."""
        return self.return_token_ids or self.num_top_logprobs is not None


class AnswerEncoder(Protocol):
    """One API's view of the events."""

    @property
    def ping(self) -> bytes:
        """What a silent stream sends to stay open."""
        ...

    def frames(self, event: Event) -> bytes:
        """Return the stream's bytes for an event; b"" when the API says nothing about it."""
        ...

    def body(self, answer: FoldedAnswer) -> dict[str, object]:
        """Return the JSON object of a whole answer."""
        ...


def usage_fields(usage: UsageReady) -> dict[str, object]:
    """Return OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        # DeepSeek's names beside OpenAI's
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }
