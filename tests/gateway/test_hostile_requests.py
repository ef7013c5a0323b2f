"""Requests of all routes with fields that no client should send: each gets its answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from time import process_time
from typing import Any

import pytest

from tests.gateway.conftest import BOS, EOS, MARKERS
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.admin import create_admin_app
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$"}, "b": {"enum": [1, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "w", "description": "Weather", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"a": "a"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    {"role": "assistant", "content": "so", "refusal": None},
    {"role": "user", "content": "and?"},
]
SAMPLING = {
    **{"temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    **{"logit_bias": {"5": 1}, "stop": ["zz"], "stop_token_ids": [3], "ignore_eos": False},
    **{"stream": False, "stream_options": {"include_usage": True}, "return_token_ids": True},
    **{"priority": 0, "cache_salt": "s", "user": "u", "min_tokens": 0, "max_tokens": 4},
    **{"num_speculative_tokens": 1, "include_stop_str_in_output": True},
    **{"skip_special_tokens": False, "best_of": None, "guided_json": None, "suffix": None},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
    {"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
    {"type": "custom_tool_call", "call_id": "d", "name": "sh", "input": "ls"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    {"role": "user", "content": "and?"},
]
BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "why", "signature": "x"},
            {"type": "tool_use", "id": "c", "name": "w", "input": {"a": "a"}},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **{"model": "tiny", "messages": TURNS, "tools": TOOLS, "tool_choice": "auto"},
        **{"response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2},
        **{"chat_template_kwargs": {"thinking": True}, "thinking": None, "reasoning_effort": "low"},
        **{"parallel_tool_calls": True, "thinking_token_budget": 5, **SAMPLING},
    },
    "/v1/completions": {
        **{"model": "tiny", "prompt": ["hi", "there"], "echo": True, "logprobs": 2, **SAMPLING},
        "structured_outputs": {"regex": "a+"},
    },
    "/v1/responses": {
        **{"model": "tiny", "input": ITEMS, "instructions": "Be kind", "max_output_tokens": 4},
        **{"tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "stream": False},
        **{"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}},
        **{"include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "store": True},
        **{"previous_response_id": None, "truncation": "auto", "top_logprobs": 2, "top_p": 0.5},
    },
    "/v1/messages": {
        **{"model": "tiny", "messages": BLOCKS, "system": [{"type": "text", "text": "Be kind"}]},
        **{"tools": [{"name": "w", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
        **{"max_tokens": 4, "stop_sequences": ["zz"], "thinking": {"type": "disabled"}},
        **{"output_config": {"effort": "low"}, "metadata": {"user_id": "u"}, "stream": False},
    },
    "/tokenize": {"messages": TURNS, "tools": TOOLS, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": True},
    "/abort": {"request_id": "x"},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
ADMIN_BODIES: dict[str, dict[str, Any]] = {
    **{"/abort": {"request_id": "x"}, "/log_level": {"level": "info"}},
    **{"/drain": {}, "/resume": {}, "/reset_prefix_cache": {}},
}
PATHS = [
    *("/", "/health", "/ready", "/version", "/metrics", "/cluster", "/docs", "/openapi.json"),
    *("/v1/models", "/v1/models/{}", "/v1/responses/{}", "/v1/responses/{}/input_items?limit={}"),
    *("/v1/responses/{}/input_items?after={}&order={}", "/page/{}", "/docs/static/{}", "/{}"),
    *("/v1/responses/compact", "/v1/chat/completions?{}={}"),
]
NAMES = sorted({name for body in BODIES.values() for name in body})
TEXTS = [
    *("", " ", "a", "\0", "\ufdd0", "\ufffd", "🙂", "e\u0301" * 40, "\u202e", "{{ 7 * 7 }}"),
    *("{% for %}", "'\"`<>{}[]", "null", "0", "-1", "1e999", "../../etc/passwd", "x" * 5000),
    *(BOS, EOS, *MARKERS, "".join(MARKERS), EOS * 50, "<｜tool▁call▁begin｜>w<｜tool▁sep｜>{}"),
    *('{"a": 1, "a": 2}', "[" * 50, "(a+)+$", "(?=a)b", "\\1", "[", "a{1,999}", "start: start"),
    *('root ::= "a"', "assistant", "tool", "function", "text", "json_schema", "auto", "required"),
]
NUMBERS = [0, 1, -1, 2, 0.5, -0.5, 20, 128, 129, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 1e308]
ODD_BODIES = [
    *(
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xff\xfe",
        b"{}{}",
    ),
    *(
        b'{"model": "\\ud800"}',
        b'{"a": "\\udfff\\ud800"}',
        b"[" * 70 + b"]" * 70,
        b'{"": {"": ""}}',
    ),
    *(b'{"model": "tiny", "model": "x"}', b"\xef\xbb\xbf{}", b'{"a":' * 80 + b"1" + b"}" * 80),
]


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that some field does not expect, or not so much of."""
    kind = rng.randrange(12 if depth < 3 else 6)
    if kind < 3:
        return rng.choice(TEXTS)
    if kind < 5:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice([None, True, False])
    if kind < 8:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 10:
        names = [*NAMES, *TEXTS[:12], "type", "role", "content", "name", "$ref", "properties"]
        return {rng.choice(names): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind < 11:
        return copy.deepcopy(rng.choice([TURNS, ITEMS, BLOCKS, TOOLS, SCHEMA, FORMAT, SAMPLING]))
    return nested(rng)


def nested(rng: random.Random) -> Any:
    """Return a value that is deep or wide."""
    value: Any = rng.choice(["x", 1, None])
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 60)):
            value = [value] if rng.random() < 0.5 else {rng.choice(["a", "items", "anyOf"]): value}
        return value
    num = rng.choice([100, 2000])
    return [value] * num if rng.random() < 0.5 else {f"k{i}": value for i in range(num)}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a body with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def odd_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return a body of which little is as it should be."""
    if rng.random() < 0.05:
        return rng.choice(ODD_BODIES)
    left = [name for name in body if rng.random() < 0.5 or name in ("model", "messages", "input")]
    body = copy.deepcopy({name: body[name] for name in left})
    for _ in range(rng.randrange(1, 4)):
        found = list(places(body))
        what = rng.random()
        if found and what < 0.6:
            container, key = rng.choice(found)
            container[key] = odd_value(rng)
        elif found and what < 0.75:
            container, key = rng.choice(found)
            del container[key]
        elif found and what < 0.85:  # the same again, elsewhere
            container, key = rng.choice(found)
            other, place = rng.choice(found)
            other[place] = copy.deepcopy(container[key])
        else:
            body[rng.choice(NAMES)] = odd_value(rng)
    try:
        return json.dumps(body, allow_nan=True).encode()
    except ValueError:  # a text inside itself
        return b"{}"


def ask_oddly(rng: random.Random, client: TestClient, bodies: dict[str, dict[str, Any]]) -> Any:
    what = rng.random()
    headers = {
        "content-type": rng.choice(["application/json", "text/plain", "multipart/form-data"])
    }
    if what < 0.85:
        path = rng.choice(list(bodies))
        return client.post(path, content=odd_body(rng, bodies[path]), headers=headers)
    path = rng.choice(PATHS)
    while "{}" in path:
        part = rng.choice(TEXTS)[:60].encode()
        path = path.replace("{}", "".join(f"%{byte:02x}" for byte in part), 1)
    method = rng.choice(["GET", "HEAD", "DELETE", "POST", "PUT", "PATCH", "OPTIONS"])
    return client.request(method, path, headers=headers)


def ask_all(client: TestClient, admin: TestClient, numbers: range) -> Iterator[float]:
    """Ask by number, check each answer, and yield the seconds of CPU that it took."""
    for number in numbers:
        rng = random.Random(number)
        asked = (admin, ADMIN_BODIES) if rng.random() < 0.05 else (client, BODIES)
        started_s = process_time()
        response = ask_oddly(rng, *asked)
        took_s = process_time() - started_s
        request = response.request
        what = f"{number}: {request.method} {request.url} {request.read()[:2000]!r}"
        assert response.status_code < 500, f"{what}: {response.status_code} {response.text[:500]}"
        assert '"internal_error"' not in response.text, what
        if request.url.path == "/drain":
            admin.post("/resume")
        yield took_s


@pytest.fixture
def admin(client: TestClient) -> Iterator[TestClient]:
    app = create_admin_app(client.app.state.gateway, ["root"])  # type: ignore[attr-defined]
    with TestClient(app, raise_server_exceptions=False) as admin:
        admin.headers["authorization"] = "Bearer root"
        yield admin


@pytest.fixture
def client(engine: FakeEngine, tokenizer: TextTokenizer) -> Iterator[TestClient]:
    app = create_app(GatewayConfig(served_model_name=("tiny",)), engine, tokenizer)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def test_odd_requests_are_answered(client: TestClient, admin: TestClient) -> None:
    assert len(list(ask_all(client, admin, range(600)))) == 600


@pytest.mark.long
def test_20000_odd_requests_are_answered_each_within_a_second(
    client: TestClient, admin: TestClient
) -> None:
    assert max(ask_all(client, admin, range(20_000))) < 1.0
