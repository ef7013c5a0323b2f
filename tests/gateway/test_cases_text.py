"""Characters in pieces and counts of cached tokens: reports of users by number of their item."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.gateway.chat_formats.transcripts import block, v31_call
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import (
    calls_of,
    chat,
    error_of,
    parse_events,
    reasoning_of,
    stream_chat,
    text_of,
    user,
)
from tests.scripts import scripted

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
CHARACTERS = st.sampled_from([*"aß上海한é🙂👩‍👧🇩🇪", "\u0301", "\ufffd", "\0"])


def ask(client: TestClient, steps: list[str], **fields: Any) -> tuple[str, str, list[Any]]:
    """Return reasoning, text and calls of an answer; stream and whole answer must agree."""
    fields = {
        "model": "tiny",
        "messages": [user("上🙂 hi")],
        "test_steps": steps,
        "max_tokens": 400,
        **fields,
    }
    bodies = [scripted({**fields, "stream": stream}) for stream in (False, True)]
    whole, stream = (client.post(CHAT, json=body) for body in bodies)
    assert whole.status_code == stream.status_code == 200, whole.text
    message = whole.json()["choices"][0]["message"]
    events = parse_events(stream.content)
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    ]
    answer = message.get("reasoning", ""), message["content"] or "", calls
    assert (reasoning_of(events), text_of(events), calls_of(events)) == answer
    return answer


def in_bytes(data: bytes) -> str:
    """Write bytes as a step of the test hook: every byte becomes a token of its own."""
    return "".join(chr(0xDC00 + byte) for byte in data)


@pytest.mark.parametrize("text", ["上海", "🙂", "e\u0301", "ïv", "𠡿z"])
def test_item_68_a_character_in_two_steps_is_one_character(
    real_client: TestClient, text: str
) -> None:
    data = text.encode()

    for position in range(len(data) + 1):
        steps = ["<", in_bytes(data[:position]), in_bytes(data[position:]), ">"]
        assert ask(real_client, steps) == ("", f"<{text}>", [])


@settings(max_examples=10)
@given(text=st.lists(CHARACTERS, max_size=6).map("".join), data=st.data())
def test_item_68_no_cut_of_bytes_changes_any_part_of_an_answer(
    real_client: TestClient, text: str, data: st.DataObject
) -> None:
    arguments = json.dumps({"city": text}, ensure_ascii=False)
    head, tail = block(v31_call("w", "\0")).split("\0")
    answer = text + "|"  # newlines before a call are no text
    parts = [text, "</think>", answer, head, arguments, tail]
    steps: list[str] = []
    for part in parts:
        if part in ("</think>", head, tail):
            steps.append(part)  # markers are tokens, not bytes
            continue
        written = part.encode()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=4)))
        bounds = itertools.pairwise([0, *cuts, len(written)])
        steps += [in_bytes(written[a:b]) for a, b in bounds]

    fields = {"thinking": True, "tools": [TOOL]}

    assert ask(real_client, steps, **fields) == (text, answer, [("w", arguments)])


def test_item_68_a_stop_string_may_come_in_bytes(real_client: TestClient) -> None:
    steps = ["a", *(in_bytes(bytes([byte])) for byte in "🙂上🙂".encode()), "b"]

    assert ask(real_client, steps, stop=["上"]) == ("", "a🙂", [])


@pytest.mark.parametrize("data", [b"\xff", b"\xf0\x9f", b"\xe4\xb8", b"\x80a"])
def test_item_68_bytes_that_are_no_character_are_marked_once(
    real_client: TestClient, data: bytes
) -> None:
    expected = "a" + data.decode(errors="replace") + "|"

    assert ask(real_client, ["a", in_bytes(data), "|"]) == ("", expected, [])


def test_half_characters_in_a_body_are_refused(client: TestClient, engine: FakeEngine) -> None:
    for fields, param in (
        ({"messages": [user("\ud800")]}, "messages[0].content"),
        ({"messages": [user("hi")], "stop": ["\udcf0"]}, "stop[0]"),
        ({"messages": [user("hi")], "stop": ["\udcf0"], "temperature": float("nan")}, None),
    ):
        error = error_of(
            client.post(CHAT, content=json.dumps({"model": "tiny", **fields}).encode()), 400
        )
        assert error["param"] == param
    assert engine.submitted == []


def test_item_65_cached_tokens_are_those_found_and_the_same_in_a_stream(
    real_client: TestClient,
) -> None:
    prompt = "once upon a time " * 20
    fields = {"max_tokens": 2, "cache_salt": "item 65"}

    def cached(usage: dict[str, Any]) -> tuple[int, int]:
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    cold = chat(real_client, prompt, **fields)["usage"]
    warm = chat(real_client, prompt, **fields)["usage"]
    streamed = stream_chat(real_client, prompt, **fields, stream_options={"include_usage": True})
    shorter = chat(real_client, prompt[: len(prompt) // 2], **fields)["usage"]
    salted = chat(real_client, prompt, **fields | {"cache_salt": "another"})["usage"]

    assert cached(cold)[0] == cached(salted)[0] == 0
    assert cached(warm) == cached(streamed[-2]["usage"])
    hits, num_tokens = cached(warm)
    assert 0 < hits < num_tokens, "the last token is always computed"
    assert num_tokens - hits <= 64
    assert cached(shorter)[0] < hits
