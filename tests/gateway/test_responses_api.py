"""`/v1/responses` over HTTP. Names like item_67 are rows of the list of users' reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.gateway.chat_formats.transcripts import block, cut_between_tokens, v31_call
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import error_of, named_events
from tests.scripts import scripted
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

PATH = "/v1/responses"
CALL = block(v31_call("w", '{"city":"上海"}'))
THOUGHT = "wh</thi y</think>Hi"
UNLIKE = ("id", "item_id", "call_id", "created_at", "completed_at")
"""Fields that differ from one answer to the next."""


def tool(name: str = "w", **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": parameters, **fields}


def ask(client: TestClient, request: Any = "hi", **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=scripted({"model": "tiny", "input": request, **fields}))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(client: TestClient, request: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": request, "stream": True, **fields}
    response = client.post(PATH, json=scripted(body))
    assert response.status_code == 200, response.text
    events = named_events(response.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def bare(value: Any) -> Any:
    """Drop what differs between two answers to the same question."""
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if key not in UNLIKE}
    return value


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the response the way a client does: by deltas; everything said twice agrees."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    logprobs: list[Any] = []
    for event in events[2:-1]:
        index = event["output_index"]
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert index == len(items)
            assert all(item["status"] != "in_progress" for item in items.values())
            items[index], texts[index] = event["item"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            items[index] = event["item"]
            whole = event["item"].get("arguments")
            assert texts[index] == (event["item"]["content"][0]["text"] if whole is None else whole)
        else:
            assert event["item_id"] == items[index]["id"]
            assert items[index]["status"] == "in_progress"
            if kind.endswith(".delta"):
                assert event["delta"]
                texts[index] += event["delta"]
                logprobs += event.get("logprobs", [])
            elif kind.endswith("text.done"):
                assert event["text"] == texts[index]
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == texts[index]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == list(items.values())
    assert last["id"] == events[0]["response"]["id"]
    return last


def both(client: TestClient, *steps: str, **fields: Any) -> dict[str, Any]:
    """Return the whole answer after checking that its stream folds to it."""
    fields = {"tools": [tool()], "reasoning": {"effort": "low"}, **fields}
    answer = ask(client, test_steps=list(steps), **fields)
    assert bare(folded(stream(client, test_steps=list(steps), **fields))) == bare(answer)
    return answer


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_the_events_of_an_answer_with_all_kinds_of_items(client: TestClient) -> None:
    steps = ["why", "</think>Hel", "lo", CALL]
    events = stream(client, tools=[tool()], reasoning={"effort": "high"}, test_steps=steps)

    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    text, reasoning, call = "output_text", "reasoning_text", "function_call_arguments"
    assert types(events) == [
        *["created", "in_progress"],
        *[*part, f"{reasoning}.delta", f"{reasoning}.done", *done],
        *[*part, f"{text}.delta", f"{text}.delta", f"{text}.done", *done],
        *["output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"],
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == [
        *["why", "Hel", "lo", '{"city":"上海"}']
    ]


def test_item_67_a_whole_answer_has_typed_items_and_no_markup(client: TestClient) -> None:
    answer = both(client, "why</think>Hello\n\n", CALL)

    reasoning, message, call = answer["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "Hello")
    assert (call["type"], call["name"]) == ("function_call", "w")
    assert call["arguments"] == '{"city":"上海"}'
    assert call["call_id"].startswith("call_")
    assert "｜" not in str(answer["output"])
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert (answer["status"], answer["error"]) == ("completed", None)


def test_item_67_ids_of_a_stream_are_those_of_its_final_response(client: TestClient) -> None:
    events = stream(client, tools=[tool()], test_steps=["a", CALL])

    final = events[-1]["response"]
    assert [e["item"]["id"] for e in events if e["type"].endswith("item.added")] == [
        item["id"] for item in final["output"]
    ]
    (call_id,) = {e["item"]["call_id"] for e in events if "call_id" in e.get("item", {})}
    assert final["output"][1]["call_id"] == call_id


ANSWERS = [
    (f"{THOUGHT} 🙂", "reasoning and text"),
    (f"why</think>Hi\n\n{CALL}", "all kinds"),
    (block(v31_call("w", "{}"), v31_call("w", '{"city":"B"}')), "two calls"),
    ("only thoughts", "no end of the reasoning"),
    ("", "nothing"),
]


@pytest.mark.parametrize("answer", [text for text, _ in ANSWERS], ids=[name for _, name in ANSWERS])
def test_a_stream_folds_to_the_whole_answer_for_every_cut(client: TestClient, answer: str) -> None:
    whole = both(client, answer)
    for position in range(1, len(answer), 3):
        assert bare(both(client, *cut_between_tokens(answer, [position]))["output"]) == bare(
            whole["output"]
        )


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_stream_folds_to_the_whole_answer_for_random_cuts(
    real_tokenizer_client: TestClient, data: st.DataObject
) -> None:
    text = f"why</think>Hi\n\n{CALL}"
    cuts = data.draw(st.lists(st.integers(1, len(text) - 1), max_size=8, unique=True))
    limit = data.draw(st.integers(1, 60))

    both(real_tokenizer_client, *cut_between_tokens(text, sorted(cuts)), max_output_tokens=limit)


@pytest.fixture(scope="module")
def real_tokenizer_client(tokenizer: TextTokenizer) -> Iterator[TestClient]:
    config = GatewayConfig(served_model_name=("tiny",))
    with TestClient(create_app(config, FakeEngine(tokenizer), tokenizer)) as client:
        yield client


def test_a_cut_answer_is_incomplete(client: TestClient) -> None:
    answer = both(client, "why</think>Hello world", max_output_tokens=8)

    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    assert answer["output"][-1]["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 8


def test_usage_has_cached_and_reasoning_tokens(client: TestClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 3

    usage = both(client, "why</think>", "Hi")["usage"]

    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_the_request_is_echoed(client: TestClient) -> None:
    schema = {"type": "object"}
    fields: dict[str, Any] = {
        "instructions": "Be brief",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "none", "summary": "auto"},
        "store": False,
    }
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    answer = ask(client, text=text, tools=[tool(strict=True), {"type": "web_search"}], **fields)

    assert {name: answer[name] for name in fields} == fields
    assert answer["text"]["format"] == {**text["format"], "description": None}
    assert answer["tools"] == [{**tool(strict=True), "description": None}]
    assert (answer["object"], answer["model"]) == ("response", "tiny")


@pytest.mark.parametrize("include", [["message.output_text.logprobs"], None])
def test_logprobs_of_the_text(client: TestClient, include: list[str] | None) -> None:
    fields = {"include": include, "top_logprobs": 2}

    answer = both(client, "Hel", "lo", reasoning=None, **fields)
    events = stream(client, test_steps=["Hel", "lo"], **fields)

    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).startswith("Hello")
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    sent = [entry for event in events if "delta" in event for entry in event["logprobs"]]
    assert sent == logprobs[: len(sent)]


# -- input ---------------------------------------------------------------------------------------


def prompt_of(engine: FakeEngine) -> str:
    """Return the last prompt that the engine got."""
    return engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)


def test_a_text_is_a_message_of_the_user(client: TestClient, engine: FakeEngine) -> None:
    prompts = set()
    part = [{"type": "input_text", "text": "hi"}]
    for request in (
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": part, "id": "msg_1", "status": None}],
    ):
        ask(client, request)
        prompts.add(prompt_of(engine))

    assert prompts == {"<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"}


def test_b031_instructions_and_developer_messages_are_system_messages(
    client: TestClient, engine: FakeEngine
) -> None:
    items = [{"role": "developer", "content": "Be kind"}, {"role": "user", "content": "hi"}]
    ask(client, items, instructions="Be brief")

    assert "Be briefBe kind<｜User｜>hi" in prompt_of(engine)


CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def test_b029_calls_and_results_go_back_to_the_model(
    client: TestClient, engine: FakeEngine
) -> None:
    output = [{"type": "input_text", "text": "42"}]
    for result in (RESULT, {**RESULT, "output": output}):
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Wait"}]},
            CALL_ITEM,
            {**CALL_ITEM, "call_id": "c2"},
            result,
            {**RESULT, "call_id": "c2"},
        ]
        ask(client, items)
        assert prompt_of(engine).count("<｜Assistant｜>") == 2
        assert "<｜Assistant｜>Wait" in prompt_of(engine)
        assert prompt_of(engine).count("<｜tool▁outputs▁begin｜>42") == 2


def test_assistant_messages_in_a_row_are_all_kept(client: TestClient, engine: FakeEngine) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "so"}]}
    turns = [{"role": "assistant", "phase": "commentary", "content": text} for text in "AB"]
    ask(client, [turns[0], turns[1], thought, {"role": "user", "content": "hi"}])

    assert "<｜Assistant｜>A<｜end▁of▁sentence｜><｜Assistant｜>B<｜end" in prompt_of(engine)
    assert prompt_of(engine).count("<｜Assistant｜>") == 4


def test_the_items_of_an_answer_can_be_sent_back(client: TestClient, engine: FakeEngine) -> None:
    answer = ask(client, tools=[tool()], reasoning={"effort": "low"}, test_steps=[THOUGHT, CALL])
    result = {**RESULT, "call_id": answer["output"][-1]["call_id"]}

    ask(client, [{"role": "user", "content": "hi"}, *answer["output"], result])

    assert "<｜Assistant｜>Hi" in prompt_of(engine)


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ("required", True),
        ({"type": "function", "name": "w"}, True),
        ("auto", False),
        ("none", False),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "w"}],
            },
            True,
        ),
    ],
)
def test_the_choice_of_a_tool(
    client: TestClient, engine: FakeEngine, choice: Any, is_forced: bool
) -> None:
    answer = ask(client, tools=[tool(), tool("v")], tool_choice=choice, test_steps=[CALL])

    constraint = engine.submitted[-1].params.constraint
    assert (constraint is not None) == is_forced
    assert answer["tool_choice"] == choice
    if isinstance(choice, dict):  # the other function is out of reach
        assert constraint is not None
        assert "call_1" not in constraint.grammar


def test_tools_of_unknown_types_are_ignored(client: TestClient) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "x"}, {"type": "custom"}]
    answer = ask(client, tools=[*tools, tool()], test_steps=[CALL])

    assert [t["name"] for t in answer["tools"]] == ["w"]
    assert answer["output"][0]["type"] == "function_call"


def test_a_json_schema_becomes_the_engines_constraint(
    client: TestClient, engine: FakeEngine
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for form in ({"type": "json_schema", "name": "s", "schema": schema}, {"type": "json_object"}):
        ask(client, text={"format": form})
        constraint = engine.submitted[-1].params.constraint
        assert constraint is not None
        assert constraint.kind == "json_schema"


def test_what_agents_send_beside_is_accepted(client: TestClient) -> None:
    ask(
        client,
        client_metadata={"x": 1},
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        prompt_cache_key="k",
        service_tier="auto",
        truncation="auto",
        stream_options={"include_obfuscation": False},
        user="u",
    )


# -- stored responses ----------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_goes_on_from_an_earlier_response(
    client: TestClient, engine: FakeEngine, streams: bool
) -> None:
    fields: dict[str, Any] = {"tools": [tool()], "instructions": "Brief"}
    if streams:
        first = stream(client, "one", test_steps=["Hi ", CALL], **fields)[-1]["response"]
    else:
        first = ask(client, "one", test_steps=["Hi ", CALL], **fields)
    result = {**RESULT, "call_id": first["output"][-1]["call_id"]}
    second = ask(client, [result], previous_response_id=first["id"], test_steps=["fine"])
    ask(client, "three", previous_response_id=second["id"])

    assert second["previous_response_id"] == first["id"]
    text = r"<｜User｜>one #\d+#<｜Assistant｜>Hi"
    assert re.search(f"{text}.*<｜tool▁outputs▁begin｜>42", prompt_of(engine))
    assert prompt_of(engine).endswith(
        "fine<｜end▁of▁sentence｜><｜User｜>three<｜Assistant｜></think>"
    )
    assert "Brief" not in prompt_of(engine)  # instructions are of one request


def test_a_stored_response_can_be_read_and_deleted(client: TestClient) -> None:
    answer = ask(client)
    path = f"{PATH}/{answer['id']}"

    assert client.get(path).json() == answer
    assert client.delete(path).json() == {
        "id": answer["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    for response in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
        assert error_of(response, 404)["code"] == "response_not_found"


def test_without_store_nothing_is_kept(client: TestClient) -> None:
    answer = ask(client, store=False)

    error_of(client.get(f"{PATH}/{answer['id']}"), 404)
    body = {"model": "tiny", "input": "hi", "previous_response_id": answer["id"]}
    error = error_of(client.post(PATH, json=body), 400)
    assert (error["code"], error["param"]) == (
        "previous_response_not_found", "previous_response_id",
    )  # fmt: skip


def test_another_key_does_not_find_a_response(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    config = GatewayConfig(served_model_name=("tiny",), api_key=("one", "two"))
    with TestClient(create_app(config, engine, tokenizer)) as client:
        client.headers["authorization"] = "Bearer one"
        path = f"{PATH}/{ask(client)['id']}"
        assert client.get(path).status_code == 200
        client.headers["authorization"] = "Bearer two"
        assert client.get(path).status_code == 404
        assert client.delete(path).status_code == 404


def test_input_items_are_listed_page_by_page(client: TestClient) -> None:
    first = ask(client, "one")
    items = [{"role": "user", "content": "two"}, {**CALL_ITEM, "id": "fc_own"}, RESULT]
    answer = ask(client, items, previous_response_id=first["id"])
    path = f"{PATH}/{answer['id']}/input_items"

    listed = client.get(path, params={"order": "asc"}).json()
    assert [item["type"] for item in listed["data"]] == [
        *["message", "message", "message", "function_call", "function_call_output"]
    ]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert listed["data"][1]["content"][0]["type"] == "output_text"
    assert listed["data"][3]["id"] == "fc_own"
    assert len({item["id"] for item in listed["data"]}) == 5
    newest = client.get(path, params={"limit": 2}).json()
    assert newest["data"] == listed["data"][:2:-1]
    assert newest["has_more"]
    rest = client.get(path, params={"limit": 3, "after": newest["last_id"]}).json()
    assert newest["data"] + rest["data"] == listed["data"][::-1]
    assert not rest["has_more"]
    for bad in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        assert error_of(client.get(path, params=bad), 400)["param"] in bad


def test_references_to_items_of_stored_responses(client: TestClient, engine: FakeEngine) -> None:
    first = ask(client, "one", test_steps=["Hello"])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}

    ask(client, [reference, {"role": "user", "content": "two"}])

    assert "<｜Assistant｜>Hello" in prompt_of(engine)


# -- failures ------------------------------------------------------------------------------------


def test_a_failure_after_the_first_token_ends_the_stream_as_failed(client: TestClient) -> None:
    events = stream(client, test_steps=["a", "!raise"])

    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the step failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "a"
    error_of(client.get(f"{PATH}/{last['response']['id']}"), 404)


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_before_the_first_token_is_plain_json(client: TestClient, streams: bool) -> None:
    body = {"model": "tiny", "input": "hi", "stream": streams, "test_steps": ["!raise"]}

    assert error_of(client.post(PATH, json=scripted(body)), 500)["message"] == "the step failed"


SCHEMA = {"type": "json_schema", "name": "s"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "computer"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "input[0].content",
        ),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [CALL_ITEM, {**RESULT, "call_id": "c9"}]}, "input[1].call_id"),
        ({"input": [CALL_ITEM, {**RESULT, "output": 5}]}, "input[1].output"),
        ({"input": [{**CALL_ITEM, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL_ITEM, "name": None}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "item_reference", "id": "msg_nothing"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "msg_" + "0" * 36}]}, "input[0].id"),
        ({"instructions": 5}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [tool("a b")]}, "tools[0].name"),
        ({"tools": [tool(), tool()]}, "tools[1].name"),
        ({"tools": [{**tool(), "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [tool(str(i)) for i in range(1025)]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice.mode",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "x"}],
                }
            },
            "tool_choice.tools",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": SCHEMA}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "schema": []}}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "schema": {"type": "nothing"}}}}, "text.format"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"stream": 1}, "stream"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"seed": 2**70}, "seed"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_field_is_named(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    for streams in (False, True):
        body = {"model": "tiny", "input": "hi", "stream": streams, **fields}
        error = error_of(client.post(PATH, json=body), 400)
        assert error["param"] == param
        assert param in error["message"]
    assert engine.submitted == []


def test_b105_an_over_long_input_is_named_with_both_numbers(client: TestClient) -> None:
    error = error_of(client.post(PATH, json={"model": "tiny", "input": "x z " * 500}), 400)

    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert str(MAX_MODEL_LEN) in error["message"]


def test_what_the_template_refuses_is_the_inputs_fault(client: TestClient) -> None:
    error = error_of(client.post(PATH, json={"model": "tiny", "input": "explode"}), 400)

    assert error["param"] == "input"
    assert "no explosions" in error["message"]


def test_b067_a_lone_surrogate_is_named(client: TestClient) -> None:
    body = b'{"model":"tiny","input":[{"role":"user","content":"\\ud800"}]}'

    assert error_of(client.post(PATH, content=body), 400)["param"] == "input[0].content"


def test_an_unknown_model_is_404(client: TestClient) -> None:
    error = error_of(client.post(PATH, json={"model": "gpt-9", "input": "hi"}), 404)

    assert (error["code"], error["param"]) == ("model_not_found", "model")
