"""Prompts: raw ones, and checked conversations that the chat template renders."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from transformers import PreTrainedTokenizerFast

from whalepod.server.chat_template import TemplateHabits
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

DescribeTools: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str]


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
        # agents also send tools of other types, of their own service
        tools = [tool for tool in fields.tools or () if tool.get("type") == "function"]
        if choice and choice.mode == "none":
            tools = []
        habits = self._tokenizer.habits
        shaped = [each for message in messages for each in _template_messages(message, habits)]
        if not habits.keeps_system_messages:
            shaped = _with_one_system_message(shaped)
        return self._tokenizer.encode_chat(
            shaped,
            tools=tools or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_arguments=_template_arguments(fields),
            max_tokens=self._info.max_model_len,
            describe_tools=self._describe_tools(habits) if tools else None,
        )

    def _describe_tools(self, habits: TemplateHabits) -> DescribeTools | None:
        """Return how tools get into the system prompt; None where the template renders them."""
        if habits.renders_tools:
            return None
        if self._format is None or self._format.describe_tools is None:
            raise invalid(
                "tools",
                "tools: this model's chat template leaves tools out, and no way to describe them "
                "is known: start the server with --chat-template FILE or --tool-call-parser",
            )
        return self._format.describe_tools

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
        letters = self._tokenizer.letters
        text, reasoning = letters(last.content or ""), prefix_reasoning(last)
        if self._format is not None and self._format.reasoning_end is not None:
            start = self._format.start(self._tokenizer.decode(token_ids[-_TAIL_TOKENS:]))
            if start == "reasoning":
                text = letters(reasoning) + (self._format.reasoning_end + text if text else "")
            elif reasoning:
                raise invalid("messages", "messages: a reasoning to continue needs thinking: true")
        return token_ids + self._tokenizer.encode_letters(text)

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


def template_call(call: Mapping[str, Any], habits: TemplateHabits) -> dict[str, Any]:
    """Return a checked call as a template wants it: arguments as JSON text, or as an object.

    Text stays as it is, so that the model's own words are found in the prefix cache. What is no
    object, and no template could write, becomes one: the conversation must be able to go on.
    """
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if habits.takes_argument_objects:
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if not isinstance(arguments, dict) and not habits.takes_any_arguments:
            arguments = {"arguments": arguments}
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    parts = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": parts}


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # a model wrote this


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that renders one system message only."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    if len(texts) < 2:
        return list(messages)
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


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


def _template_messages(message: Message, habits: TemplateHabits) -> list[dict[str, Any]]:
    """Return a message as a template knows it, or several that it renders without a loss."""
    if not message.tool_calls:  # an empty list is as good as none
        return [_plain_message(message)]
    calls = [template_call(call, habits) for call in message.tool_calls]
    first = _plain_message(message)
    groups = [calls] if habits.keeps_several_calls else [[call] for call in calls]
    rest = [{"role": message.role, **habits.empty_content, "tool_calls": group} for group in groups]
    if not message.content:
        del first["content"]
        return [first | rest[0], *rest[1:]]
    if not habits.keeps_text_beside_call:
        return [first, *rest]
    return [{**first, "tool_calls": groups[0]}, *rest[1:]]


def _plain_message(message: Message) -> dict[str, Any]:
    """Return a message without its calls; `developer` is a system message."""
    excluded = {"reasoning", "prefix", "tool_calls"}
    fields = message.model_dump(exclude_none=True, exclude=excluded)
    if message.reasoning_content is None and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.content is None:
        if message.role in ("system", "developer", "user"):
            raise invalid("messages", f"messages: a {message.role} message needs content")
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
