"""Collects what parsers return into the parts of one delta."""

from __future__ import annotations

from collections.abc import Iterable

from whalepod.server.gateway.families.interface import (
    ContentText,
    ParsedEvent,
    ReasoningText,
    ToolArguments,
    ToolEvent,
)


class DeltaParts:
    """Reasoning, text and tool events; pieces that follow each other become one."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self.tool_events: list[ToolEvent] = []

    def add(self, events: Iterable[ParsedEvent]) -> None:
        for event in events:
            match event:
                case ReasoningText():
                    self._reasoning.append(event.text)
                case ContentText():
                    self._text.append(event.text)
                case ToolArguments():
                    self._add_arguments(event)
                case _:
                    self.tool_events.append(event)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def is_empty(self) -> bool:
        return not (self._reasoning or self._text or self.tool_events)

    def _add_arguments(self, event: ToolArguments) -> None:
        last = self.tool_events[-1] if self.tool_events else None
        if isinstance(last, ToolArguments):
            text = last.text + event.text
            self.tool_events[-1] = ToolArguments(index=event.index, text=text)
        else:
            self.tool_events.append(event)
