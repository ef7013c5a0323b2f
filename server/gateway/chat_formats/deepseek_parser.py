"""Reads DeepSeek's markup up to V3.1: a think part, text, then a block of tool calls.

Two forms of a call are written by these models; each parser reads both:

- V3 and R1: `function<｜tool▁sep｜>NAME`, a newline, and the arguments in a JSON code fence
- V3.1: `NAME<｜tool▁sep｜>{...}`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from whalepod.server.gateway.chat_formats.arguments import ArgumentReader
from whalepod.server.gateway.chat_formats.interface import ParserOptions, Start
from whalepod.server.gateway.chat_formats.scanning import Delimiters, Scanner, TrailingNewlines
from whalepod.server.gateway.content_blocks import BlockWriter

THINK, THINK_END = "<think>", "</think>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
TOOL_MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
MARKERS = (THINK, THINK_END, *TOOL_MARKERS)

V3_CALL_TYPE = "function"
"""What V3 and R1 write before the separator."""
MAX_NAME_CHARS = 256
"""A longer name is no call."""

CALLS_SPELLINGS: Final = (
    *(CALLS, "<｜tool_calls_begin｜>", "<｜tool calls begin｜>"),
    *("<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>"),
)
"""How models open a block when they spell the marker out instead of writing its token."""

_TOOLS: Final = Delimiters(*CALLS_SPELLINGS, CALL)  # the block's own opening may be missing
_REASONING_END: Final = Delimiters(THINK_END)
_REASONING_END_OR_TOOLS: Final = Delimiters(THINK_END, *CALLS_SPELLINGS, CALL)
_NEXT_CALL: Final = Delimiters(CALL, CALLS_END)
_CALL_ENDS: Final = (CALL_END, CALLS_END, CALL)  # any of them, if the model forgets one
_HEAD_END: Final = Delimiters(SEPARATOR, *_CALL_ENDS)
_NAME_END: Final = Delimiters("\n", "`", "{", *_CALL_ENDS)
_BODY_END: Final = Delimiters(*_CALL_ENDS)


def start_of(prompt_tail: str) -> Start:
    """Return where an answer begins, from the end of the prompt."""
    tail = prompt_tail.rstrip("\n")
    if tail.endswith(THINK):
        return "reasoning"
    return "content" if tail.endswith(THINK_END) else "open"


class DeepseekParser:
    """The state machine; `_step` is its state: it consumes text and says whether to go on."""

    def __init__(self, options: ParserOptions, *, reasons: bool, trims_reasoning: bool) -> None:
        """`trims_reasoning`: newlines around `</think>` are markup, not text (R1)."""
        self.blocks = BlockWriter()
        self._options = options
        self._tools = options.tools
        self._scanner = Scanner()
        self._newlines = TrailingNewlines()
        self._trims_reasoning = trims_reasoning
        self._skips_newlines = False
        self._head = ""
        self._arguments = ArgumentReader(None)
        self._step: Callable[[], bool] = self._content
        if reasons and options.start != "content":
            self._step = self._opening

    @property
    def in_reasoning(self) -> bool:
        starts = self._step == self._opening and self._options.start == "reasoning"
        return starts or self._step == self._reasoning

    def feed(self, text: str) -> None:
        self._scanner.push(text)
        while self._step():
            pass

    def finish(self, *, complete: bool) -> None:
        if self._step == self._opening:
            self._leave_opening()
        rest = self._scanner.take_all()
        if self._step == self._reasoning:
            self._add_reasoning(rest)
            self.blocks.grow("reasoning", self._newlines.take())
        elif self._step == self._content:
            self._add_content(rest)
            self.blocks.grow("text", self._newlines.take())
        elif self._step == self._body:
            self.blocks.grow("call", self._arguments.feed(rest))
            self._finish_call(complete=complete)
        elif complete:
            self._finish_head(self._head + rest)
        self._step = self._done

    # -- reasoning and content -------------------------------------------------------------------

    def _opening(self) -> bool:
        """Skip the opening tag, which comes from the prompt, from the model, or from both."""
        text = self._scanner.text.lstrip()
        if text != THINK and THINK.startswith(text):
            return False
        self._leave_opening()
        return True

    def _leave_opening(self) -> None:
        text = self._scanner.text.lstrip()
        opens = text.startswith(THINK)
        if opens:
            self._scanner.text = text[len(THINK) :]
        reasons = opens or self._options.start == "reasoning"
        self._step = self._reasoning if reasons else self._content
        self._skips_newlines = reasons and self._trims_reasoning

    def _reasoning(self) -> bool:
        ends = _REASONING_END if self._tools is None else _REASONING_END_OR_TOOLS
        text, marker = self._scanner.take_until(ends)
        self._add_reasoning(text)
        if marker is None:
            return False
        self._newlines.take()
        self._step = self._content
        self._skips_newlines = self._trims_reasoning
        if marker != THINK_END:
            self._enter_tools(marker)
        return True

    def _content(self) -> bool:
        if self._tools is None:
            self._add_content(self._scanner.take_all())
            return False
        text, marker = self._scanner.take_until(_TOOLS)
        self._add_content(text)
        if marker is None:
            return False
        self._newlines.take()
        self._enter_tools(marker)
        return True

    def _done(self) -> bool:
        self._scanner.take_all()
        return False

    # -- tool calls ------------------------------------------------------------------------------

    def _enter_tools(self, marker: str | None) -> None:
        """Go on after a marker that is not part of a call."""
        self._head = ""
        if marker == CALLS_END or (self.blocks.num_calls and not self._options.parallel):
            self._step = self._done
        else:
            self._step = self._call_type if marker == CALL else self._between_calls

    def _between_calls(self) -> bool:
        _, marker = self._scanner.take_until(_NEXT_CALL)
        if marker is None:
            return False
        self._enter_tools(marker)
        return True

    def _call_type(self) -> bool:
        """Read what comes before the separator: V3.1's name, or V3's word for a function."""
        marker = self._read_head(_HEAD_END)
        if marker is None:
            return False
        if marker != SEPARATOR:
            self._finish_head(self._head)
            self._enter_tools(marker)
        elif self._head.strip() == V3_CALL_TYPE:
            self._step = self._form
        else:
            self._start_call(self._head)
        return True

    def _form(self) -> bool:
        """Tell V3's form from a V3.1 call of a function that is named `function`."""
        text = self._scanner.text.lstrip()
        if not text or any(end.startswith(text) and end != text for end in _CALL_ENDS):
            return False
        if text.startswith("{") or text.startswith(_CALL_ENDS):
            self._start_call(self._head)
        else:
            self._scanner.text, self._head = text, ""
            self._step = self._name
        return True

    def _name(self) -> bool:
        marker = self._read_head(_NAME_END)
        if marker is None:
            return False
        self._scanner.text = marker + self._scanner.text
        self._start_call(self._head)
        return True

    def _read_head(self, ends: Delimiters) -> str | None:
        text, marker = self._scanner.take_until(ends)
        self._head += text
        if len(self._head) > MAX_NAME_CHARS:
            self._enter_tools(None)
        return marker

    def _body(self) -> bool:
        text, marker = self._scanner.take_until(_BODY_END)
        self.blocks.grow("call", self._arguments.feed(text))
        if marker is None:
            return False
        self._finish_call(complete=True)
        self._enter_tools(marker)
        return True

    def _start_call(self, head: str) -> None:
        name = head.strip()
        if not name or len(name) > MAX_NAME_CHARS:
            self._enter_tools(None)
            return
        self._arguments = ArgumentReader((self._tools or {}).get(name))
        self.blocks.start_call(self._options.new_id(), name)
        self._step = self._body

    def _finish_call(self, *, complete: bool) -> None:
        self.blocks.grow("call", self._arguments.finish(complete=complete))
        if complete:
            self.blocks.end_call()

    def _finish_head(self, head: str) -> None:
        """A call that ended before its arguments began: one without any, if the name is known."""
        if head.strip() in (self._tools or {}):
            self._start_call(head)
            self._finish_call(complete=True)

    # -- text ------------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> None:
        text = self._skip_newlines(text)
        text = self._newlines.push(text) if self._trims_reasoning else text
        self.blocks.grow("reasoning", text)

    def _add_content(self, text: str) -> None:
        text = self._skip_newlines(text)
        self.blocks.grow("text", text if self._tools is None else self._newlines.push(text))

    def _skip_newlines(self, text: str) -> str:
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return text
