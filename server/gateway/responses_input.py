"""What the Responses API accepts, and the chat that it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from whalepod.server.gateway.api_errors import (
    ApiError,
    FieldNames,
    field_names,
    format_path,
    invalid,
)
from whalepod.server.gateway.body import validate
from whalepod.server.gateway.history import as_arguments, newest_turn, readable
from whalepod.server.gateway.limits import (
    MAX_METADATA_KEY_CHARS,
    MAX_NUM_MESSAGES,
    MAX_NUM_METADATA,
    MAX_NUM_TOOLS,
)
from whalepod.server.gateway.schema import (
    ChatExtensions,
    ChatRequest,
    Schema,
    ShortText,
    flatten_content,
)

Item: TypeAlias = dict[str, Any]
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


class _Conversation:
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


def _is_answer(item: object) -> bool:
    """Return whether an item is a model's."""
    kind = _kind_of(item)
    if kind == "message":
        return isinstance(item, dict) and item.get("role") == "assistant"
    return kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def _messages(
    request: ResponsesRequest, items: Sequence[Item], earlier_items: Sequence[Item]
) -> list[dict[str, Any]]:
    conversation = _Conversation()
    if request.instructions is not None:
        conversation.messages.append({"role": "system", "content": request.instructions})
    for item in earlier_items:
        conversation.add(item, ("previous_response_id",), is_earlier=True)
    start = newest_turn([_is_answer(item) for item in items])
    for i, item in enumerate(items):
        conversation.add(item, ("input", i), is_earlier=i < start)
    if not conversation.messages:
        raise invalid("input", "input has nothing to answer to")
    return conversation.messages


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
