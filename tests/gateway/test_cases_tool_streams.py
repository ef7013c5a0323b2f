"""Tool calls as they stream: reports of users by the number of their item."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.chat_formats.transcripts import (
    block,
    cut_between_tokens,
    smallest_pieces,
    v3_call,
    v31_call,
)
from tests.gateway.serving import TestClient
from tests.gateway.wire import calls_of, chat, finish_reasons, reasoning_of, stream_chat, text_of
from whalepod.server.gateway.chat_formats.deepseek_parser import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    CALLS_SPELLINGS,
    TOOL_MARKERS,
)

forms = pytest.mark.parametrize("call", [v3_call, v31_call], ids=["v3", "v31"])
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": CITY}}]


def said(client: TestClient, steps: list[str], **fields: Any) -> tuple[Any, ...]:
    """Return reasoning, text, calls and finish reason; stream and whole answer must agree."""
    fields = {"tools": TOOLS, **fields, "test_steps": steps}
    choice = chat(client, **fields)["choices"][0]
    events, message = stream_chat(client, **fields), choice["message"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    ]
    streamed = (reasoning_of(events), text_of(events), calls_of(events), finish_reasons(events))
    whole = (message.get("reasoning", ""), message["content"] or "", calls)
    assert streamed == (*whole, [choice["finish_reason"]])
    return (*whole, choice["finish_reason"])


@forms
def test_item_21_no_place_to_cut_makes_a_stream_differ(client: TestClient, call: Any) -> None:
    text = "y</think>Hi\n" + block(call("w", '{"city":"上🙂"}'))
    expected = ("y", "Hi", [("w", '{"city":"上🙂"}')], "tool_calls")

    assert said(client, smallest_pieces(text), thinking=True) == expected
    for position in range(len(text) + 1):
        fields = {
            "thinking": True,
            "tools": TOOLS,
            "test_steps": cut_between_tokens(text, [position]),
        }
        events = stream_chat(client, **fields)
        assert (reasoning_of(events), text_of(events), calls_of(events)) == expected[:3], position


@forms
@pytest.mark.parametrize("marker", TOOL_MARKERS)
def test_item_22_beginnings_of_markup_are_neither_lost_nor_leaked(
    client: TestClient, call: Any, marker: str
) -> None:
    for length in (1, 2, len("<｜tool▁c"), len(marker) - 1):
        begun = marker[:length]
        arguments = json.dumps({"city": f"2>&1 {begun}"}, ensure_ascii=False)

        answer = said(client, [f"a {begun}", "x\n", *smallest_pieces(block(call("w", arguments)))])

        assert answer == ("", f"a {begun}x", [("w", arguments)], "tool_calls")


@forms
@pytest.mark.parametrize("opening", CALLS_SPELLINGS[1:])
@pytest.mark.parametrize("thinking", [False, True])
def test_item_23_an_opening_that_is_spelled_out_is_understood(
    client: TestClient, call: Any, opening: str, thinking: bool
) -> None:
    text = "why\n" * thinking + opening + block(call("w", "{}")).removeprefix(CALLS)

    for steps in ([text], smallest_pieces(text)):
        reasoning, content, calls, reason = said(client, steps, thinking=thinking)
        assert (reasoning.strip(), content) == ("why" * thinking, "")
        assert (calls, reason) == ([("w", "{}")], "tool_calls")


@forms
@pytest.mark.parametrize("again", [False, True])
def test_item_25_calls_within_the_reasoning_are_calls_once(
    client: TestClient, call: Any, again: bool
) -> None:
    markup = block(call("w", '{"city":"A"}'))
    text = f"I look it up{markup}</think>" + markup * again

    for steps in ([text], smallest_pieces(text)):
        answer = said(client, steps, thinking=True)
        assert answer == ("I look it up", "", [("w", '{"city":"A"}')], "tool_calls")


@forms
@pytest.mark.parametrize("num_tokens", [2, 7, 100])
def test_item_26_a_step_may_end_one_call_and_begin_the_next(
    real_client: TestClient, call: Any, num_tokens: int
) -> None:
    """Each step has this many tokens, as with speculation; a marker is one token."""
    calls = [("w", json.dumps({"city": city})) for city in ("A", "2>&1")]
    text = "Hi" + block(*(call(*c) for c in calls))
    tokenize = {"prompt": text, "add_special_tokens": False, "return_token_strs": False}
    ids = real_client.post("/tokenize", json=tokenize).json()["tokens"]
    pieces = [
        real_client.post("/detokenize", json={"tokens": ids[i : i + num_tokens]}).json()["prompt"]
        for i in range(0, len(ids), num_tokens)
    ]
    assert "".join(pieces) == text

    assert said(real_client, pieces) == ("", "Hi", calls, "tool_calls")


def test_item_26_the_next_call_may_begin_without_the_end_of_the_last(client: TestClient) -> None:
    text = f"{CALLS}{CALL}w<｜tool▁sep｜>{{}}{CALL}w<｜tool▁sep｜>{{}}{CALL_END}{CALLS_END}"

    for steps in ([text], smallest_pieces(text)):
        assert said(client, steps)[2] == [("w", "{}")] * 2
