"""Text is not structure: a marker counts where the model wrote its token, outside of a JSON string.

The client's engine says each step as the tokenizer encodes it; a marker that is cut in two between
steps is spelled out by other tokens.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.gateway.chat_formats.transcripts import block, smallest_pieces, v3_call, v31_call
from tests.gateway.conftest import EOS, write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.test_cases_tool_streams import said
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.chat_formats.deepseek_parser import (
    CALL,
    CALL_END,
    CALLS,
    MARKERS,
    TOOL_MARKERS,
)
from whalepod.server.gateway.chat_formats.interface import STRUCTURE
from whalepod.server.gateway.stops import StopMatcher
from whalepod.server.tokenizer import TextTokenizer

forms = pytest.mark.parametrize("call", [v3_call, v31_call], ids=["v3", "v31"])
markers = pytest.mark.parametrize("marker", MARKERS)

MINI = """{%- for m in messages -%}{%- if m.role == 'assistant' and m['tool_calls'] is defined \
and m['tool_calls'] is not none -%}<｜Assistant｜></think>{{ '' if m['content'] is none else \
m['content'] + '' }}{%- for t in m['tool_calls'] -%}<｜tool▁call▁begin｜>{{ t.function.name }}\
<｜tool▁sep｜>{{ t.function.arguments }}<｜tool▁call▁end｜>{%- endfor -%}<｜tool▁calls▁end｜>\
{%- else -%}{{ '<｜User｜>' + m['content'] }}{%- endif -%}{%- endfor -%}<｜Assistant｜></think>"""
"""Asks for none the way published templates do."""


def spelled(text: str) -> list[str]:
    """Return steps that say a text without the token of any marker."""
    return list(text)


@markers
@forms
def test_N031_a_marker_in_an_argument_is_letters(
    client: TestClient, call: Any, marker: str
) -> None:
    """Spelled out or as its token: a JSON string does not end there."""
    arguments = json.dumps({"city": f"what is {marker} for"}, ensure_ascii=False)
    before, after = block(call("w", arguments)).split(arguments)

    for middle in (spelled(arguments), [arguments]):
        answer = said(client, [before, *middle, after])
        assert answer == ("", "", [("w", arguments)], "tool_calls")


@markers
def test_N031_a_marker_that_is_spelled_out_is_letters_in_prose(
    client: TestClient, marker: str
) -> None:
    for text in (f"Say {marker} now", f"Say {marker}", f"{marker}\n"):
        assert said(client, spelled(text)) == ("", text, [], "stop")


@markers
def test_N031_a_marker_that_is_spelled_out_is_letters_in_reasoning(
    client: TestClient, marker: str
) -> None:
    steps = ["I see ", *spelled(f"{marker} here"), "</think>", "yes"]

    assert said(client, steps, thinking=True) == (f"I see {marker} here", "yes", [], "stop")


@pytest.mark.parametrize("marker", [CALL, CALLS])
@pytest.mark.parametrize("after", [" opens a call.", " x", "\n\nis how it begins", CALL_END + " b"])
def test_N034_prose_after_a_lone_marker_stays(client: TestClient, marker: str, after: str) -> None:
    text = f"The marker\n\n{marker}{after}"

    for steps in ([text], smallest_pieces(text)):
        assert said(client, steps) == ("", text, [], "stop")
        reasoning = said(client, [*steps, "</think>", "yes"], thinking=True)
        assert reasoning == (text, "yes", [], "stop")


@forms
@pytest.mark.parametrize("opening", ["", CALLS])
def test_N034_a_call_after_a_lone_marker_is_one(
    client: TestClient, call: Any, opening: str
) -> None:
    text = f"The marker {CALL} opens a call:\n{opening}" + call("w", "{}")

    answer = said(client, [text])

    assert answer == ("", f"The marker {CALL} opens a call:", [("w", "{}")], "tool_calls")


@forms
@pytest.mark.parametrize("end", [" b", "\n\nI called it.", " b " + CALL + " c"])
def test_N034_prose_after_the_calls_stays(client: TestClient, call: Any, end: str) -> None:
    for markup in (block(call("w", "{}")), CALL.join(["", call("w", "{}").removeprefix(CALL)])):
        text = f"a\n\n{markup}{end}"
        for steps in ([text], smallest_pieces(text)):
            assert said(client, steps) == ("", "a" + end, [("w", "{}")], "tool_calls")


@forms
def test_N034_space_after_the_calls_is_no_text(client: TestClient, call: Any) -> None:
    answer = said(client, ["a\n\n" + block(call("w", "{}")) + "\n \n"])

    assert answer == ("", "a", [("w", "{}")], "tool_calls")


def test_N034_a_name_that_a_limit_cuts_off_is_no_text(client: TestClient) -> None:
    answer = said(client, [f"a{CALL}w", "x"], max_tokens=3)

    assert answer == ("", "a", [], "length")


def client_with(folder: Path, template: str) -> TestClient:
    tokenizer = TextTokenizer.from_folder(write_tokenizer(folder, chat_template=template))
    return TestClient(create_app(GatewayConfig(), FakeEngine(tokenizer), tokenizer))


def prompt_of(client: TestClient, *messages: dict[str, Any]) -> str:
    """Return the prompt of a conversation, without its BOS."""
    body = {"return_token_strs": True, "messages": messages}
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return "".join(answer.json()["token_strs"][1:])


ASKED = {"role": "user", "content": "hi"}
CALLED = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"a": "b"}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "42"}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_N023_a_call_without_text_renders_alone(tmp_path: Path, content: dict[str, Any]) -> None:
    answer = {"role": "assistant", "tool_calls": [CALLED], **content}

    prompt = prompt_of(client_with(tmp_path, MINI), ASKED, answer, RESULT)

    assert prompt == (
        '<｜User｜>hi<｜Assistant｜></think><｜tool▁call▁begin｜>w<｜tool▁sep｜>{"a": "b"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜User｜>42<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_N030_an_empty_list_of_calls_is_as_good_as_none(
    tmp_path: Path, calls: dict[str, Any]
) -> None:
    answer = {"role": "assistant", "content": "the answer", **calls}

    prompt = prompt_of(client_with(tmp_path, MINI), ASKED, answer, {**ASKED, "content": "go"})

    assert "the answer" in prompt
    assert "tool▁calls▁end" not in prompt


@pytest.mark.parametrize("content", [None, "x"])
def test_I39_arguments_that_the_template_writes_as_json_are_objects(
    tmp_path: Path, content: str | None
) -> None:
    template = MINI.replace("t.function.arguments", "t.function.arguments | tojson")
    answer = {"role": "assistant", "content": content, "tool_calls": [CALLED]}

    assert '{"a": "b"}' in prompt_of(client_with(tmp_path, template), ASKED, answer, RESULT)


@pytest.mark.parametrize("where", ["question", "answer", "arguments", "description", "result"])
def test_I19_a_token_that_a_client_spells_out_is_letters(client: TestClient, where: str) -> None:
    def num_ends(**texts: str) -> int:
        text = {"answer": "x", "question": "y", "description": "z", "result": "r", "arguments": "a"}
        text |= texts
        call = {**CALLED, "function": {"name": "w", "arguments": json.dumps([text["arguments"]])}}
        messages = [
            {"role": "user", "content": text["question"]},
            {"role": "assistant", "content": text["answer"], "tool_calls": [call]},
            {**RESULT, "content": text["result"]},
        ]
        tool = {"type": "function", "function": {"name": "w", "description": text["description"]}}
        answer = client.post("/tokenize", json={"messages": messages, "tools": [tool]}).json()
        return int(answer["tokens"].count(end))

    end = client.post("/tokenize", json={"prompt": EOS}).json()["tokens"][-1]
    assert num_ends(**{where: EOS}) == num_ends()


def test_N024_a_nucleus_of_nothing_is_the_likeliest_token(real_client: TestClient) -> None:
    body = {"model": "tiny", "messages": [ASKED], "max_tokens": 8}

    def said_with(**fields: Any) -> str:
        answer = real_client.post("/v1/chat/completions", json=body | fields).json()
        return str(answer["choices"][0]["message"]["content"])

    greedy = said_with(temperature=0)
    assert {said_with(top_p=0, seed=seed) for seed in range(4)} == {greedy}


@given(text=st.text("ab<>", max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_a_stop_string_ends_at_tokens_of_markers_too(text: str, cuts: list[int]) -> None:
    """The sign before a marker is no character of the text, and is cut off with the marker."""
    marked = text.replace("<", f"{STRUCTURE}<")
    plain, signed = (StopMatcher(["b<", "<>", "a>a"]) for _ in "12")
    expected, expected_stop = plain.push(text)

    pieces, stop = list[str](), None
    bounds = [0, *sorted(min(cut, len(marked)) for cut in cuts), len(marked)]
    for start, end in itertools.pairwise(bounds):
        piece, stop = signed.push(marked[start:end])
        pieces.append(piece)
        if stop is not None:
            break

    assert stop == expected_stop
    assert "".join(pieces).replace(STRUCTURE, "") == expected


def test_every_tool_marker_is_a_token_here(tokenizer: TextTokenizer) -> None:
    """Else the tests above would not test what they say."""
    assert len(tokenizer.ids_of(TOOL_MARKERS)) == len(TOOL_MARKERS)
