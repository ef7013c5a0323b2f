"""`prefix: true`, cache salts, and what usage says about the cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import (
    chat,
    complete,
    error_of,
    post,
    reasoning_of,
    stream,
    text_of,
    user,
)
from whalepod.server.gateway.preparation import CacheSalt
from whalepod.server.tokenizer import TextTokenizer

PATH = "/v1/chat/completions"


def assistant(content: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "prefix": True, **fields}


def prompt_of(client: TestClient, engine: FakeEngine, tokenizer: TextTokenizer, **body: Any) -> str:
    post(client, PATH, **body)
    return tokenizer.decode(engine.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "last", "tail"),
    [
        ({}, assistant("Hel"), "</think>Hel"),
        ({}, assistant(""), "</think>"),
        ({"thinking": True}, assistant("Hel"), "<think></think>Hel"),
        ({"thinking": True}, assistant(reasoning_content="So"), "<think>So"),
        ({"thinking": True}, assistant("Hel", reasoning="So"), "<think>So</think>Hel"),
    ],
)
def test_the_prompt_ends_with_the_message_to_continue(
    client: TestClient,
    engine: FakeEngine,
    tokenizer: TextTokenizer,
    fields: dict[str, Any],
    last: dict[str, Any],
    tail: str,
) -> None:
    messages = [user("hi"), last]

    prompt = prompt_of(client, engine, tokenizer, messages=messages, **fields)

    assert prompt.endswith(f"<｜User｜>hi<｜Assistant｜>{tail}")
    tokens = post(client, "/tokenize", messages=messages, **fields)["tokens"]
    assert tuple(tokens) == engine.submitted[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("last", "reasoning", "content"),
    [
        (assistant("Hel"), "", "lo<think> there"),
        (assistant(reasoning_content="So"), "lo", " there"),
        (assistant("x", reasoning_content="So"), "", "lo</think> there"),
    ],
)
def test_the_answer_goes_on_where_the_message_stopped(
    client: TestClient, last: dict[str, Any], reasoning: str, content: str
) -> None:
    thinks = bool(last.get("reasoning_content"))
    tag = "</think>" if thinks else "<think>"
    fields = {"thinking": thinks, "test_steps": ["lo", tag, " there"]}
    messages = [user("hi"), last]

    message = post(client, PATH, messages=messages, **fields)["choices"][0]["message"]
    events = stream(client, PATH, messages=messages, **fields)

    assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
    assert (reasoning_of(events), text_of(events)) == (reasoning, content)


@pytest.mark.parametrize(
    "messages",
    [
        [assistant("a")],
        [user("hi"), {**user("a"), "prefix": True}],
        [user("hi"), assistant("a", reasoning="without thinking")],
        [
            user("hi"),
            assistant(
                tool_calls=[
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ]
            ),
        ],
    ],
)
def test_what_cannot_be_continued_is_refused(
    client: TestClient, messages: list[dict[str, Any]]
) -> None:
    error = error_of(client.post(PATH, json={"model": "tiny", "messages": messages}), 400)

    assert error["param"].startswith("messages")


def test_prompts_are_shared_within_a_salt_and_the_salt_is_no_clients_text(
    client: TestClient, engine: FakeEngine
) -> None:
    for fields in (
        {},
        {"cache_salt": "a"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"prompt_cache_key": "a"},  # a hint for routers: it shares what it can
    ):
        chat(client, **fields)
    complete(client, cache_salt="a")

    none, first, again, other, hinted, completion = [s.cache_salt for s in engine.submitted]
    assert none == hinted == ""
    assert first == again == completion != other
    assert len(first) == len(other) == 32


def test_another_server_has_other_salts() -> None:
    assert CacheSalt()("a") != CacheSalt()("a")


def test_usage_counts_the_cache_by_both_names(client: TestClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 3

    usage = chat(client)["usage"]

    assert usage["prompt_cache_hit_tokens"] == 3
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
