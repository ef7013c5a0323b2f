"""Reads the arguments of one tool call while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_SPACE: Final = " \t\r\n"
_FENCE: Final = "```"
_WRAPPERS: Final = ("arguments", "input")
_BRACKET_OR_QUOTE: Final = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE: Final = re.compile(r'["\\]')


class JsonCut:
    """Finds where a JSON object ends, in pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_in_string = False
        self._depth = 0
        self._escaped = False

    def feed(self, text: str) -> str:
        """Return the part of `text` up to the end of the object."""
        position = 0
        while not self.is_complete:
            if self._escaped:
                position, self._escaped = position + 1, position >= len(text)
            pattern = _QUOTE_OR_ESCAPE if self.is_in_string else _BRACKET_OR_QUOTE
            match = pattern.search(text, position)
            if match is None:
                return text
            position = match.end()
            self._see(match.group())
        return text[:position]

    def _see(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self.is_in_string = not self.is_in_string
        else:
            self._depth += 1 if character in "{[" else -1
            self.is_complete = self._depth <= 0


class ArgumentReader:
    """Takes a call's body: an object, bare or inside a code fence. Returns its text as it grows.

    What is no object is returned as it is, at the end; nothing at all means no arguments, `{}`.
    An object inside a needless `arguments` or `input` key is unwrapped, unless the parameters have
    a property of that name; only what begins with such a key waits for its end.
    """

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._wrappers = _possible_wrappers(parameters)
        self._cut = JsonCut()
        self._held: list[str] = []
        self._head = ""
        self._mode = "fence"

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a JSON string."""
        return self._cut.is_in_string

    def feed(self, text: str) -> str:
        """Return the next piece of the arguments."""
        match self._mode:
            case "fence" | "language" | "value":
                return self._begin(text)
            case "object":
                return self._cut.feed(text)
            case "wrapper":
                return self._look_for_wrapper(self._cut.feed(text))
        self._held.append(text if self._mode == "raw" else self._cut.feed(text))
        return self._unwrapped() if self._mode == "wrapped" and self._cut.is_complete else ""

    def finish(self, *, complete: bool) -> str:
        """Return what was held back; `complete` says that the call was not cut off."""
        held, self._held = "".join(self._held), []
        match self._mode:
            case "fence" | "language" | "value":
                return "{}" if complete else ""
            case "wrapper":
                return self._head
            case "raw":
                return _without_fence(held, complete=complete)
        return held

    def _begin(self, text: str) -> str:
        """Skip white space, a code fence and its language, in this order."""
        rest = (self._head + text).lstrip(_SPACE)
        if self._mode == "fence" and rest.startswith(_FENCE):
            self._mode, rest = "language", rest[len(_FENCE) :].lstrip(_SPACE)
        if self._mode == "language" and rest.startswith("json"):
            self._mode, rest = "value", rest[len("json") :].lstrip(_SPACE)
        awaited = {"fence": _FENCE, "language": "json", "value": ""}[self._mode]
        self._head = rest
        if not rest or awaited.startswith(rest):
            return ""
        self._head = ""
        if rest[0] != "{":
            self._mode = "raw"
        else:
            self._mode = "wrapper" if self._wrappers else "object"
        return self.feed(rest)

    def _look_for_wrapper(self, text: str) -> str:
        self._head += text
        squeezed = re.sub(r"\s", "", self._head)
        openings = [f'{{"{name}":' for name in self._wrappers]
        is_wrapped = any(squeezed.startswith(opening) for opening in openings)
        may_be_wrapped = any(opening.startswith(squeezed) for opening in openings)
        if may_be_wrapped and not is_wrapped and not self._cut.is_complete:
            return ""
        head, self._head = self._head, ""
        if not is_wrapped:
            self._mode = "object"
            return head
        self._mode = "wrapped"
        self._held.append(head)
        return self._unwrapped() if self._cut.is_complete else ""

    def _unwrapped(self) -> str:
        """Return the inner object of the wrapper, or the whole when it is no wrapper after all."""
        text, self._held = "".join(self._held), []
        self._mode = "object"
        try:
            ((name, value),) = json.loads(text).items()
            inner = text[text.index(":") + 1 : text.rindex("}")].strip()
            inner = value if isinstance(value, str) else inner
            is_wrapper = name in self._wrappers and isinstance(json.loads(inner), dict)
        except (ValueError, RecursionError):
            return text
        return inner if is_wrapper else text


def _possible_wrappers(parameters: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the wrapper keys that cannot be meant; none if the schema does not settle it."""
    properties = (parameters or {}).get("properties")
    open_ended = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref")
    if not isinstance(properties, dict) or any((parameters or {}).get(key) for key in open_ended):
        return ()
    return tuple(name for name in _WRAPPERS if name not in properties)


def _without_fence(text: str, *, complete: bool) -> str:
    text = text.strip(_SPACE).removesuffix(_FENCE).rstrip(_SPACE)
    return "{}" if complete and text in ("", "null") else text
