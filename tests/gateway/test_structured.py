"""Structured output through a real engine with random weights: what it says is all grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.real_gateway import real_gateway
from tests.gateway.serving import TestClient
from tests.gateway.wire import (
    calls_of,
    chat,
    complete,
    error_of,
    finish_reasons,
    reasoning_of,
    stream_chat,
    text_of,
    user,
)
from whalepod.server.structured import checker

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
SEEDS = range(3)
HUGE = "x" * 300_000


def tool(name: str = "w", parameters: dict[str, Any] | None = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": value}}


@pytest.fixture(scope="module")
def client(nano: Path) -> Iterator[TestClient]:
    with real_gateway(nano) as g, g.client() as client:
        yield client


def both(client: TestClient, **fields: Any) -> dict[str, Any]:
    """Return the choice of a whole answer after checking that the stream says the same."""
    choice: dict[str, Any] = chat(client, **fields)["choices"][0]
    events = stream_chat(client, **fields)
    message = choice["message"]
    assert text_of(events) == (message["content"] or "")
    assert reasoning_of(events) == message.get("reasoning", "")
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    assert calls_of(events) == calls
    assert finish_reasons(events) == [choice["finish_reason"]]
    return choice


def calls_in(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = choice["message"]["tool_calls"]
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "w"}}],
    ids=["required", "named"],
)
def test_B001_a_forced_call_finishes_with_tool_calls(
    client: TestClient, choice: Any, seed: int
) -> None:
    answer = both(client, tools=[tool()], tool_choice=choice, parallel_tool_calls=False, seed=seed)

    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None


@pytest.mark.parametrize("seed", SEEDS)
def test_B007_a_named_choice_has_arguments_of_its_schema(client: TestClient, seed: int) -> None:
    choice = {"type": "function", "function": {"name": "w"}}

    answer = both(client, tools=[tool("x"), tool()], tool_choice=choice, seed=seed)

    ((name, arguments),) = calls_in(answer)
    assert name == "w"
    assert list(arguments) == ["city"]
    assert len(arguments["city"]) <= 5


def test_B025_optional_properties_may_be_missing(client: TestClient) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    properties = {"id": {"type": "string", "maxLength": 3}, "n": digit, "o": digit}
    parameters = {"type": "object", "properties": properties, "required": ["id"]}
    fields = {"tools": [tool("t", parameters | {"additionalProperties": False})]}

    for seed in range(8):
        answer = chat(
            client, **fields, tool_choice="required", seed=seed, parallel_tool_calls=False
        )
        ((_, arguments),) = calls_in(answer["choices"][0])
        assert "id" in arguments
        assert arguments.keys() <= properties.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_item_40_thinking_is_free_and_the_call_after_it_is_forced(
    client: TestClient, seed: int
) -> None:
    """The model is random: the bias makes it close its reasoning now and then."""
    end = client.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"][-1]
    fields = {"thinking": True, "logit_bias": {str(end): 8.0}, "seed": seed}

    answer = both(
        client, tools=[tool()], tool_choice="required", parallel_tool_calls=False, **fields
    )

    assert answer["finish_reason"] == "tool_calls"
    assert calls_in(answer)[0][0] == "w"
    assert "<｜tool" not in answer["message"].get("reasoning", "")


def test_a_function_without_parameters_is_called_with_none(client: TestClient) -> None:
    answer = both(
        client, tools=[tool("now", None)], tool_choice="required", seed=1, parallel_tool_calls=False
    )

    assert calls_in(answer) == [("now", {})]


@pytest.mark.parametrize("seed", SEEDS)
def test_B041_a_grammar_begins_behind_the_reasoning(client: TestClient, seed: int) -> None:
    text = '{"city":"a"}'
    scripted = both(
        client, thinking=True, response_format=schema(CITY), test_steps=[f"x</think>{text}"]
    )
    assert scripted["message"]["content"] == text

    end = client.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"][-1]
    answer = both(
        client, thinking=True, response_format=schema(CITY), logit_bias={str(end): 8.0}, seed=seed
    )
    assert list(json.loads(answer["message"]["content"])) == ["city"]


def test_B043_white_space_is_bounded(client: TestClient) -> None:
    space = client.post("/tokenize", json={"prompt": " "}).json()["tokens"][-1]
    value = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}

    answer = both(
        client,
        response_format=schema(value | {"additionalProperties": False}),
        max_tokens=300,
        logit_bias={str(space): 100},
    )

    content = answer["message"]["content"]
    assert answer["finish_reason"] == "stop"
    assert max(map(len, re.findall(r"\s+", content))) <= 8
    assert json.loads(content) == {"a": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "foo**"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(foo"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema(None)}, "response_format.json_schema.schema"),
        ({"response_format": schema({"type": "objekt"})}, "response_format"),
        ({"response_format": schema({"$ref": "#/$defs/x"})}, "response_format"),
        ({"response_format": schema({"type": "object", "not": {}})}, "response_format"),
        ({"response_format": schema({"enum": [HUGE]})}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"tools": [tool("w", {"type": "objekt"})], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_B045_what_cannot_be_a_grammar_is_refused_by_name(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "messages": [user("hi")], **fields}

    error = error_of(client.post("/v1/chat/completions", json=body), 400)

    assert error["param"] == param
    assert client.get("/health").status_code == 200


SLOW = {"type": "integer", "multipleOf": 1000003}
"""A schema that takes seconds to compile."""


def test_a_schema_that_explodes_is_refused_in_time(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = client.app.state.gateway  # type: ignore[attr-defined]
    slow = schema(SLOW)
    complete(client, structured_outputs={"regex": "a"})  # the worker runs now
    monkeypatch.setattr(gateway.grammars._checker._compilers[0], "_timeout_s", 0.5)
    body = {"model": "tiny", "messages": [user("hi")], "response_format": slow}

    compiler = gateway.grammars._checker._compilers[0]._process
    error = error_of(client.post("/v1/chat/completions", json=body), 400)

    assert "more than 0.5 s" in error["message"]
    assert compiler.returncode is not None, "it is ended in the middle of its work"
    monkeypatch.undo()  # the next worker takes a while to start
    verdicts = gateway.grammars._checker._verdicts
    assert all("0.5 s" not in (verdict or "") for verdict in verdicts.values()), "a busy machine?"
    assert complete(client, structured_outputs={"regex": "ab"})["choices"][0]["text"] == "ab"


def test_a_compiler_that_does_not_start_is_a_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = client.app.state.gateway  # type: ignore[attr-defined]
    broken = gateway.grammars._new_checker()
    broken._compilers[0]._vocabulary["tokenizer_json"] = "{"
    monkeypatch.setattr(gateway.grammars, "_checker", broken)
    body = {"prompt": "hi", "structured_outputs": {"regex": "a"}}

    response = client.post("/v1/completions", json=body)

    assert error_of(response, 503)["code"] == "compiler_unavailable"
    assert response.headers["retry-after"]
    assert broken._compilers[0]._process is None


def test_too_many_grammars_that_wait_for_the_worker_are_a_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(client, structured_outputs={"regex": "known"}, max_tokens=9)
    monkeypatch.setattr(checker, "MAX_WAITING", 0)
    known, new = ({"prompt": "hi", "structured_outputs": {"regex": r}} for r in ("known", "new"))

    response = client.post("/v1/completions", json=new)

    assert error_of(response, 503)["code"] == "compiler_unavailable"
    assert client.post("/v1/completions", json=known).status_code == 200


def test_B047_references_into_arrays_are_followed(client: TestClient) -> None:
    item = {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"],
            "additionalProperties": False}  # fmt: skip
    value = {
        "$defs": {"A": item},
        "type": "object",
        "properties": {"r": {"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1,
                             "maxItems": 2}},
        "required": ["r"],
        "additionalProperties": False,
    }  # fmt: skip

    for seed in SEEDS:
        content = both(client, response_format=schema(value), seed=seed)["message"]["content"]
        assert all(entry["n"] in "ab" for entry in json.loads(content)["r"])


def test_B049_null_and_enum_are_what_they_say(client: TestClient) -> None:
    properties = {"t": {"enum": ["one", "two"]}, "e": {"type": ["string", "null"], "maxLength": 3}}
    value = {"type": "object", "properties": properties, "required": ["t", "e"],
             "additionalProperties": False}  # fmt: skip

    for seed in SEEDS:
        content = both(client, response_format=schema(value), seed=seed)["message"]["content"]
        answer = json.loads(content)
        assert answer["t"] in ("one", "two")
        assert answer["e"] is None or len(answer["e"]) <= 3


def test_a_json_object_is_an_object(client: TestClient) -> None:
    answer = both(client, response_format={"type": "json_object"}, seed=1, max_tokens=300)

    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    assert answer["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("n", [1, 3])
def test_every_choice_keeps_to_the_grammar_by_itself(client: TestClient, n: int) -> None:
    answer = chat(client, structured_outputs={"regex": "[a-c]{3,6}"}, n=n, seed=5)

    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-c]{3,6}", text) for text in texts)


def test_a_grammar_beats_bias_and_ignored_ends(client: TestClient) -> None:
    fields = {"structured_outputs": {"choice": ["yes", "no"]}}
    x = client.post("/tokenize", json={"prompt": "x"}).json()["tokens"][-1]

    answers = [
        chat(client, **fields, logit_bias={str(x): 100}),
        chat(client, **fields, temperature=0),
        chat(client, **fields, ignore_eos=True, max_tokens=20),
    ]

    assert all(a["choices"][0]["message"]["content"] in ("yes", "no") for a in answers)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-z]{3}"}, "[a-z]{3}"),
        ({"choice": ['a "b"\n', "c"]}, '(a "b"\n|c)'),
        ({"grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        (None, "[34]"),
    ],
)
def test_raw_completions_may_be_structured(
    client: TestClient, fields: dict[str, Any] | None, pattern: str
) -> None:
    asked: dict[str, Any] = {"structured_outputs": fields}
    if fields is None:
        asked = {"response_format": schema({"enum": [3, 4]})}
    text = complete(client, **asked, max_tokens=40, seed=2)["choices"][0]["text"]

    assert re.fullmatch(pattern, text)


def test_a_format_and_tools_allow_either(client: TestClient) -> None:
    value = {"enum": ["plain"]}

    for seed in SEEDS:
        answer = both(client, tools=[tool()], response_format=schema(value), seed=seed,
                      parallel_tool_calls=False)  # fmt: skip
        if answer["finish_reason"] == "tool_calls":
            assert calls_in(answer)[0][0] == "w"
        else:
            assert answer["message"]["content"] == '"plain"'


def ids_of(client: TestClient, *markers: str) -> list[int]:
    return [client.post("/tokenize", json={"prompt": m}).json()["tokens"][-1] for m in markers]


def strict_tool(name: str = "w", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY} | fields}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_strict_functions_arguments_fulfil_its_schema_when_the_model_chooses_to_call(
    client: TestClient, thinking: bool
) -> None:
    """The model is random: the bias makes it call now and then, in the middle of its text."""
    calls, end = ids_of(client, "<｜tool▁calls▁begin｜>", "</think>")
    fields = {"thinking": thinking, "logit_bias": {str(calls): 6.0, str(end): 6.0}}
    fields |= {"tools": [strict_tool(strict=True), strict_tool("x", strict=True)]}
    fields |= {"parallel_tool_calls": False, "max_tokens": 150}
    num_calls = 0

    for seed in range(3):
        answer = both(client, **fields, seed=seed)
        if answer["finish_reason"] != "tool_calls":
            continue
        ((_, arguments),) = calls_in(answer)
        assert list(arguments) == ["city"]
        assert len(arguments["city"]) <= 5
        num_calls += 1
    assert num_calls


def test_an_answer_without_a_call_is_free_text_with_strict_functions(client: TestClient) -> None:
    openers = ids_of(client, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    fields = {"logit_bias": {str(i): -100 for i in openers}, "seed": 4, "max_tokens": 30}

    strict = both(client, tools=[strict_tool(strict=True)], **fields)
    loose = both(client, tools=[strict_tool()], **fields)

    assert strict["message"] == loose["message"]
    assert strict["message"]["content"]


def test_what_strict_asks_for_is_enforced_as_a_whole_or_refused(client: TestClient) -> None:
    parameters = CITY | {"not": {"required": ["town"]}}
    body = {"model": "tiny", "messages": [user("hi")], "max_tokens": 1}

    for choice in ("auto", "required"):
        body["tool_choice"] = choice
        body["tools"] = [tool(parameters=parameters)]
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        body["tools"] = [strict_tool(strict=True, parameters=parameters)]
        error = error_of(client.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == "tools"
        assert "not" in error["message"]


@pytest.mark.parametrize("strict", [1, "yes"])
def test_strict_must_be_true_or_false(client: TestClient, strict: Any) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "tools": [strict_tool(strict=strict)]}

    error = error_of(client.post("/v1/chat/completions", json=body), 400)

    assert error["param"] == "tools[0].function.strict"


OPEN_OBJECT = {"type": "object", "properties": {"a": {"enum": ["x"]}}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {}},
        {"type": "object"},
        OPEN_OBJECT,
        {"type": "object", "properties": {"o": OPEN_OBJECT}, "required": ["o"]},
        {"type": "object", "properties": {"o": {"anyOf": [OPEN_OBJECT]}}, "required": ["o"]},
        {
            "type": "object",
            "properties": {"l": {"type": "array", "items": OPEN_OBJECT, "maxItems": 2}},
            "required": ["l"],
        },
        {
            "$defs": {"o": OPEN_OBJECT},
            "type": "object",
            "properties": {"o": {"$ref": "#/$defs/o"}},
            "required": ["o"],
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["tools", "response_format"])
def test_I21_strict_objects_have_no_key_but_theirs_and_none_twice(
    client: TestClient, parameters: dict[str, Any], where: str
) -> None:
    fields: dict[str, Any] = {"response_format": schema(parameters)}
    if where == "tools":
        tools = [strict_tool(strict=True, parameters=parameters)]
        fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in SEEDS:
        answer = both(client, **fields, seed=seed, temperature=1, max_tokens=200)
        text = answer["message"]["content"]
        if where == "tools":
            text = answer["message"]["tool_calls"][0]["function"]["arguments"]
        json.loads(text, object_pairs_hook=check_keys)


def check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    assert set(names) <= {"a", "o", "l"}
    return dict(pairs)


@pytest.mark.parametrize(
    "parameters",
    [
        OPEN_OBJECT | {"additionalProperties": True},
        OPEN_OBJECT | {"additionalProperties": {"type": "string"}},
        OPEN_OBJECT | {"patternProperties": {"^x": {}}},
        {"type": "object", "properties": {"o": OPEN_OBJECT | {"additionalProperties": True}}},
        {"allOf": [OPEN_OBJECT, {"type": "object", "properties": {"b": {}}}]},
    ],
    ids=str,
)
def test_I21_strict_objects_that_are_meant_to_be_open_are_refused(
    client: TestClient, parameters: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "max_tokens": 1}
    tools = [strict_tool(strict=True, parameters=parameters)]

    error = error_of(client.post("/v1/chat/completions", json=body | {"tools": tools}), 400)
    assert (error["param"], "strict" in error["message"]) == ("tools", True)
    formatted = body | {"response_format": schema(parameters)}
    error = error_of(client.post("/v1/chat/completions", json=formatted), 400)
    assert error["param"] == "response_format.json_schema.schema"


ODD_PARAMETERS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"p": {"type": "string", "pattern": "^(?!.*[.][.]).*$"}}},
    {"type": "object", "properties": {"p": {"type": "string", "pattern": "("}}},
    {"type": "object", "properties": {"p": {"$ref": "#/nowhere"}}},
    {"type": "object", "properties": {"p": {"type": "dream"}, "q": {"enum": [1]}}},
    {"type": "object", "patternProperties": {"^(?=a)": {}}},
    {"type": "object", "properties": {"p": {"type": "string", "minLength": 5, "maxLength": 2}}},
]


@pytest.mark.parametrize("parameters", ODD_PARAMETERS, ids=str)
def test_N028_what_cannot_be_enforced_of_a_loose_tool_is_passed_over(
    client: TestClient, parameters: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "max_tokens": 2}
    tools = [tool(), strict_tool("bad", parameters=parameters)]
    for fields in (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bad"}}},
        {"response_format": {"type": "json_object"}},
        {},
    ):
        response = client.post("/v1/chat/completions", json={**body, "tools": tools, **fields})
        assert response.status_code == 200, response.text
    if "maxLength" in str(parameters):
        return  # of an optional property: it can be left out
    tools = [tool(), strict_tool("bad", strict=True, parameters=parameters)]
    body |= {"tools": tools, "tool_choice": "required"}
    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == "tools"
