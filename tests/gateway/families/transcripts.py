"""Builds answers in each family's markup, and runs parsers over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whalepod.server.gateway.families.interface import (
    ContentText,
    Family,
    ParsedEvent,
    Parser,
    ParserOptions,
    ReasoningText,
    Start,
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
)

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"w": CITY, "function": CITY, "now": None}


def v3_call(name: str, arguments: str) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return f"{head}{arguments}\n```<｜tool▁call▁end｜>"


def v31_call(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def block(*calls: str, between: str = "") -> str:
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


def new_parser(
    family: Family,
    start: Start = "content",
    tools: dict[str, Any] | None = TOOLS,
    *,
    parallel: bool = True,
) -> Parser:
    ids = (f"call_{number}" for number in itertools.count())
    options = ParserOptions(start=start, tools=tools, parallel=parallel, new_id=lambda: next(ids))
    return family.new_parser(options)


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass
class Parsed:
    """What a client assembles."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def assemble(events: Iterable[ParsedEvent]) -> Parsed:
    """Fold events, checking that they only go forward and that no call is touched after its end."""
    parsed = Parsed()
    for event in events:
        match event:
            case ReasoningText():
                assert not parsed.content
                assert not parsed.calls
                parsed.reasoning += event.text
            case ContentText():
                assert not parsed.calls
                parsed.content += event.text
            case ToolCallStarted():
                assert event.index == len(parsed.calls)
                parsed.calls.append(Call(event.id, event.name))
            case ToolArguments():
                assert event.index == len(parsed.calls) - 1
                assert not parsed.calls[-1].ended
                parsed.calls[-1].arguments += event.text
            case ToolCallEnded():
                assert event.index == len(parsed.calls) - 1
                assert not parsed.calls[-1].ended
                parsed.calls[-1].ended = True
    return parsed


def parse(parser: Parser, pieces: Sequence[str], *, complete: bool = True) -> Parsed:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return assemble([*events, *parser.finish(complete=complete)])


def cut_at(text: str, positions: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(positions), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]
