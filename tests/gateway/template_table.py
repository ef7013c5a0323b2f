"""Every message shape that a client can send, through every published template of this family.

`python -m tests.gateway.template_table` prints the table.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.published import FOLDER
from whalepod.scheduler.limits import RequestRejected
from whalepod.server.chat_template import read_chat_template
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.chat_formats.registry import choose_chat_format
from whalepod.server.gateway.prompts import Prompts
from whalepod.server.gateway.schema import ChatRequest
from whalepod.server.gateway.tools import read_choice, read_functions
from whalepod.server.tokenizer import TextTokenizer

TEMPLATES: Final = {
    "V3/R1": "",
    "R1 (llama.cpp)": "llama-cpp-deepseek-r1",
    "R1-Distill-Llama": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "R1-Distill-Qwen": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "V3.1": "deepseek-ai-DeepSeek-V3.1",
    "V3.2": "deepseek-ai-DeepSeek-V3.2",
    "V4": "deepseek-ai-DeepSeek-V4",
    "V4-Flash": "deepseek-ai-DeepSeek-V4-Flash-0731",
    "Kimi-K2": "moonshotai-Kimi-K2",
    "Kimi-K2-Instruct": "Kimi-K2-Instruct",
    "Kimi-K2-Thinking": "Kimi-K2-Thinking",
    "GLM-4.7-Flash": "GLM-4.7-Flash",
    "GigaChat3": "GigaChat3-10B-A1.8B",
    "GigaChat3.1": "GigaChat3.1-10B-A1.8B",
}


@dataclass(frozen=True)
class Shape:
    """Messages, and the words of them that must be in the prompt."""

    messages: tuple[Mapping[str, Any], ...]
    words: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    same_as: str = ""
    """Another shape that must give the same prompt."""


def _user(content: Any = "w-question", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def _said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def _call(arguments: Any = '{"w-key": "w-value"}', call_id: str = "functions.w-name:0") -> Any:
    function = {"name": "w-name", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(content: Any = "w-result", call_id: str = "functions.w-name:0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TOOL: Final = {
    "type": "function",
    "function": {
        "name": "w-name",
        "description": "w-description",
        "parameters": {"type": "object", "properties": {"w-key": {"type": "string"}}},
    },
}
_CALLED: Final = ("w-question", "w-name", "w-key", "w-value", "w-result")


def _history(answer: Mapping[str, Any], *after: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return (_user(), answer, *(after or (_result(),)))


def _after_text(**fields: Any) -> tuple[Mapping[str, Any], ...]:
    return _history(_said(content="w-text", **fields), _user("w-more"))


SHAPES: Final = {
    "call, null": Shape(_history(_said(content=None, tool_calls=[_call()])), _CALLED),
    "call, absent": Shape(_history(_said(tool_calls=[_call()])), _CALLED, same_as="call, null"),
    'call, ""': Shape(
        _history(_said(content="", tool_calls=[_call()])), _CALLED, same_as="call, null"
    ),
    "call, text": Shape(
        _history(_said(content="w-text", tool_calls=[_call()])),
        ("w-question", "w-text", *_CALLED[1:]),
    ),
    "call, parts": Shape(
        _history(_said(content=_parts("w-text", "w-tail"), tool_calls=[_call()])),
        ("w-question", "w-text", "w-tail", *_CALLED[1:]),
    ),
    "calls absent": Shape(_after_text(), ("w-question", "w-text", "w-more")),
    "calls null": Shape(
        _after_text(tool_calls=None), ("w-question", "w-text", "w-more"), same_as="calls absent"
    ),
    "calls []": Shape(
        _after_text(tool_calls=[]), ("w-question", "w-text", "w-more"), same_as="calls absent"
    ),
    "object": Shape(
        _history(_said(content=None, tool_calls=[_call({"w-key": "w-value"})])),
        _CALLED,
        same_as="call, null",
    ),
    "broken": Shape(
        _history(_said(content=None, tool_calls=[_call('{"w-key": "w-val')])),
        (
            "w-question",
            "w-name",
            "w-key",
            "w-val",
            "w-result",
        ),
    ),
    "a list": Shape(
        _history(_said(content=None, tool_calls=[_call('["w-key"]')])),
        ("w-question", "w-name", "w-key", "w-result"),
    ),
    "two calls": Shape(
        _history(
            _said(content=None, tool_calls=[_call(), _call('{"w-2": 2}', "functions.w-name:1")]),
            _result(),
            _result("w-result-2", "functions.w-name:1"),
        ),
        ("w-question", "w-value", "w-2", "w-result", "w-result-2"),
    ),
    "result, parts": Shape(
        _history(_said(tool_calls=[_call()]), _result(_parts("w-result", "w-tail"))),
        (*_CALLED, "w-tail"),
    ),
    "systems": Shape(
        (
            {"role": "system", "content": "w-first"},
            {"role": "developer", "content": "w-second"},
            _user(),
        ),
        ("w-first", "w-second", "w-question"),
    ),
    "parts": Shape((_user(_parts("w-question", "w-tail")),), ("w-question", "w-tail")),
    "names": Shape((_user(name="ann"),), ("w-question",)),
    "reasoning": Shape(
        _history(_said(content="w-text", reasoning_content="w-thought"), _user("w-more")),
        ("w-question", "w-text", "w-more"),
    ),
    "<think>": Shape(
        _history(_said(content="<think>w-thought</think>w-text"), _user("w-more")),
        ("w-question", "w-text", "w-more"),
    ),
    "tools": Shape((_user(),), ("w-name", "w-description", "w-key", "w-question"), (TOOL,)),
}


def template_of(template: str) -> str:
    """Return the text of a template."""
    if not TEMPLATES[template]:
        own = read_chat_template(FOLDER / "deepseek-v3")
        assert own is not None
        return own.text
    return (FOLDER / "templates" / f"{TEMPLATES[template]}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer_of(template: str) -> TextTokenizer:
    """Return a small tokenizer that knows any text, with a published template."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokenizer(Path(folder), chat_template=template_of(template))
        return TextTokenizer.from_folder(path)


