"""`whalepod serve --ep R` as clients and operators see it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.end_to_end.asking import answers_of_one, ask_all, assert_equal_answers, mixed_bodies
from tests.end_to_end.conftest import serve

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks(nano_folder: Path) -> Iterator[str]:
    with serve(
        str(nano_folder), "--ep", "2", "--dtype", "fp32", "--batch-invariant",
        "--max-num-seqs", "8", "--kv-cache-memory", "16M",
    ) as address:  # fmt: skip
        yield address


@pytest.mark.parametrize(
    ("model", "num_ranks", "count"),
    [
        ("nano", 4, 24),
        ("tiny", 2, 12),
        pytest.param("nano", 2, 64, marks=pytest.mark.long),
        pytest.param("nano", 4, 64, marks=pytest.mark.long),
        pytest.param("tiny", 2, 64, marks=pytest.mark.long),
    ],
)
def test_ranks_answer_over_http_with_the_bits_of_one_rank(
    nano_folder: Path, model: str, num_ranks: int, count: int
) -> None:
    """Greedy and sampled, prompts in chunks, shared prefixes, drafts, clients that leave."""
    folder = str(nano_folder) if model == "nano" else model
    bodies = mixed_bodies(model, count)
    expected = answers_of_one(folder, bodies)
    with serve(
        folder, "--ep", str(num_ranks), "--dtype", "fp32", "--batch-invariant",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256",
        "--kv-cache-memory", "16M",
    ) as address:  # fmt: skip
        assert_equal_answers(bodies, expected, asyncio.run(ask_all(address, bodies)))
        board = httpx2.get(f"{address}/cluster").json()
        assert [rank["rank"] for rank in board["ranks"]] == list(range(num_ranks))
        assert all(rank["generation_tokens"] for rank in board["ranks"])
        staying = [body["max_tokens"] for body in bodies if "leaves" not in body]
        assert board["stats"]["generation_tokens"] >= sum(staying)
        assert (
            'whalepod_rank_num_requests_running{rank="1"} 0.0'
            in httpx2.get(f"{address}/metrics").text
        )


def test_B115_one_request_does_not_wait_for_ranks_that_have_none(two_ranks: str) -> None:
    """The idle rank joins each dispatch and combine with no rows; afterwards both can be busy."""
    body: dict[str, Any] = {
        "model": "nano",
        "prompt": [5] * 70,
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 0,
    }
    body |= {"temperature": 0.0, "return_token_ids": True}
    before = httpx2.get(f"{two_ranks}/cluster").json()["ranks"]

    ((token_ids, _),) = asyncio.run(ask_all(two_ranks, [body]))

    after = httpx2.get(f"{two_ranks}/cluster").json()["ranks"]
    tokens = [
        a["generation_tokens"] - b["generation_tokens"] for a, b in zip(after, before, strict=True)
    ]
    assert sorted(tokens) == [0, 8]
    assert [ids for ids, _ in asyncio.run(ask_all(two_ranks, [body] * 4))] == [token_ids] * 4
