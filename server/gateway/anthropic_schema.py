"""What `/v1/messages` and `/v1/messages/count_tokens` accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from whalepod.server.gateway.limits import (
    MAX_NUM_MESSAGES,
    MAX_NUM_STOPS,
    MAX_STOP_CHARS,
    MIN_THINKING_BUDGET_TOKENS,
)
from whalepod.server.gateway.schema import ChatExtensions, Schema, ShortText, flatten_content


def _as_blocks(value: object) -> object:
    """Return content as a list of blocks: a bare text is one of them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content blocks")
    return value


def _flatten_texts(value: object) -> object:
    return "" if value is None else flatten_content(value)


Blocks = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[dict[str, Any]]),
]
Texts = Annotated[
    str, BeforeValidator(_flatten_texts, json_schema_input_type=str | list[dict[str, Any]] | None)
]


class TextBlock(Schema):
    text: str


class ThinkingBlock(Schema):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Schema):
    data: str


class ToolUseBlock(Schema):
    id: ShortText
    name: ShortText
    input: dict[str, Any]


class ToolResultBlock(Schema):
    tool_use_id: ShortText
    content: Texts = ""
    is_error: bool | None = None


class SystemBlock(Schema):
    content: Texts


BLOCK_SCHEMAS: dict[str, dict[str, type[BaseModel]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock, "mid_conv_system": SystemBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock},
}
"""Blocks by the role whose messages may hold them."""


class AnthropicMessage(Schema):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Schema):
    """A tool whose calls the client fulfils."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Schema):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_BUDGET_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Schema):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(Schema):
    user_id: ShortText | None = None


class CountTokensRequest(Schema):
    model: ShortText
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_NUM_MESSAGES)]
    system: Texts = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


def _check_stop_sequences(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        for text in value:
            if isinstance(text, str) and not 1 <= len(text) <= MAX_STOP_CHARS:
                allowed = f"1 to {MAX_STOP_CHARS} characters"
                raise ValueError(f"a stop sequence must have {allowed}, got {len(text)}")
    return value


class MessagesRequest(CountTokensRequest, ChatExtensions):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[
            list[str], Field(max_length=MAX_NUM_STOPS), BeforeValidator(_check_stop_sequences)
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: AnthropicMetadata | None = None