def format_of(template: str) -> str:
    chat_format = choose_chat_format(tokenizer_of(template).template)
    return "none" if chat_format is None else chat_format.name


def prompt_of(template: str, shape: str) -> str:
    """Return the prompt; raises ApiError or RequestRejected for a 400."""
    tokenizer = tokenizer_of(template)
    chat_format = choose_chat_format(tokenizer.template)
    prompts = Prompts(tokenizer, chat_format, FakeEngine(tokenizer).info)
    body = {"messages": SHAPES[shape].messages, "tools": SHAPES[shape].tools or None}
    request = ChatRequest.model_validate_json(json.dumps({"model": "m", **body}))
    choice = read_choice(None, read_functions(request.tools))
    return tokenizer.decode(prompts.chat(request.messages, request, choice))


def outcome(template: str, shape: str) -> str:
    """Return "right", or what is not."""
    try:
        prompt = prompt_of(template, shape)
        expected = SHAPES[shape].same_as
        if expected and prompt != prompt_of(template, expected):
            return f"not as {expected}"
    except (ApiError, RequestRejected) as error:
        return "400: " + str(error).removeprefix("the chat template refuses these messages: ")[:60]
    for word in SHAPES[shape].words:
        if not re.search(rf"{word}(?![\w-])", prompt):
            return f"lost {word}"
    if "None" in prompt or "Undefined" in prompt or ('\\"w-key\\"' in prompt and shape != "broken"):
        return "written wrongly"
    return "right"


def print_table() -> None:
    print(f"| template | format | {' | '.join(SHAPES)} |")
    print("| --- " * (len(SHAPES) + 2) + "|")
    for template in TEMPLATES:
        cells = [outcome(template, shape) for shape in SHAPES]
        print(f"| {template} | {format_of(template)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    print_table()
