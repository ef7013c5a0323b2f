"""What `/v1/responses` accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from whalepod.server.gateway.limits import (
    MAX_METADATA_KEY_CHARS,
    MAX_NUM_MESSAGES,
    MAX_NUM_METADATA,
)
from whalepod.server.gateway.schema import ChatExtensions, Schema, ShortText, flatten_content

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _as_items(value: object) -> object:
    """Return a list of items: a bare text is one message of the user."""
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return value


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


ITEM_SCHEMAS: dict[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


class ResponseFunction(Schema):
    """A tool of type function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(Schema):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Schema):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)], ShortText],
    Field(max_length=MAX_NUM_METADATA),
]


class ResponsesRequest(ChatExtensions):
    model: ShortText
    input: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_as_items, json_schema_input_type=str | list[dict[str, Any]]),
        Field(min_length=1, max_length=MAX_NUM_MESSAGES),
    ]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[ShortText] | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: ShortText | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    service_tier: ShortText | None = None
    top_k: int | None = None  # not OpenAI's, as those of ChatExtensions
