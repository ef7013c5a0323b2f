"""What the Responses API accepts, and the chat that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from whalepod.server.gateway.api_errors import (
    FieldNames,
    field_names,
    invalid,
)
from whalepod.server.gateway.body import validate
from whalepod.server.gateway.history import newest_turn
from whalepod.server.gateway.limits import (
    MAX_METADATA_KEY_CHARS,
    MAX_NUM_MESSAGES,
    MAX_NUM_METADATA,
    MAX_NUM_TOOLS,
)
from whalepod.server.gateway.responses_items import Conversation, Item, is_answer
from whalepod.server.gateway.schema import (
    ChatExtensions,
    ChatRequest,
    Schema,
    ShortText,
)

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _as_items(value: object) -> object:
    """Return a list of items: a bare text is one message of the user."""
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return value


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


CHAT_NAMES: Final[FieldNames] = field_names(
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_tokens|max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort|thinking", "reasoning.effort"),
    (r"messages(?:\[\d+\][\w.\[\]]*)?", "input"),
)
"""What the fields of the chat are called in the request."""

_SAME: Final = (
    *("model", "parallel_tool_calls", "temperature", "top_p", "stream", "user"),
    *("top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("priority", "cache_salt", "prompt_cache_key", "chat_template_kwargs"),
)

LOGPROBS: Final = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""


def chat_of_items(
    request: ResponsesRequest, items: Sequence[Item], earlier_items: Sequence[Item] = ()
) -> ChatRequest:
    """Return the chat of a request that goes on from `earlier_items`.

    `items` are those of its input, `resolved`. ApiError names the field that is wrong.
    """
    _refuse_unsupported(request)
    tools, choice = _chosen_tools(request)
    fields = {name: getattr(request, name) for name in _SAME}
    wants_logprobs = request.top_logprobs is not None or LOGPROBS in (request.include or ())
    return validate(
        ChatRequest,
        {
            **fields,
            "messages": _messages(request, items, earlier_items),
            "tools": tools,
            "tool_choice": choice,
            "max_tokens": request.max_output_tokens,
            "reasoning_effort": request.reasoning and request.reasoning.effort,
            "response_format": _response_format(request),
            "logprobs": wants_logprobs,
            "top_logprobs": request.top_logprobs,
        },
    )


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name in ("background", "conversation", "prompt"):
        if getattr(request, name):
            raise invalid(name, f"{name} is not supported")


# -- messages ------------------------------------------------------------------------------------


def _messages(
    request: ResponsesRequest, items: Sequence[Item], earlier_items: Sequence[Item]
) -> list[dict[str, Any]]:
    conversation = Conversation()
    if request.instructions is not None:
        conversation.messages.append({"role": "system", "content": request.instructions})
    for item in earlier_items:
        conversation.add(item, ("previous_response_id",), is_earlier=True)
    start = newest_turn([is_answer(item) for item in items])
    for i, item in enumerate(items):
        conversation.add(item, ("input", i), is_earlier=i < start)
    if not conversation.messages:
        raise invalid("input", "input has nothing to answer to")
    return conversation.messages


# -- tools and formats ---------------------------------------------------------------------------


def functions_of(request: ResponsesRequest) -> dict[int, ResponseFunction]:
    """Return the functions among the tools by their place; other types are ignored."""
    tools = request.tools or []
    if len(tools) > MAX_NUM_TOOLS:
        raise invalid("tools", f"at most {MAX_NUM_TOOLS} tools are allowed, got {len(tools)}")
    return {
        i: validate(ResponseFunction, tool, ("tools", i))
        for i, tool in enumerate(tools)
        if tool.get("type") == "function"
    }


def _chosen_tools(
    request: ResponsesRequest,
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Return the tools and the choice in chat's form; `allowed_tools` leaves the others out."""
    functions = functions_of(request)
    choice = request.tool_choice
    allowed: set[str] | None = None
    match choice:
        case {"type": "function", "name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools"} if isinstance(choice, dict):
            allowed = _allowed_names(choice, functions)
            choice = choice.get("mode", "auto")
            if choice not in ("auto", "required"):
                raise invalid("tool_choice.mode", "tool_choice.mode must be auto or required")
        case dict():
            form = '{"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
            raise invalid("tool_choice", f"tool_choice must be auto, none, required, {form}")
    if request.tools is None:
        return None, choice
    return [
        {"type": "function", "function": functions[i].model_dump(exclude_none=True)}
        if i in functions and (allowed is None or functions[i].name in allowed)
        else {"type": _type_of(tool, i)}
        for i, tool in enumerate(request.tools)
    ], choice


def _type_of(tool: Mapping[str, Any], i: int) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise invalid(f"tools[{i}].type", f"tools[{i}].type must be a string")
    return "not_allowed" if kind == "function" else kind


def _allowed_names(
    choice: Mapping[str, Any], functions: Mapping[int, ResponseFunction]
) -> set[str]:
    param = "tool_choice.tools"
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(param, f"{param} must be a list of tools")
    wanted = [tool.get("name") for tool in tools if tool.get("type") == "function"]
    known = {function.name for function in functions.values()}
    for name in wanted:
        if name not in known:
            raise invalid(param, f"{param} names {str(name)[:80]!r}, which is none of the tools")
    return known & {str(name) for name in wanted}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    asked = request.text and request.text.format
    if not asked:
        return None
    if asked.type != "json_schema":
        return {"type": asked.type}
    if asked.schema_ is None:
        raise invalid("text.format.schema", "text.format.schema is missing")
    named = {"name": asked.name, "schema": asked.schema_, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": named}
