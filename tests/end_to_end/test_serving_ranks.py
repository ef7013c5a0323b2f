"""`whalepod serve --ep 2` as clients and operators see it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.end_to_end.conftest import serve
from tests.end_to_end.test_serving import PATIENCE_S

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


async def ask_all(address: str, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:

        async def ask(body: dict[str, Any]) -> Any:
            response = await client.post(f"{address}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        return await asyncio.gather(*(ask(body) for body in bodies))


@pytest.fixture(scope="module")
def two_ranks(nano_folder: Path) -> Iterator[str]:
    with serve(
        str(nano_folder), "--ep", "2", "--dtype", "fp32", "--batch-invariant",
        "--max-num-seqs", "8", "--kv-cache-memory", "16M",
    ) as address:  # fmt: skip
        yield address


def test_two_ranks_answer_over_http_with_the_bits_of_one(
    invariant_server: str, two_ranks: str
) -> None:
    rng = random.Random(8)
    bodies: list[dict[str, Any]] = [
        {
            "model": "nano",
            "prompt": [rng.randrange(10, 500) for _ in range(rng.choice((3, 64, 90)))],
            "max_tokens": 8,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": i}),
        }
        for i in range(16)
    ]
    expected = asyncio.run(ask_all(invariant_server, bodies))
    assert asyncio.run(ask_all(two_ranks, bodies)) == expected
    board = httpx2.get(f"{two_ranks}/cluster").json()
    assert [rank["rank"] for rank in board["ranks"]] == [0, 1]
    assert all(rank["generation_tokens"] for rank in board["ranks"])
    assert board["stats"]["generation_tokens"] == 16 * 8
    metrics = httpx2.get(f"{two_ranks}/metrics").text
    assert 'whalepod_rank_num_requests_running{rank="1"} 0.0' in metrics


def test_B115_one_request_does_not_wait_for_ranks_that_have_none(two_ranks: str) -> None:
    """The idle rank joins each dispatch and combine with no rows; afterwards both can be busy."""
    body = {"model": "nano", "prompt": [5] * 70, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    body |= {"temperature": 0.0, "return_token_ids": True}
    before = httpx2.get(f"{two_ranks}/cluster").json()["ranks"]

    ((token_ids, _),) = asyncio.run(ask_all(two_ranks, [body]))

    after = httpx2.get(f"{two_ranks}/cluster").json()["ranks"]
    tokens = [
        a["generation_tokens"] - b["generation_tokens"] for a, b in zip(after, before, strict=True)
    ]
    assert sorted(tokens) == [0, 8]
    assert [ids for ids, _ in asyncio.run(ask_all(two_ranks, [body] * 4))] == [token_ids] * 4
