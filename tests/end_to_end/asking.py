"""Mixed requests over HTTP, some of whose clients leave; also a program, for other namespaces.

`python -m tests.end_to_end.asking ADDRESS` reads a list of bodies and prints the answers, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.equality import assert_bit_equal
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.local import Engine

PATIENCE_S = 600.0
"""For answers that must come; two shared cores may be slow."""
Answer = tuple[list[int], list[float]]
"""Ids and logprobs."""


def mixed_bodies(model: str, count: int, *, most_id: int = 500) -> list[dict[str, Any]]:
    """Return greedy and sampled requests of many lengths; some longer than a chunk, some alike in
    their beginnings. Clients of those with `leaves` hang up after their first tokens."""
    rng = random.Random(8)
    shared = [rng.randrange(10, most_id) for _ in range(70)]
    bodies = []
    for i in range(count):
        own = [rng.randrange(10, most_id) for _ in range(rng.choice((3, 30, 64, 90)))]
        body: dict[str, Any] = {
            "model": model,
            "prompt": shared[: rng.choice((0, 0, 64, 70))] + own,
            "max_tokens": rng.choice((1, 8, 12)),
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": i}),
        }
        if i % 8 == 5:
            body |= {"stream": True, "max_tokens": 60, "leaves": True}
        bodies.append(body)
    return bodies


async def ask_all(address: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Return the answers; of clients that leave, what they had read by then."""
    limits = httpx2.Limits(max_connections=len(bodies))
    async with httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        await _until_ready(client, address)
        return await asyncio.gather(*(_ask(client, address, dict(body)) for body in bodies))


async def _until_ready(client: httpx2.AsyncClient, address: str) -> None:
    """Wait until the server answers: it prints its address a moment before it listens."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(httpx2.TransportError):
                if (await client.get(f"{address}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def _ask(client: httpx2.AsyncClient, address: str, body: dict[str, Any]) -> Answer:
    url = f"{address}/v1/completions"
    if body.pop("leaves", False):
        return await _ask_and_leave(client, url, body)
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def _ask_and_leave(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    async with client.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                if choice.get("token_ids"):
                    return choice["token_ids"], choice["logprobs"]["token_logprobs"]
    raise AssertionError("the stream ended before its first token")


def answers_of_one(folder: Path | str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Return what one engine with all experts answers, one request after the other."""
    with Engine(
        str(folder), dtype="fp32", batch_invariant=True, num_threads=1, max_model_len=256,
        enable_prefix_caching=False, speculation="off",
    ) as engine:  # fmt: skip
        return [_generate(engine, body) for body in bodies]


def _generate(engine: Engine, body: dict[str, Any]) -> Answer:
    settings = {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
    params = SamplingParams(max_tokens=body["max_tokens"], logprobs=0, ignore_eos=True, **settings)
    (one,) = engine.generate([body["prompt"]], params)
    return list(one.token_ids), [p.logprob for p in one.logprobs]


def assert_equal_answers(
    bodies: list[dict[str, Any]], expected: list[Answer], found: list[Answer]
) -> None:
    """Compare bit by bit; of clients that left, as far as they read."""
    for i, (body, wanted, one) in enumerate(zip(bodies, expected, found, strict=True)):
        count = len(one[0]) if body.get("leaves") else body["max_tokens"]
        assert count > 0, body
        assert_bit_equal(wanted[0][:count], wanted[1][:count], *one, f"request {i}")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask_all(sys.argv[1], json.load(sys.stdin)))))
