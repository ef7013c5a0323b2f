"""What happens to a request, as typed events; a whole answer is their fold.

Stream encoders take the events one by one, the others take the fold, so that both say the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.families.interface import (
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
    ToolEvent,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStarted:
    """A choice begins; comes before everything else of its index."""

    index: int
    cached_tokens: int = 0
    """Those of the prompt that were found in the cache, as far as known by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What a choice said since the last delta, with the tokens that arrived since then.

    The parts are in this order: reasoning, text, tool calls. What may be the beginning of a stop
    string or of markup comes later than its tokens.
    """

    index: int
    text: str
    reasoning: str = ""
    tool_events: tuple[ToolEvent, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    """One per token when asked for; None for the first token of an echoed prompt."""
    text_offsets: tuple[int, ...] = ()
    """Where each token starts, in characters from the start of the choice's text."""
    is_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A choice ended; comes exactly once per index unless the request failed."""

    index: int
    reason: str
    """"stop", "length" or "tool_calls"."""
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReady:
    """Token counts of the whole request; the last event of a request that did not fail."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that the model spent on its reasoning."""
    accepted_prediction_tokens: int = 0
    """Tokens of the answer that had been guessed."""
    rejected_prediction_tokens: int = 0
    """Guesses that were computed and are not in the answer."""

    def __add__(self, other: UsageReady) -> UsageReady:
        return UsageReady(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            accepted_prediction_tokens=(
                self.accepted_prediction_tokens + other.accepted_prediction_tokens
            ),
            rejected_prediction_tokens=(
                self.rejected_prediction_tokens + other.rejected_prediction_tokens
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request is lost; the last event."""

    error: ApiError


Event: TypeAlias = RoleStarted | TextDelta | Finished | UsageReady | Failed


@dataclass(slots=True)
class ToolCall:
    """One call of a function, folded."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Choice:
    """One answer, folded."""

    index: int
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    logprob_token_ids: list[int] = field(default_factory=list)
    """The tokens of `logprobs`: with `echo` these begin with the prompt's."""
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: TextDelta) -> None:
        self.reasonings.append(event.reasoning)
        self.texts.append(event.text)
        for tool_event in event.tool_events:
            self._add_tool_event(tool_event)
        if not event.is_prompt:
            self.token_ids += event.token_ids
        if event.logprobs:
            self.logprobs += event.logprobs
            self.logprob_token_ids += event.token_ids
            self.text_offsets += event.text_offsets

    def _add_tool_event(self, event: ToolEvent) -> None:
        match event:
            case ToolCallStarted():
                self.tool_calls.append(ToolCall(event.id, event.name))
            case ToolArguments():
                self.tool_calls[event.index].arguments += event.text
            case ToolCallEnded():
                self.tool_calls[event.index].is_complete = True

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)


@dataclass(slots=True)
class Answer:
    """All choices of a request in the order of their index, and the usage."""

    choices: list[Choice]
    usage: UsageReady


async def fold(events: AsyncIterator[Event]) -> Answer:
    """Collect all events of a request; raises the ApiError of a failed one."""
    choices: dict[int, Choice] = {}
    async for event in events:
        match event:
            case RoleStarted():
                choices[event.index] = Choice(event.index)
            case TextDelta():
                choices[event.index].add(event)
            case Finished():
                choice = choices[event.index]
                choice.finish_reason, choice.stop_reason = event.reason, event.stop_reason
            case UsageReady():
                return Answer([choices[i] for i in sorted(choices)], event)
            case Failed():
                raise event.error
    raise AssertionError("a request ends with UsageReady or Failed")
