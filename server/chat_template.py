"""What a checkpoint says of chats: its template, rendered as transformers does, and its defaults.

Templates disagree on what a call without text looks like, on the form of its arguments, and on
tools. What one wants is found out once, by rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from whalepod.scheduler.params import SamplingParams
from whalepod.server.errors import StartupError

Message = dict[str, Any]

_QUESTION: Final[Message] = {"role": "user", "content": "probe-question"}
_CALLED: Final = "probe_tool"
_KEY: Final = "probe_key"
_MISWRITTEN: Final = (f'\\"{_KEY}', f"'{_KEY}'")
"""Arguments that were written as JSON twice, or not as JSON."""
_ARGUMENTS: Final = {_KEY: 7}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _CALLED,
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHabits:
    """What a template does, and what it wants of messages."""

    renders_tools: bool
    takes_argument_objects: bool
    """Whether it writes the arguments of calls as JSON by itself; else it takes their text."""
    takes_any_arguments: bool
    """Whether it can write arguments that are no JSON object."""
    empty_content: Mapping[str, str | None]
    """The content of a call without text: none, an empty one, or no such key."""
    keeps_text_beside_call: bool
    """Whether a message may have a text and a call; else each needs one of its own."""
    keeps_several_calls: bool
    """Whether a message may have several calls."""
    keeps_system_messages: bool
    """Whether of several system messages all reach the prompt."""
    call: str
    """A conversation that ends with a call; empty if the template can write none."""
    drops_thought: bool
    """Whether what stands before `</think>` in an earlier turn is left out."""
    is_told_to_think: bool
    """Whether the prompt says if the model is to think."""


class ChatTemplate:
    """The Jinja text of a template, and the special tokens that it names."""

    def __init__(self, text: str, special_tokens: Mapping[str, Any]) -> None:
        self.text: Final = text
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt; raises whatever the template does: it is code."""
        # imported late: what only recognises templates of others never needs it
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) if tools else None,
            chat_template=self.text,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **(arguments or {})},
        )
        return str(rendered[0][0])

    @cached_property
    def habits(self) -> TemplateHabits:
        """Find out by rendering; what fails to render is a habit as well."""
        plain = self._try([_QUESTION])
        turns = [_QUESTION, _said("probe-thought</think>probe-answer"), _QUESTION]
        systems = [{"role": "system", "content": f"probe-{i}"} for i in (1, 2)]
        both = self._try([*systems, _QUESTION])
        prompts = {
            self._try([_QUESTION], thinking=thinks, enable_thinking=thinks)
            for thinks in (True, False)
        }
        answered = self._try(turns)
        call, empty_content, as_objects = self._probe_call()
        arguments = _ARGUMENTS if as_objects else json.dumps(_ARGUMENTS)
        broken = _call(empty_content, "no object")
        with_text = self._try([_QUESTION, _call({"content": "probe-text"}, arguments)])
        two = _call(empty_content, arguments)
        two["tool_calls"] += _call(empty_content, arguments)["tool_calls"]
        return TemplateHabits(
            renders_tools=self._try([_QUESTION], tools=[_TOOL]) not in ("", plain),
            takes_argument_objects=as_objects,
            takes_any_arguments=bool(self._try([_QUESTION, broken])),
            empty_content=empty_content,
            keeps_text_beside_call=not call or ("probe-text" in with_text and _KEY in with_text),
            keeps_several_calls=not call or self._try([_QUESTION, two]).count(_KEY) > 1,
            keeps_system_messages="probe-1" in both and "probe-2" in both,
            call=call,
            drops_thought="probe-answer" in answered and "probe-thought" not in answered,
            is_told_to_think=len(prompts) > 1,
        )

    def _probe_call(self) -> tuple[str, Mapping[str, str | None], bool]:
        """Return a rendered call and what it took: the content, and arguments as an object."""
        contents: tuple[Mapping[str, str | None], ...] = ({"content": None}, {"content": ""}, {})
        for given in (json.dumps(_ARGUMENTS), _ARGUMENTS):
            for content in contents:
                text = self._try([_QUESTION, _call(content, given)], is_question=False)
                # a template that prints a None has not asked for one
                if _KEY in text and not any(bad in text for bad in (*_MISWRITTEN, "None")):
                    return text, content, isinstance(given, dict)
        return "", contents[0], False

    def _try(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        is_question: bool = True,
        **arguments: object,
    ) -> str:
        try:
            return self.render(
                messages, tools=tools, add_generation_prompt=is_question, arguments=arguments
            )
        except Exception:  # a template is code: it can fail in any way
            return ""


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _call(content: Mapping[str, str | None], arguments: object) -> Message:
    function = {"name": _CALLED, "arguments": arguments}
    call = {"id": "probe_call", "type": "function", "function": function}
    return {"role": "assistant", **content, "tool_calls": [call]}


def read_chat_template(folder: Path, override: Path | None = None) -> ChatTemplate | None:
    """Return a checkpoint's chat template, read without its tokenizer; None without one.

    A file `override` wins, then chat_template.jinja, then tokenizer_config.json, as transformers
    has it. Raises StartupError for a file that cannot be read.
    """
    file = folder / "tokenizer_config.json"
    own = folder / "chat_template.jinja"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        written = next((f for f in (override, own) if f and (f is override or f.exists())), None)
        text = None if written is None else written.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"the chat template cannot be read: {error}") from error
    try:
        text = text or template_of(config.get("chat_template"))
        tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    except (AttributeError, KeyError, TypeError) as error:
        raise StartupError(f"{file} is not what tokenizers write: {error!r}") from error
    return None if text is None else ChatTemplate(text, tokens)


def template_of(value: Any) -> str | None:
    """Return the template that chats get, of one or of several by name."""
    if isinstance(value, list):
        value = {each["name"]: each["template"] for each in value}
    if isinstance(value, dict):
        value = value.get("default")
    return None if value is None else str(value)


def token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value or "")


def read_default_params(folder: Path) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json; what it leaves out is OpenAI's.

    Raises StartupError for what no request could ask for either.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise StartupError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{file} must hold a JSON object, got {type(config).__name__}")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: config[name] for name in names if isinstance(config.get(name), int | float)}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise StartupError(f"{file}: {error}") from error
    return found
