"""The items of the Responses API, and the messages that they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator

from whalepod.server.gateway.api_errors import ApiError, format_path, invalid
from whalepod.server.gateway.body import validate
from whalepod.server.gateway.history import as_arguments, readable
from whalepod.server.gateway.schema import Schema, ShortText, flatten_content

Item: TypeAlias = dict[str, Any]


def _flatten_output(value: object) -> object:
    """Join the parts of a message; what a model refused to say is text like any other."""
    if isinstance(value, list):
        value = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in value
        ]
    return flatten_content(value)


def _flattened(flatten: Callable[[object], object]) -> BeforeValidator:
    return BeforeValidator(flatten, json_schema_input_type=str | list[dict[str, Any]])


class MessageItem(Schema):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str, _flattened(_flatten_output)]


class FunctionCallItem(Schema):
    call_id: ShortText
    name: ShortText
    arguments: str


class FunctionCallOutputItem(Schema):
    call_id: ShortText
    output: Annotated[str, _flattened(flatten_content)]


class ReasoningPart(Schema):
    type: ShortText
    text: str


class ReasoningItem(Schema):
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning itself, else its summary."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(Schema):
    id: ShortText


class CustomToolCallItem(Schema):
    call_id: ShortText
    name: ShortText
    input: str


ITEM_SCHEMAS: dict[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}

_TRACES: Final = re.compile(r"\w+_(?:call|call_output|output|tools|request|response)|compaction\w*")
"""Items of tools that a service runs: declared they are ignored, and so are their traces."""


class Conversation:
    """Collects messages: what an assistant reasoned, said and called in a row becomes one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add(self, item: object, path: tuple[str | int, ...], *, is_earlier: bool) -> None:
        """Add an item; `path` is its place in the request.

        Of an earlier turn only what can be read is taken, and nothing is refused.
        """
        try:
            self._add(_forgiven(item) if is_earlier else item, path)
        except ApiError:
            if not is_earlier:
                raise

    def _add(self, item: object, path: tuple[str | int, ...]) -> None:
        match read_item(item, path):
            case MessageItem(role="assistant", content=content):
                self._assistant("content", "tool_calls")["content"] = content
            case MessageItem(role=role, content=content):
                self.messages.append({"role": role, "content": content})
            case ReasoningItem(text=text):
                if text:
                    turn = self._assistant("reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = text
            case FunctionCallItem() as call:
                self._call(call.call_id, call.name, call.arguments)
            case CustomToolCallItem() as call:
                self._call(call.call_id, call.name, as_arguments(call.input))
            case FunctionCallOutputItem(call_id=call_id, output=output):
                self._check_call_id(call_id, path)
                message = {"role": "tool", "tool_call_id": call_id, "content": output}
                self.messages.append(message)

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        entry = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(entry)

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """Return the assistant's message to go on with: one that has none of `taken` yet."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in taken):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _check_call_id(self, call_id: str, path: tuple[str | int, ...]) -> None:
        if call_id not in self._call_ids:
            param = format_path((*path, "call_id"))
            message = f"no earlier item is a function_call with the call_id {call_id[:80]!r}"
            raise invalid(param, f"{param}: {message}")


def read_item(item: object, path: tuple[str | int, ...]) -> object:
    """Return a checked item, None for one that is passed over; ApiError names what is wrong."""
    kind = _kind_of(item)
    if isinstance(kind, str) and kind not in ITEM_SCHEMAS and _TRACES.fullmatch(kind):
        return None
    schema = ITEM_SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        param = format_path((*path, "type"))
        known = ", ".join(ITEM_SCHEMAS)
        raise invalid(param, f"{param}: items of type {str(kind)[:40]!r} are not among {known}")
    return validate(schema, item, path)


def _kind_of(item: object) -> object:
    if not isinstance(item, dict):
        return "message"
    return item.get("type") or ("message" if "role" in item else "item_reference")


def _forgiven(item: object) -> object:
    """Return an item of an earlier turn without parts that are no text."""
    names = {"message": "content", "function_call_output": "output"}
    name = names.get(str(_kind_of(item)).replace("custom_tool", "function"))
    if not isinstance(item, dict) or name is None:
        return item
    return {**item, name: readable(item.get(name)) or ""}


def is_answer(item: object) -> bool:
    """Return whether an item is a model's."""
    kind = _kind_of(item)
    if kind == "message":
        return isinstance(item, dict) and item.get("role") == "assistant"
    return kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def resolved(items: Sequence[Item], find_item: Callable[[str], Item | None]) -> list[Item]:
    """Return the items with what their references name; ApiError for one that names nothing."""
    whole = []
    for i, item in enumerate(items):
        if _kind_of(item) == "item_reference":
            reference = validate(ItemReference, item, ("input", i))
            found = find_item(reference.id)
            if found is None:
                param = f"input[{i}].id"
                raise invalid(param, f"{param}: no stored item has the id {reference.id[:80]!r}")
            item = found
        whole.append(item)
    return whole
