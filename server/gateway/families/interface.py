"""The contract between a model family and the rest of the gateway: text in, typed events out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from whalepod.server.structured.schema_rules import RuleSet

Start: TypeAlias = Literal["reasoning", "content", "open"]
"""Where an answer begins; "open" when the prompt leaves that to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStarted:
    """A call whose name is known; calls of an answer count up from index 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArguments:
    """The next piece of a call's arguments; the pieces add up to what the model wrote."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnded:
    """The call is whole; a call that the end of the answer cuts off never gets this."""

    index: int


ToolEvent: TypeAlias = ToolCallStarted | ToolArguments | ToolCallEnded
ParsedEvent: TypeAlias = ReasoningText | ContentText | ToolEvent


class Parser(Protocol):
    """Divides one answer. It only goes forward: reasoning, then content, then tool calls.

    However the text is cut into pieces, the events add up to the same, and nothing is held back
    but what may still turn out to be markup. It never raises, whatever the text is.
    """

    @property
    def in_reasoning(self) -> bool:
        """Whether the next character belongs to the reasoning, its closing tag included."""
        ...

    def feed(self, text: str) -> Sequence[ParsedEvent]:
        """Take the next text of the answer."""
        ...

    def finish(self, *, complete: bool) -> Sequence[ParsedEvent]:
        """End the answer and return what was held back.

        `complete` says that the model ended it; otherwise a limit or a stop string cut it off, and
        an unfinished call stays unfinished.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a parser must know of the request."""

    start: Start
    tools: Mapping[str, Mapping[str, Any] | None] | None = None
    """Parameter schemas by function name; None: no tools, so their markup is plain text."""
    parallel: bool = True
    """False: only the first call counts."""
    new_id: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Which calls a grammar must allow, and nothing else."""

    tools: Mapping[str, Mapping[str, Any] | None]
    strict: frozenset[str] = frozenset()
    """Functions whose schemas must be enforced as a whole, or the grammar is refused."""
    max_calls: int
    is_open: bool = False
    """Whether the marker that opens the block is in the answer already."""
    marker: Callable[[str], str]
    """Returns the Lark term of a family's marker: a token, or its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One way of writing answers, and how to tell which checkpoints write so."""

    name: str
    reasoning_parser_names: frozenset[str]
    """What `--reasoning-parser` may say for it; empty: the family does not reason."""
    tool_call_parser_names: frozenset[str]
    markers: tuple[str, ...]
    """Markup that must reach the parser, be it made of special tokens or not."""
    reasoning_start: str | None
    """The marker behind which the reasoning begins, unless the prompt holds it already."""
    reasoning_end: str | None
    """The marker behind which the answer begins; None: the family does not reason."""
    call_openers: tuple[str, ...]
    """The marker that opens a block of calls, then those that open a call without a block."""
    recognises: Callable[[str], bool]
    """Whether a chat template (its text) is this family's."""
    start: Callable[[str], Start]
    """Where the answer begins, from the end of the rendered prompt."""
    new_parser: Callable[[ParserOptions], Parser]
    call_grammar: Callable[[CallOptions], RuleSet]
    """Returns rules of which `calls` is a whole block of calls."""
