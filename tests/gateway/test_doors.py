"""Keys, request ids, and the routes around generation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whalepod
from tests.gateway.conftest import BOS
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat, complete, error_of, post, user
from whalepod.scheduler.stats import Stats
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer


@pytest.fixture
def guarded(engine: FakeEngine, tokenizer: TextTokenizer) -> Iterator[TestClient]:
    config = GatewayConfig(served_model_name=("tiny",), api_key=("one", "two"))
    with TestClient(create_app(config, engine, tokenizer)) as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, "Bearer three", "Bearer ", "Basic one", "one", "Bearer é"]
)
def test_without_a_key_there_is_no_answer(guarded: TestClient, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}

    response = guarded.get("/v1/models", headers=headers)

    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_key_opens(guarded: TestClient, key: str) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_keys_come_from_a_file_too(
    engine: FakeEngine, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n second \n")
    config = GatewayConfig(api_key=("flag",), api_key_file=str(file))
    client = TestClient(create_app(config, engine, tokenizer))

    for key, status in (("flag", 200), ("from-file", 200), ("second", 200), ("# ours", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("content", "fragment"),
    [(None, "cannot be read"), ("# no\n", "holds no key"), ("a b", "space")],
)
def test_a_file_without_good_keys_stops_the_start(
    engine: FakeEngine, tokenizer: TextTokenizer, tmp_path: Path, content: str | None, fragment: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)

    with pytest.raises(StartupError, match=fragment):
        create_app(GatewayConfig(api_key_file=str(file)), engine, tokenizer)
    with pytest.raises(StartupError, match="API key 1 is empty"):
        create_app(GatewayConfig(api_key=("",)), engine, tokenizer)


ORIGIN = {"Origin": "http://127.0.0.1:3000"}


def test_b103_a_page_of_an_allowed_origin_may_ask(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    """Browsers ask first, without a key; a 401 must be readable for the page, too."""
    config = GatewayConfig(api_key=("one",), cors_allow_origin=("http://127.0.0.1:3000",))
    client = TestClient(create_app(config, engine, tokenizer))
    wanted = {"Access-Control-Request-Method": "POST"}
    wanted |= {"Access-Control-Request-Headers": "authorization,content-type"}

    preflight = client.options("/v1/chat/completions", headers={**ORIGIN, **wanted})
    refused = client.get("/v1/models", headers=ORIGIN)

    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert refused.status_code == 401
    for response in (preflight, refused):
        assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    other = client.get("/v1/models", headers={"Origin": "http://evil"})
    assert "access-control-allow-origin" not in other.headers


def test_a_page_of_an_allowed_origin_may_delete_what_is_stored(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    config = GatewayConfig(cors_allow_origin=("http://127.0.0.1:3000",))
    client = TestClient(create_app(config, engine, tokenizer))
    wanted = {"Access-Control-Request-Method": "DELETE"}

    preflight = client.options("/v1/responses/resp_1", headers={**ORIGIN, **wanted})

    assert preflight.status_code == 200
    assert "DELETE" in preflight.headers["access-control-allow-methods"]


def test_other_origins_are_not_allowed_unless_asked_for(client: TestClient) -> None:
    assert "access-control-allow-origin" not in client.get("/health", headers=ORIGIN).headers


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"admin_port": 9}, "admin_key"),
        ({"admin_key": ("k",)}, "admin_port"),
        ({"admin_port": 8000, "admin_key": ("k",)}, "must differ"),
        ({"request_timeout_s": -1.0}, "request_timeout_s"),
        ({"sse_keep_alive_interval_s": 0.0}, "sse_keep_alive_interval_s"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        GatewayConfig(**fields)


def test_health_ready_version_and_docs_need_no_key(guarded: TestClient) -> None:
    for path in ("/health", "/ready", "/version", "/docs", "/openapi.json"):
        assert guarded.get(path).status_code == 200
    for path in ("/metrics", "/v1/models", "/nothing", "/health//", "/health/x"):
        assert guarded.get(path).status_code == 401


def test_request_ids_are_echoed_or_made(client: TestClient) -> None:
    assert client.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    made = {client.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    long = client.get("/health", headers={"X-Request-Id": "x" * 999}).headers["x-request-id"]
    assert long.startswith("req_")


def test_models_are_listed_and_described(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]

    assert (model["id"], model["object"]) == ("tiny", "model")
    assert model["max_model_len"] == MAX_MODEL_LEN
    assert client.get("/v1/models/tiny").json() == model


def test_every_served_name_answers_as_itself(engine: FakeEngine, tokenizer: TextTokenizer) -> None:
    config = GatewayConfig(served_model_name=("deepseek/v3", "alias"))
    client = TestClient(create_app(config, engine, tokenizer))

    for name in config.served_model_name:
        assert complete(client, model=name)["model"] == name
        assert client.get(f"/v1/models/{name}").json()["id"] == name


def test_ready_asks_the_engine_loop(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/ready").json()["status"] == "ready"
    engine.answers_pings = False
    assert "engine 0" in error_of(client.get("/ready"), 503)["message"]
    assert client.get("/health").status_code == 200


def test_ready_names_a_lost_engine(client: TestClient, engine: FakeEngine) -> None:
    engine.failure = "exit code 9"

    assert "exit code 9" in error_of(client.get("/ready"), 503)["message"]


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": whalepod.__version__}


def test_tokenize_and_detokenize(client: TestClient, engine: FakeEngine) -> None:
    answer = post(client, "/tokenize", prompt="hi 上海", return_token_strs=True)

    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert answer["token_strs"][0] == BOS
    assert post(client, "/detokenize", tokens=answer["tokens"][1:]) == {"prompt": "hi 上海"}
    bare = post(client, "/tokenize", prompt="hi 上海", add_special_tokens=False)
    assert bare["tokens"] == answer["tokens"][1:]


def test_tokenize_renders_messages_as_chat_does(client: TestClient, engine: FakeEngine) -> None:
    tokens = post(client, "/tokenize", messages=[user("hi")])["tokens"]
    chat(client, "hi")

    assert tuple(tokens) == engine.submitted[0].prompt_token_ids


def test_tokenize_takes_either_a_prompt_or_messages(client: TestClient) -> None:
    error_of(client.post("/tokenize", json={}), 400)
    error_of(client.post("/tokenize", json={"prompt": "x", "messages": [user("hi")]}), 400)
    error_of(client.post("/detokenize", json={"tokens": [10**6]}), 400)
    error_of(client.post("/detokenize", json={"tokens": [-1]}), 400)


def test_docs_load_nothing_from_another_host(client: TestClient) -> None:
    page = client.get("/docs").text

    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    for path in re.findall(r"(?:src|href)=\"([^\"]+)\"", page):
        assert client.get(f"/{path}").status_code == 200


def test_vendored_files_carry_their_licence() -> None:
    folder = Path(whalepod.__file__).parent / "server" / "gateway" / "static" / "docs"

    names = {file.name for file in folder.iterdir()}
    assert {"LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"} <= names


def test_openapi_describes_every_body(client: TestClient) -> None:
    document = client.get("/openapi.json").json()

    references = re.findall(r'"#/components/schemas/([^"]+)"', client.get("/openapi.json").text)
    assert set(references) <= set(document["components"]["schemas"])
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    assert "messages" in document["components"]["schemas"][name]["properties"]


def test_openapi_describes_every_answer(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    answers = {
        (method, path): operation["responses"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }

    assert all({"200", "500"} <= set(statuses) for statuses in answers.values())
    assert not any("422" in statuses for statuses in answers.values())
    chat = answers["post", "/v1/chat/completions"]
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "408", "413", "429", "499", "503", "504"} <= set(chat)
    assert "401" not in answers["get", "/health"]
    assert set(answers["get", "/metrics"]["200"]["content"]) == {"text/plain"}
    shapes = {
        path: statuses["500"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        for (_, path), statuses in answers.items()
    }
    assert {path for path, shape in shapes.items() if shape == "AnthropicError"} == {
        *("/v1/messages", "/v1/messages/count_tokens")
    }
    models = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert models["enum"] == [model["id"] for model in client.get("/v1/models").json()["data"]]


def metric(client: TestClient, name: str) -> float:
    (line,) = [x for x in client.get("/metrics").text.splitlines() if x.startswith(f"{name} ")]
    return float(line.split()[1])


def test_engine_statistics_are_exported(client: TestClient, engine: FakeEngine) -> None:
    engine.stats = Stats(
        num_running=3,
        num_waiting=2,
        num_blocks=10,
        num_owned_blocks=5,
        num_preemptions=1,
        prefix_cache_queries_tokens=100,
        prefix_cache_hits_tokens=64,
        prompt_tokens=7,
        generation_tokens=9,
    )

    values = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.5,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 64,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 9,
        "num_preemptions_total": 1,
    }
    assert {name: metric(client, f"whalepod_{name}") for name in values} == values


def test_b117_each_request_has_one_first_token_and_one_end(client: TestClient) -> None:
    chat(client)
    chat(client, n=2)
    chat(client, max_tokens=1)
    complete(client, ["a", "b"])

    assert metric(client, "whalepod_time_to_first_token_seconds_count") == 4
    assert metric(client, "whalepod_e2e_request_latency_seconds_count") == 4
    assert metric(client, "whalepod_inter_token_latency_seconds_count") > 4
    text = client.get("/metrics").text
    assert 'whalepod_request_success_total{finished_reason="stop"} 3.0' in text
    assert 'whalepod_request_success_total{finished_reason="length"} 3.0' in text


def test_b086_metrics_count_guesses_by_position_under_vllms_names(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.stats = Stats(
        num_drafts=10, num_draft_tokens=30, num_accepted_tokens=14,
        num_accepted_by_position=(9, 4, 1), num_speculative_tokens=3,
    )  # fmt: skip
    text = client.get("/metrics").text

    for line in (
        "spec_decode_num_drafts_total 10.0",
        "spec_decode_num_draft_tokens_total 30.0",
        "spec_decode_num_accepted_tokens_total 14.0",
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0',
        'spec_decode_num_accepted_tokens_per_pos_total{position="2"} 1.0',
        "num_speculative_tokens 3.0",
    ):
        assert f"whalepod_{line}\n" in text


def test_error_answers_are_counted_by_code(client: TestClient) -> None:
    chat_body = {"model": "nope", "messages": [user("hi")]}
    client.post("/v1/chat/completions", json=chat_body)

    text = client.get("/metrics").text
    assert 'whalepod_request_errors_total{code="model_not_found"} 1.0' in text


def test_default_params_fill_in_for_the_client(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    app = create_app(GatewayConfig(), engine, tokenizer, default_params={"temperature": 0.6})
    client = TestClient(app)
    client.post("/v1/completions", json={"prompt": "a"})
    client.post("/v1/completions", json={"prompt": "a", "temperature": 0})

    with pytest.raises(StartupError, match="top_p"):
        create_app(GatewayConfig(), engine, tokenizer, default_params={"top_p": 7})
    assert [submit.params.temperature for submit in engine.submitted] == [0.6, 0.0]
