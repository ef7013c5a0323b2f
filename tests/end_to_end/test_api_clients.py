"""The SDKs of OpenAI and Anthropic, and a checker of both APIs, in whole loops."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.chat_formats.transcripts import block, smallest_pieces, v31_call
from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import serving
from whalepod.server.config import GatewayConfig
from whalepod.server.engine.scripted import ScriptFile
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

CHECKER = "import sys; from llm_comply.cli import main; sys.exit(main())"
CHECK_S = 240
IMAGE_TESTS = {"chat-image-input", "image-input", "anth-image-input"}
"""This server says that it takes no images."""

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TURNS = [
    {"contains": "<｜tool▁outputs▁begin｜>", "steps": ["It is ", "42."]},
    {
        "contains": "weather",
        "steps": ["why</think>Wait\n\n", *smallest_pieces(block(v31_call("w", '{"city":"A"}')))],
    },
    {"contains": "｜>think", "steps": ["so ", "and so</think>", "Hel", "lo"]},
    {"contains": "Paris", "steps": ['{"city":"Paris",', '"is_large":true}']},
]


class City(BaseModel):
    city: str
    is_large: bool


class Flag(BaseModel):
    is_large: bool


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose engine answers by a script; the rest of it is real."""
    folder = tmp_path_factory.mktemp("clients")
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, TURNS)))
    config = GatewayConfig(served_model_name=("tiny",))
    tokenizer = TextTokenizer.from_folder(write_tokenizer(folder))
    with serving(
        create_app(config, FakeEngine(tokenizer, turns=ScriptFile(script)), tokenizer)
    ) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def openai_sdk(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def anthropic_sdk(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key="x", max_retries=0) as sdk:
        yield sdk


# -- openai --------------------------------------------------------------------------------------


def test_openai_creates_and_streams_responses_alike(openai_sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny", "input": "think", "reasoning": {"effort": "high"},
    }  # fmt: skip
    whole = openai_sdk.responses.create(**request)
    with openai_sdk.responses.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert whole.output_text == final.output_text == "Hello"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hel", "lo"]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "so and so"
    assert whole.usage is not None
    assert final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


def test_openai_loops_over_a_function_with_stored_responses(openai_sdk: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "w", "parameters": CITY, "strict": False}]
    with openai_sdk.responses.stream(
        model="tiny", input="weather?", tools=tools, reasoning={"effort": "low"}
    ) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("w", '{"city":"A"}')

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = openai_sdk.responses.create(
        model="tiny", previous_response_id=first.id, input=[result], tools=tools
    )

    assert second.output_text == "It is 42."
    assert openai_sdk.responses.retrieve(second.id).output_text == "It is 42."
    listed = openai_sdk.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        *["message", "reasoning", "message", "function_call", "function_call_output"]
    ]
    openai_sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        openai_sdk.responses.retrieve(second.id)


def test_openai_parses_responses(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.responses.parse(model="tiny", input="Paris", text_format=City)

    assert answer.output_parsed == City(city="Paris", is_large=True)


def test_openai_maps_errors_of_responses(openai_sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_sdk.responses.create(model="tiny", input="hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        openai_sdk.responses.create(model="gpt-9", input="hi")


# -- anthropic -----------------------------------------------------------------------------------


def test_anthropic_creates_and_streams_messages_alike(anthropic_sdk: anthropic.Anthropic) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 1500,
        "system": "Be kind",
        "messages": [{"role": "user", "content": "think"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = anthropic_sdk.messages.create(**request)
    with anthropic_sdk.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = anthropic_sdk.messages.count_tokens(
        **{name: value for name, value in request.items() if name != "max_tokens"}
    )

    assert text == "Hello"
    assert [part.to_dict() for part in final.content] == [part.to_dict() for part in whole.content]
    assert [part.type for part in whole.content] == ["thinking", "text"]
    assert whole.stop_reason == final.stop_reason == "end_turn"
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert final.usage.output_tokens == usage.output_tokens


def test_anthropic_loops_over_a_tool(anthropic_sdk: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    tools: Any = [{"name": "w", "input_schema": CITY}]
    fields: Any = {"model": "tiny", "max_tokens": 1500, "tools": tools}
    with anthropic_sdk.messages.stream(
        messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}, **fields
    ) as stream:
        first = stream.get_final_message()
    call = first.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input, first.stop_reason) == ("w", {"city": "A"}, "tool_use")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
    messages += [
        {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    second = anthropic_sdk.messages.create(messages=messages, **fields)

    assert second.content[0].type == "text"
    assert second.content[0].text == "It is 42."


def test_anthropic_maps_errors(anthropic_sdk: anthropic.Anthropic) -> None:
    hi: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        anthropic_sdk.messages.create(model="tiny", max_tokens=0, messages=hi)
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        anthropic_sdk.messages.create(model="claude", max_tokens=5, messages=hi)


@pytest.mark.ranks
def test_both_sdks_are_answered_by_a_real_engine(fast_server: str) -> None:
    with openai.OpenAI(base_url=f"{fast_server}/v1", api_key="x", max_retries=0) as sdk:
        flag = sdk.responses.parse(
            model="nano", input="Paris", text_format=Flag, temperature=0, max_output_tokens=60
        )
        whole = sdk.responses.create(model="nano", input="Hi", temperature=0, max_output_tokens=9)
    with (
        anthropic.Anthropic(base_url=fast_server, api_key="x", max_retries=0) as other_sdk,
        other_sdk.messages.stream(
            model="nano",
            max_tokens=9,
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"temperature": 0},
        ) as stream,
    ):
        text = "".join(stream.text_stream)

    assert isinstance(flag.output_parsed, Flag)
    assert whole.status == "incomplete"
    assert text == whole.output_text


# -- a checker of the published specifications ---------------------------------------------------


@pytest.mark.parametrize("form", ["openai-chat", "open-responses", "anthropic"])
def test_answers_keep_to_the_published_specification(address: str, form: str) -> None:
    """Runs llm-comply; it knows the JSON schemas of answers and events."""
    command = [sys.executable, "-c", CHECKER, "--base-url", f"{address}/v1", "--api-key", "x"]
    command += ["--model", "tiny", "--format", form, "--json", "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)

    report = json.loads(done.stdout)
    results = {result["id"]: result for result in report["results"]}
    assert len(results) >= 9
    failed = {name: r["errors"] for name, r in results.items() if r["status"] == "failed"}
    assert set(failed) == IMAGE_TESTS & set(results), failed
