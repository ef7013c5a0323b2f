"""What the routes accept. Unknown fields are ignored, known ones are checked strictly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whalepod.server.gateway.history import forgiving
from whalepod.server.gateway.limits import (
    MAX_NUM_CHOICES,
    MAX_NUM_LOGIT_BIASES,
    MAX_NUM_MESSAGES,
    MAX_NUM_STOP_TOKEN_IDS,
    MAX_NUM_STOPS,
    MAX_SHORT_TEXT_CHARS,
    MAX_STOP_CHARS,
)

ShortText = Annotated[str, Field(max_length=MAX_SHORT_TEXT_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _check_stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_NUM_STOPS:
        raise ValueError(f"at most {MAX_NUM_STOPS} stop strings are allowed, got {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            allowed = f"1 to {MAX_STOP_CHARS} characters"
            raise ValueError(f"a stop string must have {allowed}, got {len(stop)}")
    return stops


def _check_logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MAX_NUM_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_NUM_LOGIT_BIASES} entries are allowed, got {len(value)}")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise ValueError(f"keys must be token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def flatten_content(value: object) -> object:
    """Join the text parts of a message: templates take one string."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, null or a list of text parts")
    return "\n".join(_text_of_part(part) for part in value)


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict):
        raise ValueError("content parts must be objects with a type")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise ValueError(f"{str(kind)[:40]} parts are not supported, only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("a text part needs the string `text`")
    return text


def _instead(name: str, *harmless: object) -> BeforeValidator:
    """Refuse a field of other servers or other times that would change the answer."""

    def check(value: object) -> None:
        if value is not None and value not in harmless:
            raise ValueError(f"is not supported: use {name}")

    return BeforeValidator(check, json_schema_input_type=None)


class Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Schema):
    include_usage: bool | None = None


class SamplingFields(Schema):
    """The parameters that all generating routes share; ranges are SamplingParams' business."""

    model: ShortText | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_check_logit_bias)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[str],
            BeforeValidator(_check_stops, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_NUM_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None
    prompt_cache_key: ShortText | None = None  # a routers' hint, see cache_salt for secrecy
    user: ShortText | None = None
    structured_outputs: dict[str, Any] | None = None
    num_speculative_tokens: int | None = None
    best_of: Annotated[None, _instead("n", 1)] = None
    guided_json: Annotated[None, _instead("structured_outputs.json")] = None
    guided_regex: Annotated[None, _instead("structured_outputs.regex")] = None
    guided_choice: Annotated[None, _instead("structured_outputs.choice")] = None
    guided_grammar: Annotated[None, _instead("structured_outputs.grammar")] = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Message(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        BeforeValidator(flatten_content, json_schema_input_type=str | list[dict[str, Any]] | None),
    ] = None
    name: ShortText | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    prefix: bool | None = None
    """DeepSeek's: the answer continues this message, which must be the last one."""


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_NUM_MESSAGES),
    BeforeValidator(forgiving, json_schema_input_type=list[Message]),
]


class TemplateFields(Schema):
    """What reaches the chat template."""

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    add_generation_prompt: bool | None = None


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    model: ShortText
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, _instead("tools", [])] = None
    function_call: Annotated[None, _instead("tool_choice", "none", "auto")] = None
    response_format: ResponseFormat | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Another name of `thinking.budget_tokens`: after this many tokens the reasoning is closed."""


class ChatExtensions(Schema):
    """Fields of chats that the Responses and Messages APIs take beyond their own."""

    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortRequest(Schema):
    request_id: ShortText
