"""Published templates and a published tokenizer: what clients send reaches the model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.gateway.chat_formats.transcripts import block, v3_call
from tests.gateway.real_gateway import real_gateway
from tests.gateway.serving import TestClient
from tests.gateway.template_table import (
    SHAPES,
    TEMPLATES,
    format_of,
    outcome,
    prompt_of,
    template_of,
    tokenizer_of,
)
from tests.gateway.wire import post
from tests.published import FOLDER, HOW_TO_GET_IT
from whalepod.models.synthetic import synthesize
from whalepod.server.config import GatewayConfig
from whalepod.tools.start_report import parsers_of

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=HOW_TO_GET_IT)

CHAT = "/v1/chat/completions"
UNSAFE = ("Kimi-K2-Instruct", "Kimi-K2-Thinking")
"""They append to lists, which transformers refuses as well: no conversation with a call renders."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_N023_N030_I39_every_shape_reaches_every_template(template: str, shape: str) -> None:
    has_call = any("tool_calls" in message for message in SHAPES[shape].messages)
    if template in UNSAFE and has_call and not shape.startswith("calls"):
        assert outcome(template, shape).startswith("400: access to attribute 'append' of 'list'")
    else:
        assert outcome(template, shape) == "right"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((name, "deepseek_r1") for name in TEMPLATES if "R1" in name),
        ("V3.1", "deepseek_v31"),
        ("V3.2", "deepseek_v32"),
        *((name, "deepseek_v4") for name in ("V4", "V4-Flash")),
        *((name, "none") for name in TEMPLATES if name[:2] in ("Ki", "GL", "Gi")),
    ],
)
def test_the_format_is_that_of_the_calls_which_a_template_renders(
    template: str, expected: str
) -> None:
    assert format_of(template) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_plain_conversation_renders_as_in_transformers(template: str) -> None:
    text = template_of(template)
    tokenizer = tokenizer_of(template).transformers
    assert isinstance(tokenizer, PreTrainedTokenizerFast)

    expected = tokenizer.apply_chat_template(
        list(SHAPES["calls absent"].messages),
        tokenize=False,
        add_generation_prompt=True,
        chat_template=text,
    )

    prompt = prompt_of(template, "calls absent")
    assert prompt.removeprefix("<｜begin▁of▁sentence｜>") == str(expected).removeprefix(
        "<｜begin▁of▁sentence｜>"
    )


@pytest.fixture(scope="module")
def v3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with V3's tokenizer of 129,280 entries, and its template."""
    overrides = {"vocab_size": 129_280, "eos_token_id": 1, "bos_token_id": 0}
    folder = synthesize("v3-nano", tmp_path_factory.mktemp("published") / "v3", overrides=overrides)
    for file in (FOLDER / "deepseek-v3").iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def v3(v3_folder: Path) -> Iterator[TestClient]:
    with real_gateway(v3_folder) as gateway, gateway.client() as client:
        yield client


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_the_report_says_where_tools_go(v3_folder: Path) -> None:
    assert parsers_of(GatewayConfig(), v3_folder) == (
        "deepseek_r1; the chat template leaves tools out: they go into the system prompt"
    )


def test_v3s_own_tokenizer_and_template_serve_a_loop_of_tools(v3: TestClient) -> None:
    question = {"role": "user", "content": "How is the weather in 上海?"}
    arguments = '{"city": "上海 <｜tool▁call▁end｜>"}'
    steps = ["<think>\nLook", "\n</think>\n\nOne moment.\n\n"]
    steps += [block(v3_call("weather", arguments)), "\nDone"]
    answer = post(v3, CHAT, messages=[question], tools=[TOOL], test_steps=steps)["choices"][0]

    message = answer["message"]
    assert answer["finish_reason"] == "tool_calls"
    assert message["reasoning"] == "Look"
    assert message["content"] == "One moment.\nDone"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": arguments}

    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    again = post(v3, CHAT, messages=[question, message, result], tools=[TOOL], max_tokens=4)
    assert again["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required", "temperature": 1, "seed": 3}])
def test_a_random_model_with_v3s_tokenizer_answers(v3: TestClient, fields: dict[str, Any]) -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "tools": [strict]}

    answer = post(v3, CHAT, **body, **fields)["choices"][0]

    if fields:
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    else:
        assert answer["finish_reason"] in ("stop", "length", "tool_calls")
