"""What Anthropic's Messages API accepts, and the chat that it means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Field

from whalepod.server.gateway.api_errors import (
    ApiError,
    FieldNames,
    field_names,
    format_path,
    invalid,
)
from whalepod.server.gateway.body import validate
from whalepod.server.gateway.history import newest_turn, readable
from whalepod.server.gateway.limits import (
    MAX_NUM_MESSAGES,
    MAX_NUM_STOPS,
    MAX_NUM_TOOLS,
    MAX_STOP_CHARS,
    MIN_THINKING_BUDGET_TOKENS,
)
from whalepod.server.gateway.schema import (
    ChatExtensions,
    ChatRequest,
    Schema,
    ShortText,
    flatten_content,
)


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


CHAT_NAMES: Final[FieldNames] = field_names(
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("max_completion_tokens", "max_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
)
"""What the fields of the chat are called in the request."""

_SAME: Final = (
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("priority", "cache_salt", "chat_template_kwargs"),
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(request: MessagesRequest) -> ChatRequest:
    """Return the chat of a request; ApiError names the field that is wrong."""
    thinking, choice, config = request.thinking, request.tool_choice, request.output_config
    budget = thinking.budget_tokens if thinking else None
    if budget is not None and budget >= request.max_tokens:
        path = "thinking.budget_tokens"
        limit = f"max_tokens ({request.max_tokens})"
        raise invalid(path, f"{path} ({budget}) must be less than {limit}")
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    if choice and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if config and config.format:
        schema = {"name": "answer", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    fields["stop"] = request.stop_sequences
    fields["thinking_token_budget"] = budget
    return validate(ChatRequest, {**fields, **prompt_fields(request)})


def prompt_fields(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of the chat that decide about its prompt."""
    thinking = request.thinking
    effort = request.output_config and request.output_config.effort
    if thinking and thinking.type == "enabled" and thinking.budget_tokens is None:
        path = "thinking.budget_tokens"
        raise invalid(path, f"{path} is missing: thinking of type enabled needs it")
    return {
        "model": request.model,
        "messages": _messages(request),
        "tools": _tools(request.tools),
        "tool_choice": _choice(request.tool_choice),
        # an effort alone asks for no thinking, unlike in chats
        "thinking": thinking.type != "disabled" if thinking else False if effort else None,
        "reasoning_effort": effort,
    }


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools that the client fulfils; tools that Anthropic runs are ignored."""
    if tools is None:
        return None
    if len(tools) > MAX_NUM_TOOLS:
        raise invalid("tools", f"at most {MAX_NUM_TOOLS} tools are allowed, got {len(tools)}")
    return [_tool(tool, i) for i, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        return {"type": kind}  # not a string: the chat says so
    checked = validate(AnthropicTool, tool, ("tools", i))
    function = {"name": checked.name, "description": checked.description}
    function = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": {**function, "parameters": checked.input_schema}}


def _choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "tool_choice.name is missing")
    return {"type": "function", "function": {"name": choice.name}}


# -- messages ------------------------------------------------------------------------------------


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    if request.system:
        messages.append({"role": "system", "content": request.system})
    start = newest_turn([message.role == "assistant" for message in request.messages])
    for i, message in enumerate(request.messages):
        if i < start:
            blocks = _earlier_blocks(message, call_ids)
        else:
            blocks = [
                _read_block(block, message.role, ("messages", i, "content", k))
                for k, block in enumerate(message.content)
            ]
        if message.role == "assistant":
            call_ids.update(block.id for block in blocks if isinstance(block, ToolUseBlock))
            messages.append(_assistant_message(blocks))
        else:
            _check_results(blocks, call_ids, f"messages[{i}].content")
            messages += _other_messages(message, blocks)
    if request.messages[-1].role == "assistant":
        last = f"messages[{len(request.messages) - 1}]"
        raise invalid(last, f"{last}: an assistant message cannot be the last one (no prefill)")
    return messages


def _earlier_blocks(message: AnthropicMessage, call_ids: set[str]) -> list[BaseModel]:
    """Return the blocks of an earlier turn that can be read; nothing of it is refused."""
    blocks: list[BaseModel] = []
    for block in message.content:
        if block.get("type") == "tool_result":
            call_id = block.get("tool_use_id")
            if not isinstance(call_id, str) or call_id not in call_ids:
                continue
            block = {**block, "content": readable(block.get("content")) or ""}
        with suppress(ApiError):
            blocks.append(_read_block(block, message.role, ()))
    return blocks


def _read_block(block: dict[str, Any], role: str, path: tuple[str | int, ...]) -> BaseModel:
    kind = block.get("type")
    schemas = BLOCK_SCHEMAS[role]
    if not isinstance(kind, str) or kind not in schemas:
        where = format_path(path)
        known = ", ".join(schemas)
        message = f"{str(kind)[:40]} blocks are not supported here, only {known}"
        raise invalid(f"{where}.type", f"{where}.type: {message}")
    return validate(schemas[kind], block, path)


def _check_results(blocks: Sequence[BaseModel], call_ids: set[str], path: str) -> None:
    for k, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in call_ids:
            param = f"{path}[{k}].tool_use_id"
            message = f"no earlier message has a tool_use with the id {block.tool_use_id[:80]!r}"
            raise invalid(param, f"{param}: {message}")


def _assistant_message(blocks: Sequence[BaseModel]) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": _joined(blocks) or None,
        "reasoning_content": "\n".join(thoughts) if thoughts else None,
        "tool_calls": calls or None,
    }


def _other_messages(message: AnthropicMessage, blocks: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """Return a user's or system's message: results of tools and instructions stand alone."""
    messages: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            messages.append({"role": message.role, "content": _joined(group)})
        else:
            messages += map(_lone_message, group)
    return messages or [{"role": message.role, "content": ""}]


def _lone_message(block: BaseModel) -> dict[str, Any]:
    if isinstance(block, ToolResultBlock):
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
    assert isinstance(block, SystemBlock), type(block)
    return {"role": "system", "content": block.content}


def _joined(blocks: Iterable[BaseModel]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
