"""Every mistake of a client is an OpenAI-shaped 4xx, quickly, and the engine never hears of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import complete, error_of, user
from tests.work import million_steps_s
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.body import is_deeper_than
from whalepod.server.tokenizer import TextTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def _engine_untouched_after_little_work(engine: FakeEngine) -> Iterator[None]:
    started_s = time.process_time()  # a busy machine is no fault of ours
    yield
    assert engine.submitted == []
    assert time.process_time() - started_s < 200 * million_steps_s()


def chat_error(client: TestClient, status: int = 400, **fields: Any) -> dict[str, Any]:
    """Return the error of a chat request, the same whether it would have streamed or not."""
    body = {"model": "tiny", "messages": [user("hi")], **fields}
    errors = [
        error_of(client.post(CHAT, json={**body, "stream": stream}), status)
        for stream in (False, True)
    ]
    assert errors[0] == errors[1]
    return errors[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stream_options": 1}, "stream_options"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [user(None)]}, "messages"),
        ({"messages": [user(5)]}, "messages[0].content"),
        ({"messages": [user(["x"])]}, "messages[0].content"),
        ({"messages": [user("explode")]}, "messages"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages[0].content"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"structured_outputs": {"regex": "foo**"}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"best_of": 2}, "best_of"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "a"}, "guided_grammar"),
        ({"functions": [{"name": "w"}]}, "functions"),
        ({"function_call": {"name": "w"}}, "function_call"),
    ],
)
def test_a_bad_field_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    error = chat_error(client, **fields)

    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


def test_images_are_not_supported(client: TestClient) -> None:
    error = chat_error(client, messages=[user([{"type": "image_url", "image_url": {"url": "x"}}])])

    assert "image_url parts are not supported" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, [[]], [1, "a"], [True, False], [1.5], [-1], [10**6], [[1], [10**6]], [[1.0]]],
)
def test_a_bad_prompt_is_named(client: TestClient, prompt: object) -> None:
    error = error_of(client.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt}), 400)

    assert error["param"] == "prompt"


def test_too_many_choices_are_refused(client: TestClient) -> None:
    body = {"model": "tiny", "prompt": ["a"] * 100, "n": 2}

    assert error_of(client.post(COMPLETIONS, json=body), 400)["param"] == "n"


def test_b105_an_over_long_prompt_is_named_with_both_numbers(client: TestClient) -> None:
    for fields in ({"content": "x z " * 500}, {"content": "x z " * 50_000}):
        error = chat_error(client, messages=[user(fields["content"])])
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]

    prompt = [1] * (MAX_MODEL_LEN + 7)
    error = error_of(client.post(COMPLETIONS, json={"prompt": prompt}), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN + 7) in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": Infinity, "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_a_body_that_is_no_good_json_is_refused(client: TestClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}

    error = error_of(client.post(CHAT, content=body, headers=headers), 400)

    assert error["type"] == "invalid_request_error"


def test_b067_a_lone_surrogate_is_named(client: TestClient) -> None:
    for stream in (b"true", b"false"):
        body = b'{"stream":' + stream + b',"messages":[{"role":"user","content":"\\ud800"}]}'
        error = error_of(client.post(CHAT, content=body), 400)
        assert error["param"] == "messages[0].content"


def test_large_bodies_are_refused_with_and_without_a_length(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    for content in (b" " * 10_000_000, chunks()):
        response = client.post(CHAT, content=content)
        assert error_of(response, 413)["code"] == "body_too_large"
        assert response.headers["connection"] == "close"


def test_b061_up_to_sixteen_stop_strings_are_accepted(
    client: TestClient, engine: FakeEngine
) -> None:
    complete(client, stop=list("abcdefghijklmnop"))
    engine.submitted.clear()


def test_unknown_models_routes_and_methods(client: TestClient) -> None:
    error = chat_error(client, 404, model="gpt-9")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(client.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_chat_without_a_template_says_what_to_do(tmp_path: Any) -> None:
    tokenizer = TextTokenizer.from_folder(write_tokenizer(tmp_path, chat_template=None))
    client = TestClient(create_app(GatewayConfig(), FakeEngine(tokenizer), tokenizer))

    error = error_of(client.post(CHAT, json={"model": "tiny", "messages": [user("hi")]}), 400)
    assert "no chat template" in error["message"]
    assert client.post(COMPLETIONS, json={"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize("fields", [{}, {"strict": True}])
def test_tools_need_a_template_whose_calls_are_known(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Calls that no parser reads would be text, and no schema could hold their arguments."""
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = TextTokenizer.from_folder(write_tokenizer(tmp_path, chat_template=plain))
    client = TestClient(create_app(GatewayConfig(), FakeEngine(tokenizer), tokenizer))
    tools = [{"type": "function", "function": {"name": "w", **fields}}]
    body = {"model": "tiny", "messages": [user("hi")], "tools": tools}

    error = error_of(client.post(CHAT, json=body), 400)

    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    assert client.post(CHAT, json=body | {"tool_choice": "none"}).status_code == 200


def test_strict_needs_a_token_that_opens_calls(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace("tool▁calls▁begin", "another"))
    tokenizer = TextTokenizer.from_folder(tmp_path)
    client = TestClient(create_app(GatewayConfig(), FakeEngine(tokenizer), tokenizer))
    function = {"name": "w", "strict": True}
    body = {"model": "tiny", "messages": [user("hi")]}
    body["tools"] = [{"type": "function", "function": function}]

    error = error_of(client.post(CHAT, json=body), 400)

    assert error["param"] == "tools"
    assert "strict arguments cannot be enforced" in error["message"]
    function["strict"] = False
    assert client.post(CHAT, json=body).status_code == 200


def test_depth_counts_brackets_outside_of_strings_only() -> None:
    assert not is_deeper_than(b"[" * 64 + b"]" * 64, 64)
    assert is_deeper_than(b"[" * 65 + b"]" * 65, 64)
    assert is_deeper_than(b'{"a":[' * 40 + b"]}" * 40, 64)
    assert not is_deeper_than(orjson.dumps(["[" * 100, '"\\[[' * 100, "]" * 9]), 3)


def test_hostile_bodies_are_scanned_in_linear_time() -> None:
    for body in (b'"' + b'\\"' * 1_000_000, b'"' * 1_000_001, b"[" * 10**6 + b"]" * 10**6):
        started_s = time.process_time()
        is_deeper_than(body, 64)
        assert time.process_time() - started_s < 100 * million_steps_s()
