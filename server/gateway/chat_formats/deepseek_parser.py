"""Reads the calls of DeepSeek's markup up to V3.1.

Two forms of a call are written by these models; each parser reads both:

- V3 and R1: `function<｜tool▁sep｜>NAME`, a newline, and the arguments in a JSON code fence
- V3.1: `NAME<｜tool▁sep｜>{...}`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from whalepod.server.gateway.chat_formats.arguments import ArgumentReader
from whalepod.server.gateway.chat_formats.interface import ParserOptions
from whalepod.server.gateway.chat_formats.scanning import Delimiters
from whalepod.server.gateway.chat_formats.text_parser import (
    THINK,
    THINK_END,
    TextParser,
    may_be_name,
)

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
TOOL_MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
MARKERS = (THINK, THINK_END, *TOOL_MARKERS)

V3_CALL_TYPE = "function"
"""What V3 and R1 write before the separator."""

CALLS_SPELLINGS: Final = (
    *(CALLS, "<｜tool_calls_begin｜>", "<｜tool calls begin｜>"),
    *("<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>"),
)
"""How models open a block when they spell the marker out; it counts if a call's marker follows."""


class DeepseekParser(TextParser):
    """Reads `CALLS CALL ... CALL_END ... CALLS_END`, and what models make of it."""

    def __init__(self, options: ParserOptions, *, reasons: bool, trims_reasoning: bool) -> None:
        spelled = options.spelled
        self._call, self._calls_end = spelled(CALL), spelled(CALLS_END)
        self._separator = spelled(SEPARATOR)
        # any of them, if the model forgets one
        self._call_ends = (spelled(CALL_END), self._calls_end, self._call)
        self._next_call = Delimiters(self._call, self._calls_end)
        self._head_end = Delimiters(self._separator, *self._call_ends)
        self._name_end = Delimiters("\n", "`", "{", *self._call_ends)
        self._body_end = Delimiters(*self._call_ends)
        self._head = ""
        self._arguments = ArgumentReader(None)
        # the block's own opening may be missing
        openers = dict.fromkeys((spelled(CALLS), *CALLS_SPELLINGS, self._call))
        super().__init__(options, tuple(openers), reasons=reasons, trims_reasoning=trims_reasoning)

    def _enter_calls(self, opener: str) -> Callable[[], bool]:
        self._head = ""
        return self._call_type if opener == self._call else self._between_calls

    def _finish_calls(self, *, complete: bool) -> None:
        rest = self._scanner.take_all()
        if self._step == self._body:
            self._grow_call(self._arguments.feed(rest))
            self._finish_call(complete=complete)
            return
        head = self._head + rest
        if complete and head.strip() in (self._tools or {}):
            self._begin(head)
            self._finish_call(complete=True)
        else:
            self._give_back_head(head, complete=complete)

    def _go_on(self, marker: str) -> None:
        self._head = ""
        if marker == self._calls_end:
            self._end_block()
        elif marker == self._call:
            self._held += marker
            self._step = self._call_type
        else:
            self._held += marker if self._held else ""  # the end of a call that had no name
            self._step = self._between_calls

    def _call_type(self) -> bool:
        """Read what comes before the separator: V3.1's name, or V3's word for a function."""
        marker = self._read_head(self._head_end)
        if marker is None:
            return self._step != self._call_type
        name = self._head.strip()
        if marker != self._separator:
            self._end_head(marker)
        elif name == V3_CALL_TYPE:
            self._step = self._form
        elif name:
            self._begin(self._head)
        else:
            self._give_back(self._head + marker)
        return True

    def _form(self) -> bool:
        """Tell V3's form from a V3.1 call of a function that is named `function`."""
        text = self._scanner.text.lstrip()
        if not text or any(end.startswith(text) and end != text for end in self._call_ends):
            return False
        if text.startswith("{") or text.startswith(self._call_ends):
            self._begin(self._head)
        else:
            self._held += self._head + self._separator
            self._scanner.text, self._head = text, ""
            self._step = self._name
        return True

    def _name(self) -> bool:
        marker = self._read_head(self._name_end)
        if marker is None:
            return self._step != self._name
        self._scanner.text = marker + self._scanner.text
        if self._head.strip():
            self._begin(self._head)
        else:
            self._give_back(self._head)
        return True

    def _read_head(self, ends: Delimiters) -> str | None:
        """Return the marker at the end of a name; None without one, and for what is no name."""
        text, marker = self._scanner.take_until(ends)
        self._head += text
        if may_be_name(self._head):
            return marker
        self._give_back(self._head + (marker or ""))
        return None

    def _end_head(self, marker: str) -> None:
        """End a call before its arguments: one without any, if the name is known."""
        if self._head.strip() in (self._tools or {}):
            self._begin(self._head)
            self._finish_call(complete=True)
            self._go_on(marker)
        elif self._head.strip():
            self._give_back(self._head + marker)
        else:
            self._held += self._head
            self._go_on(marker)

    def _body(self) -> bool:
        text, marker = self._scanner.take_until(self._body_end)
        self._grow_call(self._arguments.feed(text))
        if marker is None:
            return False
        if self._arguments.is_in_string:
            self._grow_call(self._arguments.feed(marker))
            return True
        self._finish_call(complete=True)
        self._go_on(marker)
        return True

    def _begin(self, head: str) -> None:
        name = head.strip()
        self._arguments = ArgumentReader((self._tools or {}).get(name))
        self._start_call(name)
        self._step = self._body

    def _finish_call(self, *, complete: bool) -> None:
        self._grow_call(self._arguments.finish(complete=complete))
        if complete:
            self._end_call()
