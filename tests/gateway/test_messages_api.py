"""Anthropic's `/v1/messages` over HTTP. Names like item_66 are rows of users' reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.gateway.chat_formats.transcripts import block, cut_between_tokens, v31_call
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import named_events
from tests.scripts import scripted
from whalepod.scheduler.limits import RequestRejected
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CALL = block(v31_call("w", '{"city":"上海"}'))
THINKING = {"type": "enabled", "budget_tokens": 1024}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(name: str = "w", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": "d", "input_schema": SCHEMA, **fields}


def body_of(**fields: Any) -> dict[str, Any]:
    return scripted({"model": "tiny", "max_tokens": 2000, "messages": [user("hi")], **fields})


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=body_of(**fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json=body_of(stream=True, **fields))
    assert response.status_code == 200, response.text
    return named_events(response.content)


def error_of(response: Any, status: int) -> dict[str, Any]:
    """Return the error of an answer after checking its status and Anthropic's shape."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"]
    assert set(answer["error"]) == {"type", "message"}
    return dict(answer["error"])


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the message the way a client does; one block is open at a time."""
    assert events[0]["type"] == "message_start"
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        content = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
        elif event["type"] == "content_block_delta":
            kind, text = event["delta"]["type"], list(event["delta"].values())[1]
            assert text
            if kind == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                content[kind.removesuffix("_delta")] += text
    assert not is_open
    for index, text in inputs.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:  # cut off
            message["content"][index]["input"] = {"INVALID_JSON": text}
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """Drop the ids, which differ between two answers to the same question."""
    content = [{k: v for k, v in part.items() if k != "id"} for part in answer["content"]]
    return {**answer, "content": content, "id": ""}


def both(client: TestClient, *steps: str, **fields: Any) -> dict[str, Any]:
    """Return the whole answer after checking that its stream folds to it."""
    fields = {"tools": [tool()], "thinking": THINKING, **fields, "test_steps": list(steps)}
    answer = ask(client, **fields)
    assert bare(folded(stream(client, **fields))) == bare(answer)
    return answer


def test_item_66_the_events_of_an_answer_with_all_kinds_of_blocks(client: TestClient) -> None:
    steps = ["why", "</think>Hel", "lo", CALL]
    events = stream(client, tools=[tool()], thinking=THINKING, test_steps=steps)

    start, stop = "content_block_start", "content_block_stop"
    assert [event.get("delta", event).get("type", "message_delta") for event in events] == [
        *["message_start", "ping"],
        *[start, "thinking_delta", "signature_delta", stop],
        *[start, "text_delta", "text_delta", stop],
        *[start, "input_json_delta", stop],
        *["message_delta", "message_stop"],
    ]
    assert [event["index"] for event in events if "index" in event] == [
        *[0, 0, 0, 0], *[1, 1, 1, 1], *[2, 2, 2],
    ]  # fmt: skip


def test_a_whole_answer_has_typed_blocks_and_no_markup(client: TestClient) -> None:
    answer = both(client, "why</think>Hello\n\n", CALL)

    thinking, text, call = answer["content"]
    assert thinking["thinking"] == "why"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Hello", "citations": None}
    assert call.pop("id").startswith("toolu_")
    caller = {"type": "direct"}
    assert call == {"type": "tool_use", "name": "w", "input": {"city": "上海"}, "caller": caller}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert (answer["role"], answer["type"], answer["model"]) == ("assistant", "message", "tiny")


def test_item_66_message_start_has_the_prompts_usage(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.num_cached_tokens = 3
    events = stream(client, thinking=THINKING, test_steps=["why</think>Hi"])

    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"] == 3
    assert first["input_tokens"] == last["input_tokens"] > 0
    assert (first["output_tokens"], first["cache_creation_input_tokens"]) == (0, 0)
    assert 0 < last["output_tokens_details"]["thinking_tokens"] < last["output_tokens"]
    num_prompt_tokens = len(engine.submitted[0].prompt_token_ids)
    assert first["input_tokens"] + first["cache_read_input_tokens"] == num_prompt_tokens


ANSWERS = {
    "reasoning and text": "wh</thi y</think>Hi 🙂",
    "all kinds": f"why</think>Hi\n\n{CALL}",
    "two calls": block(v31_call("w", "{}"), v31_call("w", '{"city":"B"}')),
    "no object": block(v31_call("w", "[1, 2]")),
    "no end of the reasoning": "only thoughts",
    "nothing": "",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_stream_folds_to_the_whole_answer_for_every_cut(client: TestClient, answer: str) -> None:
    whole = both(client, answer)
    for position in range(1, len(answer), 3):
        cut = both(client, *cut_between_tokens(answer, [position]))
        assert bare(cut)["content"] == bare(whole)["content"]


@pytest.fixture(scope="module")
def module_client(tokenizer: TextTokenizer) -> Iterator[TestClient]:
    config = GatewayConfig(served_model_name=("tiny",))
    with TestClient(create_app(config, FakeEngine(tokenizer), tokenizer)) as client:
        yield client


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_stream_folds_to_the_whole_answer_for_random_cuts(
    module_client: TestClient, data: st.DataObject
) -> None:
    text = f"why</think>Hi\n\n{CALL}"
    cuts = data.draw(st.lists(st.integers(1, len(text) - 1), max_size=8, unique=True))
    limit = data.draw(st.integers(1, 60))

    both(module_client, *cut_between_tokens(text, sorted(cuts)), max_tokens=limit, thinking=None)


def test_arguments_that_are_no_object_are_marked(client: TestClient) -> None:
    answer = both(client, block(v31_call("w", "[1]")), thinking=None)

    assert answer["content"][0]["input"] == {"INVALID_JSON": "[1]"}


def test_thinking_can_be_left_out(client: TestClient) -> None:
    answer = both(client, "why</think>Hi", thinking={**THINKING, "display": "omitted"})

    assert answer["content"][0]["thinking"] == ""
    assert answer["content"][0]["signature"]
    assert answer["content"][1]["text"] == "Hi"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
    ],
)
def test_why_an_answer_ended(
    client: TestClient, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = both(client, "Hello ", "world", thinking=None, **fields)

    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


# -- input ---------------------------------------------------------------------------------------


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize(
    "system", ["Be kind", [{"type": "text", "text": "Be kind", "cache_control": None}]]
)
def test_the_system_prompt_comes_first(client: TestClient, engine: FakeEngine, system: Any) -> None:
    content = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    ask(client, system=system, messages=[user(content)])

    expected = "<｜begin▁of▁sentence｜>Be kind<｜User｜>hi<｜Assistant｜></think>"
    assert prompt_of(engine) == expected


@pytest.mark.parametrize(
    ("thinking", "tail"),
    [
        (None, "</think>"),
        ({"type": "disabled"}, "</think>"),
        ({"type": "adaptive"}, "<think>"),
        (THINKING, "<think>"),
    ],
)
def test_thinking_reaches_the_template(
    client: TestClient, engine: FakeEngine, thinking: Any, tail: str
) -> None:
    ask(client, thinking=thinking, output_config={"effort": "high"})

    assert prompt_of(engine).endswith(tail)


USE = {"type": "tool_use", "id": "toolu_1", "name": "w", "input": {"city": "A"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}


def turns(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    assistant = {"role": "assistant", "content": [USE]}
    return [user("hi"), assistant, user(list(blocks))]


def test_b029_results_of_tools_go_back_to_the_model(client: TestClient, engine: FakeEngine) -> None:
    texts = [{"type": "text", "text": "42"}]
    for content in ("42", texts):
        messages = turns({**RESULT, "content": content}, {"type": "text", "text": "and?"})
        ask(client, messages=messages)
        assert "<｜tool▁outputs▁begin｜>42<｜User｜>and?" in prompt_of(engine)
    ask(client, messages=turns({"type": "tool_result", "tool_use_id": "toolu_1"}))
    assert "<｜tool▁outputs▁begin｜><｜Assistant｜>" in prompt_of(engine)


def test_the_blocks_of_an_answer_can_be_sent_back(client: TestClient, engine: FakeEngine) -> None:
    answer = ask(client, tools=[tool()], thinking=THINKING, test_steps=["why</think>Hi\n\n", CALL])
    redacted = {"type": "redacted_thinking", "data": "x"}
    assistant = {"role": "assistant", "content": [redacted, *answer["content"]]}
    result = {**RESULT, "tool_use_id": answer["content"][-1]["id"]}

    ask(client, messages=[user("hi"), assistant, user([result])])

    assert "<｜Assistant｜>Hi" in prompt_of(engine)
    assert prompt_of(engine).count("<｜Assistant｜>") == 2


def test_instructions_in_the_middle_are_system_messages(
    client: TestClient, engine: FakeEngine
) -> None:
    middle = {"type": "mid_conv_system", "content": [{"type": "text", "text": "Now be brief"}]}
    content = [{"type": "text", "text": "a"}, middle, {"type": "text", "text": "b"}]
    ask(client, messages=[{"role": "system", "content": "S"}, user(content)])

    assert "S<｜User｜>aNow be brief<｜User｜>b" in prompt_of(engine)


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "w"}, True),
    ],
)
def test_the_choice_of_a_tool(
    client: TestClient, engine: FakeEngine, choice: Any, is_forced: bool
) -> None:
    ask(client, tools=[tool(), tool("v")], tool_choice=choice)

    assert (engine.submitted[-1].params.constraint is not None) == is_forced


def test_parallel_calls_can_be_turned_off(client: TestClient) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = both(client, ANSWERS["two calls"], tool_choice=choice, thinking=None)

    assert len(answer["content"]) == 1


def test_tools_of_unknown_types_are_ignored(client: TestClient) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, tool(type="custom")]

    assert both(client, CALL, tools=tools, thinking=None)["content"][0]["name"] == "w"


def test_a_json_schema_becomes_the_engines_constraint(
    client: TestClient, engine: FakeEngine
) -> None:
    ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})

    constraint = engine.submitted[-1].params.constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"


def test_what_agents_send_beside_is_accepted(client: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {}}

    response = client.post(f"{PATH}?beta=true", json=body_of(**fields), headers=headers)

    assert response.status_code == 200


def test_tokens_are_counted_as_the_prompt_will_have_them(
    client: TestClient, engine: FakeEngine
) -> None:
    fields = {"system": "Be kind", "tools": [tool()], "thinking": THINKING}
    body = body_of(**fields)
    del body["max_tokens"]
    counted = client.post(COUNT, json=body)
    ask(client, **fields)

    assert counted.json() == {"input_tokens": len(engine.submitted[0].prompt_token_ids)}
    assert len(engine.submitted) == 1


# -- failures ------------------------------------------------------------------------------------


def test_either_header_may_carry_the_key(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    config = GatewayConfig(served_model_name=("tiny",), api_key=("one",))
    with TestClient(create_app(config, engine, tokenizer)) as client:
        for headers in ({"x-api-key": "one"}, {"authorization": "Bearer one"}):
            assert client.post(PATH, json=body_of(), headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "two"}, {"x-api-key": ""}, {"authorization": "one"}):
            for path in (PATH, COUNT):
                response = client.post(path, json=body_of(), headers=headers)
                assert error_of(response, 401)["type"] == "authentication_error"
        assert client.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200


def test_every_error_has_anthropics_shape(client: TestClient, engine: FakeEngine) -> None:
    def error(status: int, **fields: Any) -> str:
        return str(error_of(client.post(PATH, json=body_of(**fields)), status)["type"])

    assert error(404, model="gpt-9") == "not_found_error"
    assert error(400, messages=[user("x z " * 500)]) == "invalid_request_error"
    assert error(500, test_steps=["!raise"]) == "api_error"
    assert error_of(client.get(PATH), 405)["type"] == "invalid_request_error"
    assert error_of(client.post(f"{PATH}/batches"), 404)["type"] == "not_found_error"
    large = client.post(PATH, content=b" " * 10_000_000)
    assert error_of(large, 413)["type"] == "request_too_large"
    broken = client.post(COUNT, content=b"{")
    assert error_of(broken, 400)["type"] == "invalid_request_error"
    engine.rejection = RequestRejected("queue_full", "1024 requests wait")
    for streams in (False, True):
        response = client.post(PATH, json=body_of(stream=streams))
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) > 0
    engine.rejection, engine.failure = None, "it was killed"
    assert error(503) == "overloaded_error"


def test_a_failure_after_the_first_token_is_an_error_event(client: TestClient) -> None:
    events = stream(client, test_steps=["a", "!raise"])

    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "the step failed"}
    assert "message_stop" not in [event["type"] for event in events]


def test_b105_an_over_long_prompt_is_named_with_both_numbers(client: TestClient) -> None:
    response = client.post(PATH, json=body_of(messages=[user("x z " * 500)]))

    assert str(MAX_MODEL_LEN) in error_of(response, 400)["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
PROMPT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [user(None)]}, "messages[0].content"),
    ({"messages": [user(5)]}, "messages[0].content"),
    ({"messages": [user(["x"])]}, "messages[0].content[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [user([IMAGE])]}, "messages[0].content[0].type: image blocks are not supported"),
    ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0].type: document"),
    ({"messages": [user([{"type": 5}])]}, "messages[0].content[0].type"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
    ({"messages": [user([USE])]}, "messages[0].content[0].type: tool_use"),
    ({"messages": [user([RESULT])]}, "messages[0].content[0].tool_use_id"),
    ({"messages": turns({**RESULT, "tool_use_id": "x"})}, "messages[2].content[0].tool_use_id"),
    ({"messages": turns({**RESULT, "content": 5})}, "messages[2].content[0].content"),
    ({"messages": turns({**RESULT, "content": [IMAGE]})}, "messages[2].content[0].content: image"),
    ({"messages": turns()[:2]}, "messages[1]: an assistant message cannot be the last"),
    ({"messages": [user("explode")]}, "no explosions"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system: image"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
    ({"tools": [tool(type=5)]}, "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools[0].name"),
    ({"tools": [tool(), tool()]}, "tools[1].name"),
    ({"tools": [tool(str(i)) for i in range(1025)]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [tool()]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [tool()]}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]
ANSWER_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1024, "thinking": THINKING}, "thinking.budget_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "output_config.format",
    ),
    ({"seed": 2**70}, "seed"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "words"), PROMPT_FIELDS + ANSWER_FIELDS)
def test_a_bad_field_is_named(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], words: str
) -> None:
    for streams in (False, True):
        response = client.post(PATH, json=body_of(**{"stream": streams, **fields}))
        assert words in error_of(response, 400)["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(("fields", "words"), PROMPT_FIELDS)
def test_a_bad_field_is_not_counted(client: TestClient, fields: dict[str, Any], words: str) -> None:
    response = client.post(COUNT, json={"model": "tiny", "messages": [user("hi")], **fields})

    assert words in error_of(response, 400)["message"]
