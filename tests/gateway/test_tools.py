"""Tool calls over HTTP. Ids like B011 are rows of the log of public reports."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from tests.gateway.chat_formats.transcripts import block, smallest_pieces, v3_call, v31_call
from tests.gateway.conftest import EOS, MARKERS
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import (
    calls_of,
    chat,
    choices_of,
    error_of,
    finish_reasons,
    post,
    reasoning_of,
    stream_chat,
    text_of,
    user,
)
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

forms = pytest.mark.parametrize("call", [v3_call, v31_call])


def tool(name: str = "w", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def both(client: TestClient, *steps: str, **fields: Any) -> dict[str, Any]:
    """Return the choice of a whole answer after checking that the stream says the same."""
    fields = {"tools": [tool()], **fields, "test_steps": list(steps)}
    choice: dict[str, Any] = chat(client, **fields)["choices"][0]
    events = stream_chat(client, **fields)
    message = choice["message"]
    assert text_of(events) == (message["content"] or "")
    assert reasoning_of(events) == message.get("reasoning_content", "")
    assert calls_of(events) == calls_in(choice)
    assert finish_reasons(events) == [choice["finish_reason"]]
    return choice


def calls_in(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def test_a_call_in_openais_shape(client: TestClient) -> None:
    choice = both(client, block(v31_call("w", '{"city":"A"}')))

    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "w", "arguments": '{"city":"A"}'}}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_names_a_call_before_its_arguments(client: TestClient) -> None:
    steps = ["Hi\n\n", *smallest_pieces(block(v31_call("w", '{"city":"A"}')))]
    events = choices_of(stream_chat(client, tools=[tool()], test_steps=steps))

    tools = [c["delta"]["tool_calls"][0] for c in events if "tool_calls" in c["delta"]]
    assert tools[0]["function"] == {"name": "w", "arguments": ""}
    assert "".join(t["function"]["arguments"] for t in tools) == '{"city":"A"}'
    assert len(tools) > 5, "arguments must not wait for their end"


@forms
def test_B003_exactly_one_finish_reason(client: TestClient, call: Any) -> None:
    for _ in range(3):
        assert both(client, "x", block(call("w", "{}")))["finish_reason"] == "tool_calls"


@forms
def test_B011_parallel_calls_have_their_own_index(client: TestClient, call: Any) -> None:
    choice = both(client, block(call("w", '{"city":"A"}'), call("w", '{"city":"B"}')))

    assert calls_in(choice) == [("w", '{"city":"A"}'), ("w", '{"city":"B"}')]
    assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2


@forms
def test_B013_two_calls_in_one_step_are_both_delivered(client: TestClient, call: Any) -> None:
    assert len(calls_in(both(client, block(call("w", "{}"), call("w", "{}"))))) == 2


@forms
def test_B015_a_chinese_city_arrives(client: TestClient, call: Any) -> None:
    assert calls_in(both(client, block(call("w", '{"city": "上海"}')))) == [
        ("w", '{"city": "上海"}')
    ]


@forms
def test_B017_a_closing_tag_in_pieces_leaks_nothing(client: TestClient, call: Any) -> None:
    choice = both(client, *smallest_pieces(block(call("w", '{"city":"x 2>&1"}'))))

    assert json.loads(calls_in(choice)[0][1]) == {"city": "x 2>&1"}


@forms
def test_B019_each_call_keeps_its_own_types(client: TestClient, call: Any) -> None:
    tools = [tool("x", v={"type": "string"}), tool("y", v={"type": "integer"})]

    choice = both(client, block(call("x", '{"v":"1"}'), call("y", '{"v":1}')), tools=tools)

    assert calls_in(choice) == [("x", '{"v":"1"}'), ("y", '{"v":1}')]


def test_B021_the_code_fence_and_its_language_may_come_apart(client: TestClient) -> None:
    pieces = v3_call("w", '{"city":"A"}').replace("```json", "```\0json").split("\0")

    choice = both(client, "<｜tool▁calls▁begin｜>", *pieces, "<｜tool▁calls▁end｜>")

    assert calls_in(choice) == [("w", '{"city":"A"}')]


@forms
def test_B023_arguments_are_sent_once(client: TestClient, call: Any) -> None:
    choice = both(client, *smallest_pieces(block(call("w", '{"city": "Münster"}'))))

    assert calls_in(choice) == [("w", '{"city": "Münster"}')]


def test_B027_text_before_a_stop_string_is_delivered(client: TestClient) -> None:
    choice = both(client, "abc <｜tool", " x END y", stop=["END"])

    assert choice["message"]["content"] == "abc <｜tool x "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


def test_B027_a_stop_string_inside_a_call_leaves_it_unfinished(client: TestClient) -> None:
    choice = both(client, block(v31_call("w", '{"city":"A END"}')), stop=["END"])

    assert choice["finish_reason"] == "stop"
    assert calls_in(choice) == [("w", '{"city":"A ')]


def test_a_call_cut_by_length_is_partial(client: TestClient) -> None:
    steps = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "w", "<｜tool▁sep｜>", "{", '"']

    choice = both(client, *steps, "city", max_tokens=6)

    assert (choice["finish_reason"], calls_in(choice)) == ("length", [("w", '{"')])


def test_text_after_the_block_stays_and_the_blank_line_before_it_goes(client: TestClient) -> None:
    choice = both(client, "Let me see.\n\n", block(v31_call("w", "{}")), "\nAnd then")

    assert choice["message"]["content"] == "Let me see.\nAnd then"
    assert len(calls_in(choice)) == 1


def test_item_30_a_tool_block_ends_the_reasoning(client: TestClient) -> None:
    choice = both(client, "I must look", block(v31_call("w", "{}")), thinking=True)

    assert choice["message"]["reasoning_content"] == "I must look"
    assert choice["message"]["content"] is None
    assert len(calls_in(choice)) == 1


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}, {"tools": []}])
def test_without_tools_their_markup_is_text(client: TestClient, fields: dict[str, Any]) -> None:
    markup = block(v31_call("w", "{}"))

    choice = both(client, markup, **fields)

    assert choice["message"]["content"] == markup
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_only_one_call_when_parallel_calls_are_off(client: TestClient) -> None:
    markup = block(v31_call("w", "{}"), v31_call("w", "{}"))

    assert len(calls_in(both(client, markup, parallel_tool_calls=False))) == 1


@given(
    content=st.sampled_from(["", "hi <｜tool", "text\n\n"]),
    city=st.text('ab上🙂"\\`}<&', max_size=5),
    form=st.sampled_from([v3_call, v31_call]),
    stop=st.sampled_from([None, "b", "上", "<"]),
    thinking=st.booleans(),
    data=st.data(),
)
def test_every_cut_streams_what_the_whole_answer_says(
    tokenizer: TextTokenizer,
    content: str,
    city: str,
    form: Any,
    stop: str | None,
    thinking: bool,
    data: st.DataObject,
) -> None:
    text = ("why</think>" if thinking else "") + content + block(form("w", json.dumps(city)))
    pieces = smallest_pieces(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=6)))
    bounds = itertools.pairwise([0, *cuts, len(pieces)])
    client = client_of(tokenizer)
    fields = {"tools": [tool()], "stop": stop, "thinking": thinking}

    cut = both(client, *("".join(pieces[a:b]) for a, b in bounds), **fields)
    whole = chat(client, **fields, test_steps=[text])["choices"][0]

    for call in (*cut["message"].get("tool_calls", ()), *whole["message"].get("tool_calls", ())):
        del call["id"]
    assert cut == whole


def client_of(tokenizer: TextTokenizer, **config: Any) -> TestClient:
    config = {"served_model_name": ("tiny",), "enable_test_hooks": True, **config}
    return TestClient(create_app(GatewayConfig(**config), FakeEngine(tokenizer), tokenizer))


@forms
def test_a_real_engine_emits_calls_as_scripted(real_client: TestClient, call: Any) -> None:
    text = "why</think>Hi\n\n" + block(call("w", '{"city":"上海"}'), call("w", "{}"))

    choices = [
        both(real_client, *steps, thinking=True) for steps in ([text], smallest_pieces(text))
    ]

    for choice in choices:
        assert choice["message"]["reasoning"] == "why"
        assert choice["message"]["content"] == "Hi"
        assert calls_in(choice) == [("w", '{"city":"上海"}'), ("w", "{}")]
        assert choice["finish_reason"] == "tool_calls"


def test_every_choice_has_calls_of_its_own(client: TestClient) -> None:
    fields = {"tools": [tool()], "n": 2, "test_steps": [block(v31_call("w", "{}"))]}
    events = stream_chat(client, **fields)

    assert calls_of(events, 0) == calls_of(events, 1) == [("w", "{}")]
    ids = {c["message"]["tool_calls"][0]["id"] for c in chat(client, **fields)["choices"]}
    assert len(ids) == 2


# -- what requests say --------------------------------------------------------------------------


def call(arguments: Any = "{}", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "w", "arguments": arguments}}


def turns(*calls: dict[str, Any], **result: Any) -> list[dict[str, Any]]:
    answer = {"role": "tool", "content": "42", "tool_call_id": "call_1", **result}
    return [user("hi"), {"role": "assistant", "content": None, "tool_calls": list(calls)}, answer]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["w"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "w", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool(str(i)) for i in range(1025)]}, "tools"),
        ({"tool_choice": "sometimes", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [tool()]},
            "tool_choice",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": turns()}, "messages[2].tool_call_id"),
        ({"messages": turns(call(), tool_call_id="other")}, "messages[2].tool_call_id"),
        ({"messages": turns(call(), tool_call_id=None)}, "messages[2].tool_call_id"),
        ({"messages": turns({"id": "call_1"})}, "messages[2].tool_call_id"),
        ({"messages": turns({"id": "c", "function": {"name": 1}})}, "messages[2].tool_call_id"),
        ({"messages": turns({"function": {"name": "w"}})}, "messages[2].tool_call_id"),
        ({"messages": [user("hi") | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_a_bad_field_is_named(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        body = {"model": "tiny", "messages": [user("hi")], **fields, "stream": stream}
        error = error_of(client.post("/v1/chat/completions", content=orjson.dumps(body)), 400)
        assert error["param"] == param
        assert param in error["message"]
    assert engine.submitted == []


def test_tools_of_unknown_types_are_ignored(client: TestClient) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "x"}, tool()]

    assert len(calls_in(both(client, block(v31_call("w", "{}")), tools=tools))) == 1


@pytest.mark.parametrize("arguments", ['{"city":  "上海"}', {"city": "上海"}, "", None, "broken {"])
def test_B029_earlier_calls_and_their_results_are_accepted(
    client: TestClient, engine: FakeEngine, arguments: Any
) -> None:
    assert post(client, "/v1/chat/completions", messages=turns(call(arguments)))["choices"]


@pytest.mark.parametrize("call_id", ["call_1", "functions.w:0", "x"])
def test_item_27_ids_of_any_spelling_are_accepted(client: TestClient, call_id: str) -> None:
    messages = turns(call(call_id=call_id), tool_call_id=call_id)

    assert post(client, "/v1/chat/completions", messages=messages)["choices"]


TEMPLATES = {
    "text": "{{ c.function.arguments }}",
    "objects": "{{ c.function.arguments | tojson }}",
    "either": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"city": "上海"}', {"city": "上海"}])
def test_arguments_are_encoded_once(
    tokenizer_folder: Any, tmp_path: Any, kind: str, arguments: Any
) -> None:
    template = tmp_path / "template.jinja"
    loop = "{% for c in m.tool_calls or [] %}" + TEMPLATES[kind] + "{% endfor %}"
    template.write_text("{% for m in messages %}" + loop + "{% endfor %}")
    tokenizer = TextTokenizer.from_folder(tokenizer_folder, template)
    client = client_of(tokenizer)

    answer = client.post(
        "/tokenize", json={"messages": turns(call(arguments)), "add_generation_prompt": False}
    )

    assert (
        tokenizer.decode(answer.json()["tokens"]) == "<｜begin▁of▁sentence｜>" + '{"city": "上海"}'
    )


# -- which family -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reasoning_parser": "deepseek_v31", "tool_call_parser": "deepseek_v31"},
        {"reasoning_parser": "deepseek_v3"},
    ],
)
def test_flags_may_name_the_family_of_the_template(
    tokenizer: TextTokenizer, fields: dict[str, str]
) -> None:
    assert len(calls_in(both(client_of(tokenizer, **fields), block(v31_call("w", "{}"))))) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning_parser": "deepseek_r1"}, "does not fit this checkpoint.*deepseek_v31"),
        ({"tool_call_parser": "deepseek_v3"}, "does not fit this checkpoint.*deepseek_v31"),
        ({"tool_call_parser": "hermes"}, "must be one of auto, deepseek_r1.*'hermes'"),
    ],
)
def test_item_29_a_parser_that_does_not_fit_is_refused(
    tokenizer: TextTokenizer, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        client_of(tokenizer, **fields)


def test_markup_made_of_special_tokens_reaches_the_parser(
    tokenizer: TextTokenizer, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    markup = tokenizer.ids_of(MARKERS)
    monkeypatch.setattr(tokenizer, "special_ids", tokenizer.special_ids | markup)

    choice = both(client, "why</think>", block(v31_call("w", "{}")), EOS, thinking=True)

    assert choice["message"]["reasoning"] == "why"
    assert calls_in(choice) == [("w", "{}")]
