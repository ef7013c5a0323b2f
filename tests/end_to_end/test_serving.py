"""What clients see of a real server: answers, caches, hang-ups."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.equality import ToleratedDifferences, assert_bit_equal
from tests.gateway.serving import wait_until
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.local import Engine

pytestmark = pytest.mark.ranks
NUM_LEAVING_CLIENTS = 200
PATIENCE_S = 600.0
"""For answers that must come; two shared cores may be slow."""


@pytest.fixture
def sdk(fast_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fast_server}/v1", api_key="x", max_retries=0) as sdk:
        yield sdk


def gauges(address: str) -> dict[str, float]:
    """Read the metrics without labels."""
    text = httpx2.get(f"{address}/metrics").text
    rows = re.findall(r"^whalepod_(\w+)(?:\{[^}]*\})? ([\d.e+-]+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def complete(address: str, **fields: Any) -> dict[str, Any]:
    response = httpx2.post(
        f"{address}/v1/completions", json={"model": "nano", **fields}, timeout=PATIENCE_S
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_openai_sdk_chats_streamed_and_whole_alike(sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "nano",
        "messages": [{"role": "user", "content": "Good morning"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = sdk.chat.completions.create(**request)
    chunks = list(
        sdk.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_answers_over_http_have_the_bits_of_the_engine_alone(
    invariant_server: str, nano_folder: Path
) -> None:
    """64 mixed requests at once against each one by itself in another process (rule A)."""
    rng = random.Random(5)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.choice((3, 64, 90)))] for _ in range(64)]
    settings = [
        {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": i}
        for i in range(64)
    ]

    async def ask_all() -> list[dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:

            async def ask(i: int) -> dict[str, Any]:
                body = {"prompt": prompts[i], "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
                body |= {"model": "nano", "return_token_ids": True, **settings[i]}
                response = await client.post(f"{invariant_server}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                choice: dict[str, Any] = response.json()["choices"][0]
                return choice

            return await asyncio.gather(*(ask(i) for i in range(64)))

    answers = asyncio.run(ask_all())
    with Engine(
        str(nano_folder),
        dtype="fp32",
        batch_invariant=True,
        enable_prefix_caching=False,
        num_threads=1,
    ) as engine:
        for i, answer in enumerate(answers):
            params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True, **settings[i])
            (alone,) = engine.generate([prompts[i]], params)
            assert_bit_equal(
                alone.token_ids,
                [p.logprob for p in alone.logprobs],
                answer["token_ids"],
                answer["logprobs"]["token_logprobs"],
                f"request {i}",
            )


def test_a_shared_prefix_is_computed_once(fast_server: str) -> None:
    rng = random.Random(7)
    shared = [rng.randrange(10, 500) for _ in range(2000)]
    cold = complete(fast_server, prompt=[*shared, 11, 12], max_tokens=1)
    warm = complete(fast_server, prompt=[*shared, 13, 14], max_tokens=1)

    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # inside a block the layer that drafts needs the last shared token's hidden state: one is lost
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 1999


def test_clients_that_leave_leave_nothing_behind(fast_server: str) -> None:
    """200 requests, half of their clients gone at random moments: no block stays owned."""
    rng = random.Random(11)
    before = gauges(fast_server)["num_preemptions_total"]

    async def visit(client: httpx2.AsyncClient, i: int, gate: asyncio.Semaphore) -> None:
        prompt = [rng.randrange(10, 500) for _ in range(rng.randrange(1, 200))]
        body = {"model": "nano", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        body |= {"stream": i % 4 < 2, "n": 1 + i % 2}
        patience_s = rng.uniform(0.0, 1.5) if i % 2 else PATIENCE_S
        async with gate:
            try:
                async with asyncio.timeout(patience_s):
                    response = await client.post(f"{fast_server}/v1/completions", json=body)
                    assert response.status_code == 200, response.text
            except TimeoutError:
                assert i % 2, "a patient client got no answer"

    async def visit_all() -> None:
        limits = httpx2.Limits(max_connections=64)
        async with httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            gate = asyncio.Semaphore(48)
            await asyncio.gather(*(visit(client, i, gate) for i in range(NUM_LEAVING_CLIENTS)))

    asyncio.run(visit_all())

    def is_idle() -> bool:
        now = gauges(fast_server)
        return now["num_requests_running"] == now["num_requests_waiting"] == 0

    wait_until(is_idle)
    assert gauges(fast_server)["kv_cache_usage_perc"] == 0
    assert gauges(fast_server)["num_preemptions_total"] >= before
    assert httpx2.get(f"{fast_server}/ready").status_code == 200


def test_greedy_answers_agree_with_transformers(fast_server: str, nano_folder: Path) -> None:
    """Rule B: the fast kernels against transformers, up to what fp64 cannot decide either."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    from tests.equality import Fp64Oracle

    model = DeepseekV3ForCausalLM.from_pretrained(nano_folder, dtype=torch.float32).eval()
    differences = ToleratedDifferences(oracle=Fp64Oracle(model))
    rng = random.Random(3)
    for length in (1, 5, 63, 64, 65, 200):
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.long),
                max_new_tokens=16, min_new_tokens=16, do_sample=False,
            )  # fmt: skip
        answer = complete(
            fast_server, prompt=prompt, max_tokens=16, temperature=0, min_tokens=16,
            return_token_ids=True,
        )  # fmt: skip
        differences.compare(prompt, ids[0, length:].tolist(), answer["choices"][0]["token_ids"])
    differences.finish()
