"""What happens to a request, as typed events; a whole answer is their fold.

Stream encoders take the events one by one, the others take the fold, so that both say the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.content_blocks import (
    Block,
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockStarted,
    Kind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStarted:
    """A choice begins; comes before everything else of its index."""

    index: int
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache, as far as known by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How the blocks of a choice grew, with the tokens that arrived since the last delta.

    What may be the beginning of a stop string or of markup comes later than its tokens.
    """

    index: int
    blocks: tuple[BlockEvent, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    """One per token when asked for; None for the first token of an echoed prompt."""
    text_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the tokens that make the text in `blocks`."""
    text_offsets: tuple[int, ...] = ()
    """Where each token starts, in characters from the start of the choice's text."""
    is_prompt: bool = False

    @property
    def text(self) -> str:
        """The new text, without reasoning and calls."""
        return "".join(
            event.text
            for event in self.blocks
            if isinstance(event, BlockGrew) and event.kind == "text"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A choice ended; comes exactly once per index unless the request failed."""

    index: int
    reason: str
    """"stop", "length" or "tool_calls"."""
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended it."""
    blocks: tuple[BlockEvent, ...] = ()
    """The end of the last block; a choice without any gets an empty text before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReady:
    """Token counts of the whole request; the last event of a request that did not fail."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Tokens of the answer that the model spent on its reasoning."""
    accepted_prediction_tokens: int = 0
    """Tokens of the answer that had been guessed."""
    rejected_prediction_tokens: int = 0
    """Guesses that were computed and are not in the answer."""

    def __add__(self, other: UsageReady) -> UsageReady:
        names = self.__slots__
        return UsageReady(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request is lost; the last event."""

    error: ApiError


Event: TypeAlias = ChoiceStarted | Delta | Finished | UsageReady | Failed


@dataclass(slots=True)
class Choice:
    """One answer, folded as far as it has come."""

    index: int
    blocks: list[Block] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    text_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprob_token_ids: list[int] = field(default_factory=list)
    """The tokens of `logprobs`: with `echo` these begin with the prompt's."""
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, event: Delta | Finished) -> None:
        self.add_tokens(event)
        for block_event in event.blocks:
            self.add_to_blocks(block_event)

    def add_tokens(self, event: Delta | Finished) -> None:
        """Fold all of an event but its blocks."""
        if isinstance(event, Finished):
            self.finish_reason, self.stop_reason = event.reason, event.stop_reason
            return
        if not event.is_prompt:
            self.token_ids += event.token_ids
        self.text_logprobs += event.text_logprobs
        if event.logprobs:
            self.logprobs += event.logprobs
            self.logprob_token_ids += event.token_ids
            self.text_offsets += event.text_offsets

    def add_to_blocks(self, event: BlockEvent) -> Block:
        """Fold one event of a block and return the block."""
        match event:
            case BlockStarted(index=index, kind=kind, call_id=call_id, name=name):
                self.blocks.append(Block(index=index, kind=kind, call_id=call_id, name=name))
            case BlockGrew():
                self.blocks[-1].texts.append(event.text)
            case BlockEnded():
                self.blocks[-1].is_complete = event.is_complete
        return self.blocks[-1]

    @property
    def text(self) -> str:
        return self._text_of("text")

    @property
    def reasoning(self) -> str:
        return self._text_of("reasoning")

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def _text_of(self, kind: Kind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)


@dataclass(slots=True)
class FoldedAnswer:
    """All choices of a request in the order of their index, and the usage."""

    choices: list[Choice]
    usage: UsageReady


async def fold(events: AsyncIterator[Event]) -> FoldedAnswer:
    """Collect all events of a request; raises the ApiError of a failed one."""
    choices: dict[int, Choice] = {}
    async for event in events:
        match event:
            case ChoiceStarted():
                choices[event.index] = Choice(event.index)
            case Delta() | Finished():
                choices[event.index].add(event)
            case UsageReady():
                return FoldedAnswer([choices[i] for i in sorted(choices)], event)
            case Failed():
                raise event.error
    raise AssertionError("a request ends with UsageReady or Failed")
