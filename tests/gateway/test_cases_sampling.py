"""Rows of the log of public reports about sampling, drafts and the prefix cache: a real engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.real_gateway import MAX_MODEL_LEN, OFF, real_gateway
from tests.gateway.serving import DEADLINE_S, TestClient, serving
from tests.gateway.wire import chat, complete, error_of, user
from whalepod.mtp.config import SpeculationConfig

DRAFTS = SpeculationConfig(speculation="fixed", num_speculative_tokens=4)


@pytest.fixture(scope="module")
def drafting(nano: Path) -> Iterator[TestClient]:
    with real_gateway(nano, speculation=DRAFTS) as gateway, gateway.client() as client:
        yield client


@pytest.fixture(scope="module")
def plain(nano: Path) -> Iterator[TestClient]:
    """No drafts and no prefix cache."""
    fields = {"speculation": OFF, "enable_prefix_caching": False}
    with real_gateway(nano, **fields) as gateway, gateway.client() as client:
        yield client


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def logprobs_in(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("temperature", "bias"), [(0, {"9": 100}), (1, {"9": 100, "10": 100, "11": 98})]
)
def test_B079_drafts_change_no_logprob(
    drafting: TestClient, plain: TestClient, temperature: float, bias: dict[str, float]
) -> None:
    """The bias makes a random model repeat itself, so that guesses come true."""
    fields = {"logprobs": True, "temperature": temperature, "seed": 3, "max_tokens": 24}
    fields |= {"ignore_eos": True, "logit_bias": bias}

    with_drafts, without = chat(drafting, **fields), chat(plain, **fields)

    assert with_drafts["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert content(with_drafts) == content(without)
    assert logprobs_in(with_drafts) == pytest.approx(logprobs_in(without), abs=1e-3)
    assert max(logprobs_in(with_drafts)) < 0, "no token of a random model is certain"


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_B081_penalties_hold_for_drafts(
    drafting: TestClient, plain: TestClient, penalty: str
) -> None:
    fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    texts = []
    for value in (-2, 0, 2):
        texts.append(content(chat(drafting, "hello hello", **fields, **{penalty: value})))
        assert texts[-1] == content(chat(plain, "hello hello", **fields, **{penalty: value}))

    assert texts[0] != texts[2]


@pytest.mark.parametrize("value", [0, -1, 101])
def test_B083_a_repetition_penalty_that_divides_by_zero_is_refused(
    client: TestClient, engine: FakeEngine, value: float
) -> None:
    for stream in (False, True):
        body = {
            "model": "tiny",
            "messages": [user("hi")],
            "repetition_penalty": value,
            "stream": stream,
        }
        error = error_of(client.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == "repetition_penalty"
        assert "(0, 100]" in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6])
def test_B085_drafts_end_with_the_context(drafting: TestClient, room: int) -> None:
    prompt = [5] * (MAX_MODEL_LEN - room)

    answer = complete(drafting, prompt, max_tokens=room + 3, ignore_eos=True)

    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"
    assert content(chat(drafting, max_tokens=4, ignore_eos=True))


def test_B087_a_cache_hit_changes_no_answer(drafting: TestClient, plain: TestClient) -> None:
    """Chunks differ between the two, so bits may: by far less than two tokens ever differ."""
    fields = {"temperature": 0, "max_tokens": 16, "logprobs": True, "ignore_eos": True}
    prompt = "tell me more " * 20

    cold, warm, again = (chat(drafting, prompt, **fields) for _ in range(3))
    uncached = chat(plain, prompt, **fields)

    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for answer in (warm, again):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert content(answer) == content(cold) == content(uncached)
        assert logprobs_in(answer) == pytest.approx(logprobs_in(uncached), abs=1e-3)


def test_B089_prompt_logprobs_do_not_depend_on_the_order_of_requests(
    drafting: TestClient, plain: TestClient
) -> None:
    prompts = ["aa bb cc dd " * 12, "aa bb cc ee " * 12, "aa bb cc dd " * 9]

    def scored(client: TestClient, prompt: str) -> list[float]:
        answer = complete(client, prompt, echo=True, logprobs=1, max_tokens=0)
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert values[0] is None
        assert len(values) == answer["usage"]["prompt_tokens"]
        return list(values[1:])

    expected = {prompt: scored(plain, prompt) for prompt in prompts}
    for order in itertools.permutations(prompts):
        for prompt in order:
            assert scored(drafting, prompt) == pytest.approx(expected[prompt], abs=1e-3)


def test_B111_a_seed_repeats_its_answer_whoever_is_in_the_batch(nano: Path) -> None:
    fields = {"temperature": 1, "max_tokens": 16, "ignore_eos": True}
    with real_gateway(nano, speculation=DRAFTS) as gateway, serving(gateway.app) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        def ask(seed: int | None) -> str:
            body = {"model": "tiny", "messages": [user("hi")], "seed": seed, **fields}
            return content(httpx2.post(url, json=body, timeout=DEADLINE_S).json())

        with ThreadPoolExecutor(4) as pool:
            answers = [list(pool.map(ask, [42, None, 42, None])) for _ in range(2)]

    seeded = {text for four in answers for text in four[::2]}
    others = {text for four in answers for text in four[1::2]}
    assert len(seeded) == 1
    assert len(others) == 4
    assert not seeded & others
