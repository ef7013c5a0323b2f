"""Conversations that were held elsewhere, or with other tools, go on here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import error_of, post, user

IMAGE = {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def function(name: Any = "w", arguments: Any = "{}", call_id: Any = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any = "42", call_id: Any = "c") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "sh", "input": "ls | wc"}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "an image": [user([{"type": "text", "text": "see"}, IMAGE]), assistant("ok")],
    "audio": [user([{"type": "input_audio", "input_audio": {}}]), assistant("ok")],
    "no content": [user(None), assistant()],
    "odd content": [user({"text": "x"}), assistant(5)],
    "a refusal": [user("a"), assistant(None, refusal="I will not")],
    "a refusal as a part": [user("a"), assistant([{"type": "refusal", "refusal": "no"}])],
    "a custom call": [user("a"), assistant(None, tool_calls=[CUSTOM]), result(), assistant("b")],
    "arguments that are a list": [user("a"), assistant(tool_calls=[function(arguments=[1])])],
    "a call without a name": [user("a"), assistant(tool_calls=[function(name=None)]), result()],
    "a call without an id": [user("a"), assistant(tool_calls=[function(call_id=None)]), result()],
    "no list of calls": [user("a"), assistant("b", tool_calls={"x": 1})],
    "calls that are none": [user("a"), assistant("b", tool_calls=[None, 5, {}])],
    "a result without its call": [user("a"), result(), assistant("b")],
    "a result that is an image": [
        *(user("a"), assistant(tool_calls=[function()]), result([IMAGE]), assistant("b")),
    ],
    "calls of a user": [user("a") | {"tool_calls": [function()]}, assistant("b")],
    "the old way to call": [
        user("a"),
        assistant(None, function_call={"name": "w", "arguments": "{}"}),
        {"role": "function", "name": "w", "content": "42"},
        assistant("b"),
    ],
    "a role of another service": [user("a"), {"role": "critic", "content": "x"}, assistant("b")],
    "an answer that was continued": [user("a"), assistant("b", prefix=True)],
    "odd names": [user("a") | {"name": 5}, assistant("b", name="x" * 600, reasoning=[1])],
    "audio of an answer": [user("a"), assistant(None, audio={"id": "x"})],
}


@pytest.mark.parametrize("turns", CHATS.values(), ids=CHATS.keys())
def test_N027_a_chat_goes_on_after_any_earlier_turn(
    client: TestClient, engine: FakeEngine, turns: list[dict[str, Any]]
) -> None:
    if turns[-1]["role"] != "assistant":
        turns = [*turns, assistant("and")]
    post(client, "/v1/chat/completions", messages=[*turns, user("go on")], max_tokens=1)
    fields = {"messages": [*turns, user("go on")]}

    assert client.post("/tokenize", json=fields).status_code == 200
    assert "go on" in prompt_of(engine)


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)


def test_N027_what_can_be_read_of_earlier_turns_is_kept(
    client: TestClient, engine: FakeEngine
) -> None:
    for name in ("an image", "a refusal", "a refusal as a part"):
        turns = [*CHATS[name], user("go on")]
        post(client, "/v1/chat/completions", messages=turns, max_tokens=1)
        assert any(text in prompt_of(engine) for text in ("see", "I will not", ">no<"))


@pytest.mark.parametrize(
    "last",
    [
        user([IMAGE]),
        user(None),
        result(),
        {"role": "critic", "content": "x"},
        user("a") | {"tool_calls": [function()]},
        user("a") | {"name": 5},
    ],
    ids=str,
)
def test_N027_the_newest_turn_is_judged_strictly(client: TestClient, last: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [user("a"), assistant("b"), last]}

    error_of(client.post("/v1/chat/completions", json=body), 400)


ITEMS: dict[str, list[dict[str, Any]]] = {
    "a search": [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}],
    "a custom call": [
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
    ],
    "a custom call alone": [
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}
    ],
    "a shell": [
        {"type": "local_shell_call", "id": "s", "call_id": "c", "action": {}, "status": "x"},
        {"type": "local_shell_call_output", "id": "c", "output": "{}"},
    ],
    "a search for tools": [
        {"type": "tool_search_call", "id": "t"},
        {"type": "tool_search_output", "id": "t", "tools": []},
    ],
    "MCP": [
        {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        {"type": "mcp_approval_request", "id": "m", "name": "x", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
        {"type": "mcp_call", "id": "m", "name": "x", "arguments": "{}"},
    ],
    "a compaction": [{"type": "compaction", "id": "c", "encrypted_content": "x"}],
    "a picture": [{"type": "image_generation_call", "id": "i", "result": "AAAA"}],
    "a type to come": [{"type": "dream", "id": "d"}, {"role": "assistant", "content": "b"}],
    "an image": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ],
    "a refusal": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    "an odd reasoning": [
        {"type": "reasoning", "summary": "x"},
        {"role": "assistant", "content": "b"},
    ],
    "a result without its call": [
        {"type": "function_call_output", "call_id": "c9", "output": "y"},
        {"role": "assistant", "content": "b"},
    ],
}


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS.keys())
def test_N027_responses_go_on_after_any_earlier_item(
    client: TestClient, engine: FakeEngine, items: list[dict[str, Any]]
) -> None:
    first = post(client, "/v1/responses", input=[user("a"), *items, user("go on")])
    post(client, "/v1/responses", input="more", previous_response_id=first["id"])
    assert "go on" in prompt_of(engine)
    assert client.get(f"/v1/responses/{first['id']}/input_items").status_code == 200


def test_N027_new_items_are_judged_strictly(client: TestClient) -> None:
    for item in (
        {"type": "dream"},
        {"type": "function_call_output", "call_id": "c9", "output": "y"},
        user([{"type": "input_image"}]),
    ):
        body = {"model": "tiny", "input": [user("a"), {"role": "assistant", "content": "b"}, item]}
        error_of(client.post("/v1/responses", json=body), 400)


BLOCKS: dict[str, list[dict[str, Any]]] = {
    "a search": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "found", "citations": [{}]},
    ],
    "MCP": [
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
    ],
    "a type to come": [{"type": "dream"}],
    "odd thinking": [{"type": "thinking"}, {"type": "text", "text": "b"}],
    "odd input": [{"type": "tool_use", "id": "t", "name": "w", "input": "{}"}],
    "nothing": [],
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
def test_N027_messages_go_on_after_any_earlier_block(
    client: TestClient, engine: FakeEngine, blocks: list[dict[str, Any]]
) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    messages = [
        user([image, {"type": "text", "text": "see"}, {"type": "document"}]),
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "w", "input": {}}],
        },
        user([{"type": "tool_result", "tool_use_id": "t", "content": [image]}]),
        user([{"type": "tool_result", "tool_use_id": "gone", "content": "x"}]),
        {"role": "assistant", "content": blocks},
        user("go on"),
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2}

    assert client.post("/v1/messages", json=body).status_code == 200
    assert client.post("/v1/messages/count_tokens", json=body).status_code == 200
    assert "see" in prompt_of(engine)
