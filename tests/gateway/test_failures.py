"""What a client sees when the engine refuses, fails or dies."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat, error_of, finish_reasons, stream_chat, text_of, user
from tests.scripts import scripted
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import SamplingParams
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.events import Delta, fold
from whalepod.server.gateway.generation import PromptRun, generate
from whalepod.server.gateway.metrics import Metrics
from whalepod.server.gateway.timers import RequestTimer
from whalepod.server.messages import Submit

CHAT = "/v1/chat/completions"


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def body(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"model": "tiny", "messages": [user("hi")], "stream": request.param}


def test_a_full_queue_is_429_with_retry_after(
    client: TestClient, engine: FakeEngine, body: dict[str, object]
) -> None:
    engine.rejection = RequestRejected("queue_full", "1024 requests wait")

    response = client.post(CHAT, json=body)

    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(response.headers["retry-after"]) > 0


def test_B107_a_lost_engine_is_503_without_its_own_words(
    client: TestClient, engine: FakeEngine, body: dict[str, object]
) -> None:
    engine.failure = "KeyError: 'model.layers.3'"

    error = error_of(client.post(CHAT, json=body), 503)

    assert (error["type"], error["code"]) == ("server_error", "engine_lost")
    assert "KeyError" not in error["message"]


def test_a_refusal_of_the_engine_is_400(
    client: TestClient, engine: FakeEngine, body: dict[str, object]
) -> None:
    engine.rejection = RequestRejected("too_large", "needs 9 blocks, there are 4", "messages")

    error = error_of(client.post(CHAT, json=body), 400)

    assert (error["code"], error["param"]) == ("too_large", "messages")


def test_a_failure_before_the_first_token_of_a_stream_is_plain_json(client: TestClient) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "stream": True, "test_steps": ["!raise"]}

    response = client.post(CHAT, json=scripted(body))
    assert error_of(response, 500)["message"] == "the step failed"


def test_b107_a_failure_after_the_first_token_is_one_error_line(client: TestClient) -> None:
    events = stream_chat(client, test_steps=["a", "!raise"])

    assert text_of(events) == "a"
    assert finish_reasons(events) == []
    assert events[-1]["error"]["message"] == "the step failed"
    assert events[-1]["error"]["type"] == "server_error"
    assert sum("error" in event for event in events) == 1


def test_a_failure_of_a_whole_answer_is_500(client: TestClient) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "test_steps": ["a", "!raise"]}

    assert error_of(client.post(CHAT, json=scripted(body)), 500)["code"] == "engine_error"


def test_one_failed_prompt_fails_the_request_and_stops_the_others(
    client: TestClient, engine: FakeEngine
) -> None:
    fields = {"prompt": ["a", "b", "c"], "test_steps": ["a"] * 5 + ["!raise"]}

    error_of(client.post("/v1/completions", json=scripted(fields)), 500)

    assert not engine.running


def test_a_bug_in_the_engines_answers_reaches_the_client_as_an_error(
    client: TestClient, engine: FakeEngine
) -> None:
    def broken(request: Submit, index: int) -> list[list[int]]:
        raise ZeroDivisionError("secret detail")

    engine.script = broken
    error = error_of(client.post(CHAT, json={"model": "tiny", "messages": [user("hi")]}), 500)

    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "ZeroDivisionError" not in error["message"]


def test_the_engine_is_free_after_every_way_to_end(client: TestClient, engine: FakeEngine) -> None:
    chat(client)
    stream_chat(client, stop="to")
    stream_chat(client, test_steps=["a", "!raise"])
    client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3, "stop": "to"})

    assert not engine.running


def test_closing_the_events_of_several_prompts_aborts_all(engine: FakeEngine) -> None:
    async def close_after_the_first_text() -> None:
        runs = [
            PromptRun(
                submit=Submit(
                    request_id=f"r{i}",
                    prompt_token_ids=(1, 2),
                    params=SamplingParams(max_tokens=100, ignore_eos=True),
                ),
                first_index=i,
            )
            for i in range(3)
        ]
        timer = RequestTimer(Metrics(lambda: engine.stats))
        events = generate(engine, runs, engine.tokenizer, timer)
        async for event in events:
            if isinstance(event, Delta):
                break
        assert engine.running
        await asyncio.wait_for(events.aclose(), 5)

    asyncio.run(close_after_the_first_text())

    assert not engine.running
    assert sorted(engine.aborted) == ["r0", "r1", "r2"]


def test_a_stream_that_failed_folds_to_its_error(engine: FakeEngine) -> None:
    engine.failure = "gone"

    async def run() -> None:
        submit = Submit(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4))
        timer = RequestTimer(Metrics(lambda: engine.stats))
        events = generate(engine, [PromptRun(submit=submit)], engine.tokenizer, timer)
        await fold(events)

    with pytest.raises(ApiError, match="not available"):
        asyncio.run(run())
