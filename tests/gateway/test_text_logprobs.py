"""Log-probabilities are of the tokens that make the text, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.gateway.conftest import EOS
from tests.gateway.serving import TestClient
from tests.gateway.wire import choices_of, post, stream, user
from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.content_blocks import BlockGrew
from whalepod.server.gateway.text_tokens import TextTokens

CHAT = "/v1/chat/completions"
BLOCK = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "w", "<｜tool▁sep｜>", "{}"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
]
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
ANSWERS: dict[str, dict[str, Any]] = {
    "text": {"test_steps": ["be", " cause"]},
    "reasoning": {"thinking": True, "test_steps": ["why", "</think>", "be", "cause"]},
    "only reasoning": {"thinking": True, "test_steps": ["why", " not"]},
    "a call": {"tools": TOOLS, "test_steps": ["so", " it is", *BLOCK]},
    "all": {"tools": TOOLS, "thinking": True, "test_steps": ["a", "</think>", "b", *BLOCK]},
    "a step of many tokens": {"thinking": True, "test_steps": ["why</think>because of it"]},
    "half a character": {"test_steps": ["naïve 上海 🙂"]},
    "a stop string": {"stop": ["se b"], "test_steps": ["becau", "se", " b", "ut"]},
    "nearly a stop string": {"stop": ["zzz"], "test_steps": ["becauz", "zy", " z"]},
    "a marker spelled out": {"tools": TOOLS, "test_steps": ["a <", "｜", " b", " <", "think"]},
}


@pytest.mark.parametrize("fields", ANSWERS.values(), ids=ANSWERS.keys())
def test_N026_logprobs_match_the_content(client: TestClient, fields: dict[str, Any]) -> None:
    fields = {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2, **fields}
    choice = post(client, CHAT, **fields)["choices"][0]
    events = choices_of(stream(client, CHAT, **fields))

    entries = choice["logprobs"]["content"]
    assert said_by(entries) == (choice["message"]["content"] or "")
    streamed = [event for event in events if event["logprobs"] is not None]
    assert [e for event in streamed for e in event["logprobs"]["content"]] == entries
    assert all("content" in event["delta"] and event["delta"]["content"] for event in streamed)


def said_by(entries: list[dict[str, Any]]) -> str:
    """Return the text of entries; a stop string may have cut the last one."""
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def test_N026_end_tokens_are_no_part_of_the_content(client: TestClient) -> None:
    fields = {"messages": [user("hi")], "logprobs": True, "test_steps": ["done"]}
    choice = post(client, CHAT, **fields)["choices"][0]

    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert EOS not in tokens
    assert "".join(tokens) == "done"


def test_N026_responses_match_their_text(client: TestClient) -> None:
    fields = {
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "high"},
    }
    fields["test_steps"] = ["why", "</think>", "be", "cause"]
    answer = post(client, "/v1/responses", **fields)

    (part,) = answer["output"][-1]["content"]
    assert part["text"] == "because"
    assert said_by(part["logprobs"]) == "because"


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab<", max_size=3), min_size=1, max_size=8),
    held=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_N026_every_token_of_a_text_is_told_once_however_late_it_comes(
    pieces: list[str], held: list[int]
) -> None:
    tokens = TextTokens()
    given_text, sent, found = "", 0, []
    for i, piece in enumerate(pieces):
        tokens.push(piece, TokenLogprob(token_id=i, logprob=0.0, rank=1))
        given_text += piece
        until = len(given_text) if i == len(pieces) - 1 else max(sent, len(given_text) - held[i])
        if until > sent:
            event = BlockGrew(index=0, kind="text", text=given_text[sent:until])
            found += [token.token_id for token in tokens.take([event])]
            sent = until
    last = max((i for i, piece in enumerate(pieces) if piece), default=-1)

    assert found == list(range(last + 1))
