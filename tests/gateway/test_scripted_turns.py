"""`--test-script`: clients that send nothing special get scripted turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.families.transcripts import block, v31_call
from tests.gateway.wire import chat, complete, post, user
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.tokenizer import TextTokenizer

CHAT = "/v1/chat/completions"


def client_with(tokenizer: TextTokenizer, file: Path, *turns: Any) -> TestClient:
    file.write_bytes(b"\n".join(map(orjson.dumps, turns)) + b"\n\n")
    config = GatewayConfig(
        served_model_name=("tiny",), enable_test_hooks=True, test_script=str(file)
    )
    return TestClient(create_app(config, FakeEngine(tokenizer), tokenizer))


def test_a_tool_loop_is_scripted_by_route_role_and_text(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "w"}}
    client = client_with(
        tokenizer,
        tmp_path / "script.jsonl",
        {"route": CHAT, "last_role": "user", "contains": "weather",
         "steps": [block(v31_call("w", '{"city":"A"}'))]},
        {"route": CHAT, "last_role": "tool", "steps": ["It is ", "mild."]},
        {"route": "/v1/completions", "steps": ["raw"]},
    )  # fmt: skip

    first = chat(client, "how is the weather?", tools=[tool])["choices"][0]["message"]
    answer = {"role": "tool", "content": "12", "tool_call_id": first["tool_calls"][0]["id"]}
    last = post(client, CHAT, messages=[user("weather"), first, answer], tools=[tool])

    assert last["choices"][0]["message"]["content"] == "It is mild."
    assert complete(client)["choices"][0]["text"] == "raw"
    assert chat(client, "hello")["choices"][0]["message"]["content"].startswith("answer 0")
    assert chat(client, "weather", test_steps=["x"])["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"route": CHAT}, "line 1: steps"),
        ({"route": CHAT, "steps": []}, "line 1: steps"),
        ({"route": CHAT, "steps": ["a"], "rol": "user"}, "line 1: rol"),
        ([], "line 1"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(
    tokenizer: TextTokenizer, tmp_path: Path, line: Any, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        client_with(tokenizer, tmp_path / "script.jsonl", line)


def test_a_script_needs_a_file_and_the_hooks(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    config = GatewayConfig(enable_test_hooks=True, test_script=str(tmp_path / "none"))
    with pytest.raises(StartupError, match="cannot be read"):
        create_app(config, FakeEngine(tokenizer), tokenizer)
    with pytest.raises(ValueError, match="test_script needs enable_test_hooks"):
        GatewayConfig(test_script="x")
