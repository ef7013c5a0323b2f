"""Earlier turns of a chat: whatever they hold, the conversation goes on.

They were accepted once, here or by another server. What this one cannot read of them is passed
over; the newest turn, what follows the last answer, is for the schema to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from whalepod.server.gateway.limits import MAX_SHORT_TEXT_CHARS

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def forgiving(messages: object) -> object:
    """Return a chat's messages with earlier turns as the schema wants them."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return messages  # the schema says what is wrong
    start = newest_turn([message.get("role") == "assistant" for message in messages])
    history = _History()
    for message in messages[:start]:
        history.add(message)
    return [*history.messages, *messages[start:]]


def newest_turn(is_answer: Sequence[bool]) -> int:
    """Return the place after the last answer; one at the very end is to be continued."""
    answers = [i for i, holds in enumerate(is_answer[:-1]) if holds]
    return answers[-1] + 1 if answers else 0


def readable(content: object) -> str | None:
    """Return the text of content, of which refusals are a part; None when it has none."""
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, list) else []
    found = [text for text in texts if text is not None]
    return "\n".join(found) if found else None


def _text_of(part: object) -> str | None:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


class _History:
    """Collects what can be read of earlier messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add(self, message: Mapping[str, Any]) -> None:
        role, text = message.get("role"), readable(message.get("content"))
        if role == "assistant":
            self.messages.append(self._answer(message, text))
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if isinstance(call_id, str) and call_id in self._call_ids:
                self.messages.append({"role": role, "tool_call_id": call_id, "content": text or ""})
        elif role in _ROLES:
            self.messages.append({"role": role, "content": text or ""} | _names(message, "name"))

    def _answer(self, message: Mapping[str, Any], text: str | None) -> dict[str, Any]:
        given = message.get("tool_calls")
        found = map(_call, given if isinstance(given, list) else ())
        calls = [call for call in found if call is not None]
        self._call_ids.update(call["id"] for call in calls)
        refusal = message.get("refusal")
        if text is None and isinstance(refusal, str):
            text = refusal
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        answer |= _names(message, "name", "reasoning_content", "reasoning")
        return answer | ({"tool_calls": calls} if calls else {})


def _names(message: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Return the texts among some fields of a message; one that only names somebody is short."""
    texts = {name: message[name] for name in names if isinstance(message.get(name), str)}
    if len(texts.get("name", "")) > MAX_SHORT_TEXT_CHARS:
        del texts["name"]
    return texts


def _call(call: object) -> dict[str, Any] | None:
    """Return an earlier call as one of a function; None when it names nothing."""
    if not isinstance(call, dict):
        return None
    call_id, function = call.get("id"), call.get("function")
    if isinstance(custom := call.get("custom"), dict):  # its input is a text of any form
        function = {"name": custom.get("name"), "arguments": as_arguments(custom.get("input"))}
    if not isinstance(call_id, str) or not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        return None
    if not isinstance(arguments, str | dict | None):
        arguments = orjson.dumps(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_arguments(text: object) -> str:
    """Return the free input of a call as arguments."""
    return orjson.dumps({"input": text}).decode()
