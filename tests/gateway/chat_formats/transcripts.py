"""Builds answers in each family's markup, and runs parsers over them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whalepod.server.gateway.chat_formats.deepseek_parser import MARKERS
from whalepod.server.gateway.chat_formats.interface import ChatFormat, Parser, ParserOptions, Start
from whalepod.server.gateway.content_blocks import BlockEnded, BlockEvent, BlockGrew, BlockStarted

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
    family: ChatFormat,
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


def assemble(events: Iterable[BlockEvent]) -> Parsed:
    """Fold events; reasoning comes first, and no block is touched after its end."""
    parsed, started = Parsed(), list[BlockStarted]()
    is_open = False
    for event in events:
        match event:
            case BlockStarted(kind=kind):
                assert not is_open
                assert event.index == len(started)
                started.append(event)
                is_open = True
                if kind == "call":
                    assert event.call_index == len(parsed.calls)
                    parsed.calls.append(Call(event.call_id, event.name))
                continue
            case BlockGrew(kind="reasoning"):
                parsed.reasoning += event.text
            case BlockGrew(kind="text"):
                parsed.content += event.text
            case BlockGrew():
                assert event.call_index == len(parsed.calls) - 1
                parsed.calls[-1].arguments += event.text
            case BlockEnded():
                if started[-1].kind == "call":
                    parsed.calls[-1].ended = event.is_complete
        assert is_open
        assert event.index == len(started) - 1
        is_open = not isinstance(event, BlockEnded)
    kinds = [event.kind for event in started]
    assert "reasoning" not in kinds[1:]
    return parsed


def feed(parser: Parser, piece: str) -> tuple[BlockEvent, ...]:
    parser.feed(piece)
    return parser.blocks.take()


def parse(parser: Parser, pieces: Sequence[str], *, complete: bool = True) -> Parsed:
    events = [event for piece in pieces for event in feed(parser, piece)]
    parser.finish(complete=complete)
    return assemble([*events, *parser.blocks.take()])


def smallest_pieces(text: str) -> list[str]:
    """Return what one token each can say: markers, and characters."""
    return re.findall("|".join([*map(re.escape, MARKERS), "."]), text, re.DOTALL)


def cut_between_tokens(text: str, positions: Iterable[int]) -> list[str]:
    """Cut a text at positions, and after a marker at positions inside it."""
    ends = [*itertools.accumulate(map(len, smallest_pieces(text)), initial=0)]
    return cut_at(text, [min(end for end in ends if end >= position) for position in positions])


def cut_at(text: str, positions: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(positions), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]
