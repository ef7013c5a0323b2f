"""Cuts an answer into blocks: the output items of Responses, the content blocks of Messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from whalepod.server.gateway.events import Choice, TextDelta
from whalepod.server.gateway.families.interface import (
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
    ToolEvent,
)

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Block:
    """The reasoning, the text, or one call of a function."""

    index: int
    kind: Kind
    texts: list[str] = field(default_factory=list)
    """Of a call: its arguments."""
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    """Whether it ended by itself, not by a limit."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStarted:
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEnded:
    block: Block


BlockEvent: TypeAlias = BlockStarted | BlockGrew | BlockEnded


class BlockReader:
    """Takes the deltas of one choice; a block ends before the next one starts."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, delta: TextDelta) -> Iterator[BlockEvent]:
        """Yield what a delta does to the blocks."""
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow("text", delta.text)
        for event in delta.tool_events:
            yield from self._push_tool_event(event)

    def finish(self, reason: str) -> Iterator[BlockEvent]:
        """End the last block; an answer without any becomes one empty text."""
        if not self.blocks:
            yield from self._start("text")
        is_call = self._open is not None and self._open.kind == "call"
        yield from self._end(complete=reason != "length" and not is_call)

    def _push_tool_event(self, event: ToolEvent) -> Iterator[BlockEvent]:
        match event:
            case ToolCallStarted():
                yield from self._start("call", event.id, event.name)
            case ToolArguments():
                yield from self._grow("call", event.text)
            case ToolCallEnded():
                yield from self._end(complete=True)

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(kind)
        assert self._open is not None
        self._open.texts.append(text)
        yield BlockGrew(block=self._open, text=text)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._end(complete=self._open is None or self._open.kind != "call")
        self._open = Block(index=len(self.blocks), kind=kind, call_id=call_id, name=name)
        self.blocks.append(self._open)
        yield BlockStarted(block=self._open)

    def _end(self, *, complete: bool) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is not None:
            block.is_complete = complete
            yield BlockEnded(block=block)


def blocks_of(choice: Choice) -> list[Block]:
    """Return the blocks of a folded choice: those of its deltas, however they were cut."""
    assert choice.finish_reason is not None
    reader = BlockReader()
    whole = TextDelta(
        index=choice.index,
        text=choice.text,
        reasoning=choice.reasoning,
        tool_events=tuple(_tool_events(choice)),
    )
    _exhaust(reader.push(whole))
    _exhaust(reader.finish(choice.finish_reason))
    return reader.blocks


def _tool_events(choice: Choice) -> Iterator[ToolEvent]:
    for index, call in enumerate(choice.tool_calls):
        yield ToolCallStarted(index=index, id=call.id, name=call.name)
        if call.arguments:
            yield ToolArguments(index=index, text=call.arguments)
        if call.is_complete:
            yield ToolCallEnded(index=index)


def _exhaust(events: Iterable[BlockEvent]) -> None:
    for _ in events:
        pass
