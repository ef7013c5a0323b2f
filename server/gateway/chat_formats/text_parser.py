"""Reads what the formats of DeepSeek share: a think part, then text, with blocks of calls in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from whalepod.server.gateway.chat_formats.interface import STRUCTURE, ParserOptions, Start
from whalepod.server.gateway.chat_formats.scanning import Delimiters, Scanner, TrailingNewlines
from whalepod.server.gateway.content_blocks import BlockWriter, Kind
from whalepod.server.gateway.tools import is_function_name

THINK, THINK_END = "<think>", "</think>"


def start_of(prompt_tail: str) -> Start:
    """Return where an answer begins, from the end of the prompt."""
    tail = prompt_tail.rstrip("\n")
    if tail.endswith(THINK):
        return "reasoning"
    return "content" if tail.endswith(THINK_END) else "open"


class TextParser(ABC):
    """The state machine; `_step` is its state: it consumes text and says whether to go on.

    A subclass reads the calls. What follows an opening marker is held until a call's name is
    whole; if none comes, the marker was letters, and reading goes on where it was found.
    """

    _next_call: Delimiters  # another call, or the end of the block

    def __init__(
        self,
        options: ParserOptions,
        openers: Sequence[str],
        *,
        reasons: bool = True,
        trims_reasoning: bool = False,
    ) -> None:
        """Take the markers that may open a call, spelled as the answer spells them.

        `trims_reasoning`: newlines around `</think>` are markup, not text (R1).
        """
        self.blocks = BlockWriter()
        self._options = options
        self._tools = options.tools
        self._scanner = Scanner()
        self._newlines = TrailingNewlines()
        self._trims_reasoning = trims_reasoning
        self._skips_newlines = False
        self._think_end = options.spelled(THINK_END)
        self._openers = Delimiters(*openers)
        self._think_end_or_openers = Delimiters(self._think_end, *openers)
        self._thinks_until = (
            Delimiters(self._think_end) if options.tools is None else self._think_end_or_openers
        )
        self._held = ""
        """What is dropped if a call comes, and text if none does."""
        self._follows_call = False
        self._was_thinking = False
        self._is_muted = False
        self._calls_are_over = False
        self._step: Callable[[], bool] = self._text
        if reasons and options.start != "content":
            self._step = self._opening
        self._back = self._step

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
        if self._step not in (self._reasoning, self._text):
            self._finish_calls(complete=complete)
        rest = self._scanner.take_all()
        if self._step == self._reasoning:
            self._add_reasoning(rest)
            self._grow("reasoning", self._newlines.take())
        elif self._step == self._text:
            self._add_content(rest)
            self._grow("text", self._newlines.take())
        self._step = self._done

    # -- what calls need -------------------------------------------------------------------------

    @abstractmethod
    def _enter_calls(self, opener: str) -> Callable[[], bool]:
        """Return the state that reads what follows an opening marker."""

    @abstractmethod
    def _go_on(self, marker: str) -> None:
        """Go on after a marker that ends a call or follows one."""

    @abstractmethod
    def _finish_calls(self, *, complete: bool) -> None:
        """End an answer in the middle of calls: give back what is none."""

    def _between_calls(self) -> bool:
        text, marker = self._scanner.take_until(self._next_call)
        if text.strip():
            self._give_back(text + (marker or ""))
            return True
        self._held += text
        if marker is not None:
            self._go_on(marker)
        return marker is not None

    def _end_block(self) -> None:
        self._held, self._step = "", self._back
        self._calls_are_over = bool(self.blocks.num_calls)

    def _give_back_head(self, head: str, *, complete: bool) -> None:
        """End an answer before the name of a call was whole; `head` is what was read of it."""
        if head.strip() and complete:
            self._give_back(head)
        elif self._options.token_markers and STRUCTURE not in self._held:
            self._give_back("")  # spelled out, and no call followed

    def _give_back(self, unread: str) -> None:
        """Take what is held for text after all, and read on with `unread`."""
        self._scanner.text = unread + self._scanner.text
        held, self._held = self._held, ""
        self._step = self._back
        if self._step == self._reasoning:
            self._add_reasoning(held)
        else:
            self._add_content(held)

    def _start_call(self, name: str) -> None:
        """Begin a call whose name is whole.

        One too many is read and not delivered, and so is a second block: models that called
        within their reasoning tend to say it again.
        """
        self._held = ""
        self._was_thinking |= self._back == self._reasoning
        self._back = self._text
        self._follows_call = True
        is_second = bool(self.blocks.num_calls) and not self._options.parallel
        self._is_muted = is_second or self._calls_are_over
        if not self._is_muted:
            self.blocks.start_call(self._options.new_id(), name)

    def _grow_call(self, text: str) -> None:
        if not self._is_muted:
            self._grow("call", text)

    def _end_call(self) -> None:
        if not self._is_muted:
            self.blocks.end_call()

    # -- reasoning and text ----------------------------------------------------------------------

    def _opening(self) -> bool:
        """Skip the opening tag, which comes from the prompt, from the model, or from both."""
        text = self._scanner.text.lstrip()
        tag = self._options.spelled(THINK)
        if text != tag and tag.startswith(text):
            return False
        self._leave_opening()
        return True

    def _leave_opening(self) -> None:
        text, tag = self._scanner.text.lstrip(), self._options.spelled(THINK)
        opens = text.startswith(tag)
        if opens:
            self._scanner.text = text[len(tag) :]
        reasons = opens or self._options.start == "reasoning"
        self._step = self._reasoning if reasons else self._text
        self._skips_newlines = reasons and self._trims_reasoning

    def _reasoning(self) -> bool:
        text, marker = self._scanner.take_until(self._thinks_until)
        self._add_reasoning(text)
        if marker is None:
            return False
        if marker == self._think_end:
            self._newlines.take()
            self._step = self._text
            self._skips_newlines = self._trims_reasoning
        else:
            self._open(marker)
        return True

    def _text(self) -> bool:
        if self._tools is None:
            self._add_content(self._scanner.take_all())
            return False
        # a block of calls ended the reasoning: its tag may still come
        ends = self._think_end_or_openers if self._was_thinking else self._openers
        text, marker = self._scanner.take_until(ends)
        self._add_content(text)
        if marker is None:
            return False
        if marker == self._think_end:
            self._was_thinking = False
        else:
            self._open(marker)
        return True

    def _open(self, marker: str) -> None:
        self._back = self._step
        self._held += self._newlines.take() + marker
        self._step = self._enter_calls(marker)

    def _done(self) -> bool:
        self._scanner.take_all()
        return False

    def _add_reasoning(self, text: str) -> None:
        text = self._skip_newlines(text)
        self._grow("reasoning", self._newlines.push(text) if self._trims_reasoning else text)

    def _add_content(self, text: str) -> None:
        text = self._held + self._skip_newlines(text)
        self._held = ""
        if self._follows_call and not text.strip():
            self._held = text  # space after calls is text only if words follow
            return
        self._follows_call = False
        self._grow("text", text if self._tools is None else self._newlines.push(text))

    def _skip_newlines(self, text: str) -> str:
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return text

    def _grow(self, kind: Kind, text: str) -> None:
        self.blocks.grow(kind, text.replace(STRUCTURE, ""))


def may_be_name(text: str) -> bool:
    """Return whether `text` is a function's name, or the beginning of one."""
    return not text.strip() or is_function_name(text.strip())
