"""The contract between a chat format and the rest of the gateway: text in, blocks out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from whalepod.server.chat_template import TemplateHabits
from whalepod.server.gateway.content_blocks import BlockWriter
from whalepod.server.structured.schema_rules import RuleSet

Start: TypeAlias = Literal["reasoning", "content", "open"]
"""Where an answer begins; "open" when the prompt leaves that to the model."""
STRUCTURE: Final = "\ufdd1"
"""A noncharacter that comes before the text of a marker which the model wrote as its token.

Spelled out by other tokens, the same text is letters, unless the tokenizer has no such token.
"""


class Parser(Protocol):
    """Divides one answer into its reasoning, then text and tool calls.

    However the text is cut into pieces, its blocks are the same, and nothing is held back
    but what may still turn out to be markup. It never raises, whatever the text is.
    """

    @property
    def blocks(self) -> BlockWriter:
        """Where it writes what it has read."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the next character belongs to the reasoning, its closing tag included."""
        ...

    def feed(self, text: str) -> None:
        """Take the next text of the answer."""
        ...

    def finish(self, *, complete: bool) -> None:
        """End the answer and write what was held back.

        `complete` says that the model ended it; otherwise a limit or a stop string cut it off, and
        an unfinished call stays unfinished.
        """
        ...


class PlainParser:
    """Reads answers that are nothing but text: raw completions, and chats in an unknown format."""

    in_reasoning = False

    def __init__(self) -> None:
        self.blocks = BlockWriter()

    def feed(self, text: str) -> None:
        self.blocks.grow("text", text)

    def finish(self, *, complete: bool) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a parser must know of the request."""

    start: Start
    tools: Mapping[str, Mapping[str, Any] | None] | None = None
    """Parameter schemas by function name; None: no tools, so their markup is plain text."""
    parallel: bool = True
    """False: only the first call counts."""
    new_id: Callable[[], str]
    token_markers: frozenset[str] = frozenset()
    """The markers that are tokens: they count only with `STRUCTURE` before them."""

    def spelled(self, marker: str) -> str:
        """Return how a marker stands in the text that the parser gets."""
        return STRUCTURE + marker if marker in self.token_markers else marker


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
    """Returns the Lark term of a format's marker: a token, or its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """One way of writing answers, and how to tell which checkpoints write so."""

    name: str
    reasoning_parser_names: frozenset[str]
    """What `--reasoning-parser` may say for it; empty: the format does not reason."""
    tool_call_parser_names: frozenset[str]
    markers: tuple[str, ...]
    """Markup that must reach the parser, be it made of special tokens or not."""
    reasoning_start: str | None
    """The marker that begins the reasoning, unless the prompt holds it already."""
    reasoning_end: str | None
    """The marker that ends the reasoning; None: the format does not reason."""
    call_openers: tuple[str, ...]
    """The marker that opens a block of calls, then markers that open a call without a block."""
    recognises: Callable[[TemplateHabits], bool]
    """Whether a chat template renders calls in this format."""
    describe_tools: Callable[[Sequence[Mapping[str, Any]]], str] | None
    """Returns what a system prompt says of tools where the template leaves them out, if known."""
    start: Callable[[str], Start]
    """Where the answer begins, from the end of the rendered prompt."""
    new_parser: Callable[[ParserOptions], Parser]
    call_grammar: Callable[[CallOptions], RuleSet]
    """Returns rules of which `calls` is a whole block of calls."""
