"""Prompts: raw ones, and checked conversations that the chat template renders."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.chat_formats.interface import ChatFormat, Start
from whalepod.server.gateway.schema import Message, TemplateFields
from whalepod.server.gateway.tools import ToolChoice
from whalepod.server.messages import EngineInfo
from whalepod.server.tokenizer import TextTokenizer

_TAIL_TOKENS: Final = 8
"""Where an answer begins is read from this many tokens at the end of its prompt."""

_RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
) | {"messages"}


class Prompts:
    """Makes the prompts of one model; runs on a thread."""

    def __init__(
        self, tokenizer: TextTokenizer, chat_format: ChatFormat | None, info: EngineInfo
    ) -> None:
        self._tokenizer = tokenizer
        self._format = chat_format
        self._info = info

    def raw(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a raw prompt, checked against vocabulary and context."""
        if isinstance(prompt, str):
            self._tokenizer.check_length(prompt, self._info.max_model_len, "prompt")
            token_ids = self._tokenizer.encode(prompt)
        else:
            token_ids = prompt
            self.check_vocabulary(token_ids, "prompt")
        if not token_ids:
            raise invalid("prompt", "prompt has no tokens")
        return token_ids

    def chat(
        self,
        messages: Sequence[Message],
        fields: TemplateFields,
        choice: ToolChoice | None = None,
    ) -> list[int]:
        """Return the tokens of a rendered conversation."""
        check_history(messages)
        check_prefix(messages)
        *earlier, last = messages
        if last.prefix and earlier:
            return self._continued(earlier, last, fields, choice)
        as_objects = self._tokenizer.takes_argument_objects
        # agents also send tools of other types, of their own service
        tools = [tool for tool in fields.tools or () if tool.get("type") == "function"]
        if choice and choice.mode == "none":
            tools = []
        return self._tokenizer.encode_chat(
            [_template_message(message, as_objects=as_objects) for message in messages],
            tools=tools or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_arguments=_template_arguments(fields),
            max_tokens=self._info.max_model_len,
        )

    def _continued(
        self,
        earlier: Sequence[Message],
        last: Message,
        fields: TemplateFields,
        choice: ToolChoice | None,
    ) -> list[int]:
        """Return the tokens of a conversation and of the beginning of its answer."""
        with_answer = fields.model_copy(update={"add_generation_prompt": True})
        token_ids = self.chat(earlier, with_answer, choice)
        text, reasoning = last.content or "", prefix_reasoning(last)
        if self._format is not None and self._format.reasoning_end is not None:
            start = self._format.start(self._tokenizer.decode(token_ids[-_TAIL_TOKENS:]))
            if start == "reasoning":
                text = reasoning + (self._format.reasoning_end + text if text else "")
            elif reasoning:
                raise invalid("messages", "messages: a reasoning to continue needs thinking: true")
        return token_ids + self._tokenizer.encode(text, adds_bos=False)

    def start(self, prompt_token_ids: Sequence[int], last: Message) -> Start:
        """Return where the answer to a rendered prompt begins."""
        if self._format is None or (last.prefix and last.content):
            return "content"
        if last.prefix and prefix_reasoning(last):
            return "reasoning"
        return self._format.start(self._tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:]))

    def check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raise ApiError when a token id is not one of the model's."""
        limit = self._info.vocab_size
        for bound in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= bound < limit:
                raise invalid(param, f"{param}: token id {bound} is outside of 0..{limit - 1}")


def check_history(messages: Sequence[Message]) -> None:
    """Raise ApiError for a malformed call, and for a tool's result that no call asked for."""
    known_ids: set[str] = set()
    for i, message in enumerate(messages):
        path = f"messages[{i}].tool_calls"
        if message.tool_calls and message.role != "assistant":
            raise invalid(path, f"{path}: only assistant messages call, not {message.role} ones")
        for k, call in enumerate(message.tool_calls or ()):
            known_ids.add(_check_call(call, f"{path}[{k}]"))
        if message.role == "tool":
            path = f"messages[{i}].tool_call_id"
            if message.tool_call_id is None:
                raise invalid(path, f"{path} is missing: it names the call that was answered")
            if message.tool_call_id not in known_ids:
                got = repr(message.tool_call_id[:80])
                raise invalid(path, f"{path}: no earlier message has a tool call with the id {got}")


def _check_call(call: Mapping[str, Any], path: str) -> str:
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", f"{path}.function must be an object")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{path}.function.name", f"{path}.function.name must be a string")
    if not isinstance(function.get("arguments"), str | dict | None):
        where = f"{path}.function.arguments"
        raise invalid(where, f"{where} must be a string or an object")
    call_id = call.get("id")
    if not isinstance(call_id, str):
        raise invalid(f"{path}.id", f"{path}.id must be a string")
    return call_id


def template_call(call: Mapping[str, Any], *, as_objects: bool) -> dict[str, Any]:
    """Return a checked call as a template wants it: arguments as JSON text, or as an object.

    Text stays as it is, so that the model's own words are found in the prefix cache.
    """
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if as_objects and isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif not as_objects and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    parts = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": parts}


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # a model wrote this; its conversation must be able to go on


def check_prefix(messages: Sequence[Message]) -> None:
    """Raise ApiError unless `prefix` is on the last message only, and that an assistant's text."""
    for i, message in enumerate(messages):
        if not message.prefix:
            continue
        path = f"messages[{i}].prefix"
        if message.role != "assistant" or i != len(messages) - 1:
            raise invalid(path, f"{path}: only the last message, an assistant's, can be continued")
        if i == 0:
            raise invalid(path, f"{path}: there is no message before it to answer")
        if message.tool_calls:
            raise invalid(path, f"{path}: a message with tool_calls cannot be continued")


def prefix_reasoning(message: Message) -> str:
    """Return the reasoning of a message, under either name."""
    return message.reasoning_content or message.reasoning or ""


def _template_message(message: Message, *, as_objects: bool) -> dict[str, Any]:
    """Return a message as templates know it: `developer` is a system message."""
    fields = message.model_dump(exclude_none=True, exclude={"reasoning", "prefix"})
    if message.reasoning_content is None and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            template_call(call, as_objects=as_objects) for call in message.tool_calls
        ]
    fields["content"] = message.content
    if message.content is None:
        if message.role in ("system", "developer", "user"):
            raise invalid("messages", f"messages: a {message.role} message needs content")
        if not message.tool_calls:
            fields["content"] = ""
    if message.role == "developer":
        fields["role"] = "system"
    return fields


def _template_arguments(fields: TemplateFields) -> dict[str, Any]:
    arguments = dict(fields.chat_template_kwargs or {})
    for name in arguments:
        if name in _RESERVED_TEMPLATE_ARGUMENTS:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set {name}")
    thinking = fields.enable_thinking if fields.thinking is None else fields.thinking
    if isinstance(thinking, dict):
        thinking = thinking.get("type") == "enabled"
    if thinking is None:
        thinking = arguments.get("thinking", arguments.get("enable_thinking"))
    effort = fields.reasoning_effort
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
        thinking = effort != "none" if thinking is None else thinking
    if thinking is not None:
        arguments |= {"thinking": bool(thinking), "enable_thinking": bool(thinking)}
    return arguments
