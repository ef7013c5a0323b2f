"""Reasoning over HTTP. Ids like B035 are rows of the log of public reports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.chat_formats.transcripts import smallest_pieces
from tests.gateway.conftest import EOS
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat, post, reasoning_of, stream_chat, text_of, user
from whalepod.server.chat_template import ChatTemplate
from whalepod.server.gateway.chat_formats.deepseek import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31
from whalepod.server.gateway.chat_formats.registry import choose_chat_format


def both(client: TestClient, *steps: str, **fields: Any) -> tuple[str | None, str]:
    """Return reasoning and content after checking that stream and whole answer agree."""
    fields = {"thinking": True, **fields, "test_steps": list(steps)}
    message = chat(client, **fields)["choices"][0]["message"]
    events = stream_chat(client, **fields)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert reasoning_of(events) == message.get("reasoning", "")
    assert text_of(events) == message["content"]
    return message.get("reasoning"), message["content"]


def test_B035_without_a_closing_tag_all_is_reasoning_and_no_end_token_shows(
    client: TestClient,
) -> None:
    """As DeepSeek's own service has it; the report wanted content."""
    assert both(client, "Good morning!") == ("Good morning!", "")
    assert both(client, "Good morning!", EOS, skip_special_tokens=False) == ("Good morning!", "")


def test_B037_the_closing_tag_alone_splits(client: TestClient) -> None:
    assert both(client, "because", "</think>", "answer") == ("because", "answer")
    assert both(client, *smallest_pieces("because</think>answer")) == ("because", "answer")


def test_without_thinking_all_is_content(client: TestClient) -> None:
    assert both(client, "answer", thinking=False) == (None, "answer")


def test_item_34_both_names_are_emitted_and_accepted(
    client: TestClient, engine: FakeEngine
) -> None:
    message = chat(client, thinking=True, test_steps=["a</think>b"])["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "a"
    for name in ("reasoning", "reasoning_content"):
        earlier = {"role": "assistant", "content": "b", name: "a"}
        post(client, "/v1/chat/completions", messages=[user("hi"), earlier, user("go on")])

    assert engine.submitted[-1].prompt_token_ids == engine.submitted[-2].prompt_token_ids


def test_item_35_a_tool_loop_needs_no_reasoning(client: TestClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    messages = [
        user("hi"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]

    assert post(client, "/v1/chat/completions", messages=messages, thinking=True)["choices"]


@pytest.mark.parametrize("thinking", [True, False])
def test_item_32_where_an_answer_begins_follows_from_the_prompt(
    client: TestClient, thinking: bool
) -> None:
    """The prompt has no tag at its end: the model itself must open its reasoning."""
    fields = {"thinking": thinking, "add_generation_prompt": False}

    assert both(client, "42 degrees", **fields) == (None, "42 degrees")
    assert both(client, "<think>a</think>b", **fields) == ("a", "b")


@pytest.mark.parametrize(
    ("effort", "reasons"), [("none", False), ("minimal", True), ("low", True), ("high", True)]
)
def test_reasoning_effort_turns_thinking_on(client: TestClient, effort: str, reasons: bool) -> None:
    expected = ("a", "b") if reasons else (None, "a</think>b")

    assert both(client, "a</think>b", thinking=None, reasoning_effort=effort) == expected
    assert both(client, "a", thinking=False, reasoning_effort=effort) == (None, "a")


@pytest.mark.parametrize("max_tokens", [1, 3, 50])
def test_B039_reasoning_tokens_are_some_of_the_completion_tokens(
    client: TestClient, max_tokens: int
) -> None:
    fields = {"thinking": True, "max_tokens": max_tokens}
    usage = chat(client, **fields, test_steps=["a b c d e"])["usage"]

    ended_by_itself = max_tokens == 50
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == usage["completion_tokens"] - ended_by_itself
    options = {"include_usage": True}
    events = stream_chat(client, **fields, test_steps=["a b c d e"], stream_options=options)
    assert events[-2]["usage"] == usage


def test_B039_tokens_of_the_answer_are_no_reasoning(client: TestClient) -> None:
    usage = chat(client, thinking=True, test_steps=["ab</think>cd"])["usage"]
    stopped = chat(client, thinking=True, test_steps=["abSxy</think>c"], stop="S")["usage"]

    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
    assert usage["completion_tokens"] == 6
    assert stopped["completion_tokens_details"]["reasoning_tokens"] == 3
    assert stopped["completion_tokens"] == 3


def test_B071_raw_completions_are_not_parsed(client: TestClient) -> None:
    text = "a</think><｜tool▁calls▁begin｜>b"

    answer = post(client, "/v1/completions", prompt="<think>", test_steps=[text], max_tokens=50)

    assert answer["choices"][0]["text"] == text


TURNS = """{% for m in messages %}{{ '<｜' + m.role + '｜>' }}{% if m.tool_calls -%}
{% for c in m.tool_calls %}<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>{% endfor %}{% else -%}
TEXT{% endif %}{% endfor %}"""
V3_CALL = "function<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + c.function.arguments }}\n```"
V31_CALL = "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"


@pytest.mark.parametrize(
    ("call", "text", "family"),
    [
        (V3_CALL, "{{ m.content.split('</think>')[-1] }}", DEEPSEEK_R1),
        (V3_CALL, "{{ m.content }}", DEEPSEEK_V3),
        (V31_CALL, "{{ m.content }}", DEEPSEEK_V31),
        ("{{ c | tojson }}", "{{ m.content }}", None),
        ("<｜tool▁sep｜>{{ raise_exception('no calls') }}", "{{ m.content }}", None),
    ],
)
def test_the_family_follows_from_the_call_that_a_template_renders(
    call: str, text: str, family: Any
) -> None:
    template = ChatTemplate(TURNS.replace("CALL", call).replace("TEXT", text), {})

    assert choose_chat_format(template) is family
    assert choose_chat_format(None) is None


def test_names_choose_the_family_of_an_unknown_template() -> None:
    assert (
        choose_chat_format(ChatTemplate("x", {}), tool_call_parser="deepseek_v31") is DEEPSEEK_V31
    )
    assert (
        choose_chat_format(
            ChatTemplate("x", {}), reasoning_parser="deepseek_r1", tool_call_parser="deepseek_v3"
        )
        is DEEPSEEK_R1
    )
