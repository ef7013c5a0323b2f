"""The parts of an answer, as events: at most one of reasoning and of text, then calls of functions.

Blocks are the output items of Responses and the content blocks of Messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStarted:
    """A block begins; blocks of a choice count up from index 0, and each ends before the next."""

    index: int
    kind: Kind
    call_index: int = -1
    """Its place among the calls of the choice."""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrew:
    """The next text of the open block; of a call: the next piece of its arguments."""

    index: int
    kind: Kind
    call_index: int = -1
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEnded:
    """The open block ended: by itself, or cut off by a limit or, if a call, by a stop string."""

    index: int
    is_complete: bool


BlockEvent: TypeAlias = BlockStarted | BlockGrew | BlockEnded


class BlockWriter:
    """Turns what a parser reads into events of blocks; adjacent pieces of a block become one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._num_blocks = 0
        self._open: Kind | None = None
        self._events: list[BlockEvent] = []

    @property
    def is_in_call(self) -> bool:
        """Whether the last call has not ended."""
        return self._open == "call"

    def grow(self, kind: Kind, text: str) -> None:
        """Add text to the open block, or to a new one if that is of another kind."""
        if not text:
            return
        if self._open != kind:
            self._start(kind)
        if self._events and isinstance(last := self._events[-1], BlockGrew):
            text = last.text + text
            self._events.pop()
        place = self._call_index(kind)
        index = self._num_blocks - 1
        self._events.append(BlockGrew(index=index, kind=kind, call_index=place, text=text))

    def start_call(self, call_id: str, name: str) -> None:
        self.num_calls += 1
        self._start("call", call_id, name)

    def end_call(self) -> None:
        """End a call that is whole; one that the end of the answer cuts off never gets this."""
        self._end(is_complete=True)

    def take(self) -> tuple[BlockEvent, ...]:
        """Return the events since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def finish(self, *, is_complete: bool) -> tuple[BlockEvent, ...]:
        """End the last block, which an open call leaves incomplete, and return the events."""
        if not self._num_blocks:
            self._start("text")
        self._end(is_complete=is_complete and not self.is_in_call)
        return self.take()

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> None:
        self._end(is_complete=not self.is_in_call)
        self._open = kind
        index, place = self._num_blocks, self._call_index(kind)
        self._num_blocks += 1
        self._events.append(
            BlockStarted(index=index, kind=kind, call_index=place, call_id=call_id, name=name)
        )

    def _end(self, *, is_complete: bool) -> None:
        if self._open is not None:
            self._open = None
            self._events.append(BlockEnded(index=self._num_blocks - 1, is_complete=is_complete))

    def _call_index(self, kind: Kind) -> int:
        return self.num_calls - 1 if kind == "call" else -1


def joined(events: Iterable[BlockEvent]) -> tuple[BlockEvent, ...]:
    """Return events with adjacent pieces of a block as one."""
    whole: list[BlockEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, BlockGrew) and isinstance(last, BlockGrew):
            event = replace(last, text=last.text + event.text)
            whole.pop()
        whole.append(event)
    return tuple(whole)


@dataclass(slots=True, kw_only=True)
class Block:
    """The reasoning, the text, or one call of a function, folded."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    """Of a call: its arguments."""
    is_complete: bool = False
    """Whether it ended by itself, not by a limit."""

    @property
    def text(self) -> str:
        return "".join(self.texts)
