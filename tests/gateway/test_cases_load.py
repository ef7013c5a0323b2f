"""Rows of the log of public reports about requests that meet, leave or wait: real sockets."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from tests.gateway.core_upstream import CoreUpstream
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.real_gateway import OFF, real_gateway
from tests.gateway.serving import DEADLINE_S, serving, wait_until
from tests.gateway.wire import user
from tests.scripts import scripted
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

CHAT = "/v1/chat/completions"


def ask(port: int, content: str = "hi", headers: Any = None, **fields: Any) -> dict[str, Any]:
    body = scripted({"model": "tiny", "messages": [user(content)], **fields})
    url = f"http://127.0.0.1:{port}{CHAT}"
    response = httpx2.post(url, json=body, headers=headers, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


def hang_up(
    port: int, num_events: int, until: Callable[[], object] = lambda: True, **fields: Any
) -> None:
    """Send a request, read this many events of its stream, wait for a condition, and leave."""
    body = orjson.dumps({"model": "tiny", "messages": [user("hi")], **fields})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(head.encode() + body)
        received = b""
        while received.count(b"data: ") < num_events:
            received += client.recv(4096)
        wait_until(until)


def scrape(port: int) -> str:
    url = f"http://127.0.0.1:{port}/metrics"
    return httpx2.get(url, timeout=DEADLINE_S).text  # a connection of its own


def total(text: str, name: str) -> float:
    """Sum a metric over its labels."""
    values = re.findall(rf"^whalepod_{name}(?:{{.*}})? (.*)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


def ids_where(upstream: CoreUpstream, holds: Callable[[Any], bool]) -> set[str]:
    return {request_id for request_id, submit in upstream.submitted.items() if holds(submit)}


def test_B093_the_next_turn_of_a_client_that_left_is_whole(nano: Path) -> None:
    with real_gateway(nano) as gateway, serving(gateway.app) as port:
        stats = gateway.upstream.core
        for turn in range(3):
            hang_up(port, 2, stream=True, max_tokens=400, ignore_eos=True)
            text = f"again {turn} " * 30
            usage = ask(port, text, max_tokens=1)["usage"]

            expected = httpx2.post(
                f"http://127.0.0.1:{port}/tokenize",
                json={"model": "tiny", "messages": [user(text)]},
            ).json()
            assert usage["prompt_tokens"] == len(expected["tokens"]) > 60
        wait_until(lambda: not stats.has_work)
        assert stats.stats.num_owned_blocks == 0


def test_B097_live_requests_with_one_id_do_not_mix(nano: Path) -> None:
    with real_gateway(nano) as gateway, serving(gateway.app) as port:
        texts = [f"answer {i} " * 10 for i in range(4)]

        def run(text: str) -> str:
            answer = ask(port, headers={"X-Request-Id": "same"}, test_steps=text.split(" "))
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(run, texts)) == [text.replace(" ", "") for text in texts]
        assert len(gateway.upstream.submitted) == 4


def test_B099_others_go_on_while_a_long_prompt_is_computed(nano: Path) -> None:
    limits = {"max_num_batched_tokens": 32, "enable_prefix_caching": False}
    with (
        real_gateway(nano, speculation=OFF, **limits) as gateway,
        serving(gateway.app) as port,
        ThreadPoolExecutor(1) as pool,
    ):
        upstream = gateway.upstream
        short = pool.submit(ask, port, "hi", max_tokens=120, ignore_eos=True)
        wait_until(lambda: upstream.history)
        num_tokens = ask(port, "x " * 150, max_tokens=1)["usage"]["prompt_tokens"]
        short.result(DEADLINE_S)

    (long_id,) = ids_where(upstream, lambda s: len(s.prompt_token_ids) == num_tokens)
    (end,) = [
        k for k, (_, output) in enumerate(upstream.history)
        if output.request_id == long_id and output.token_ids
    ]  # fmt: skip
    steps = [step for step, output in upstream.history[:end] if output.request_id != long_id]
    num_chunks = num_tokens // 32
    assert num_chunks > 8
    assert steps == list(range(steps[0], steps[0] + len(steps))), "a token of the short one a step"
    assert len(steps) > num_chunks


def test_B109_a_request_of_higher_priority_displaces_lower_ones(nano: Path) -> None:
    with (
        real_gateway(nano, max_num_seqs=2, speculation=OFF) as gateway,
        serving(gateway.app) as port,
        ThreadPoolExecutor(2) as pool,
    ):
        upstream = gateway.upstream
        fields = {"max_tokens": 80, "ignore_eos": True, "priority": 9}
        low: list[Future[Any]] = [pool.submit(ask, port, **fields) for _ in range(2)]
        wait_until(lambda: len({output.request_id for _, output in upstream.history}) >= 2)
        ask(port, max_tokens=1, priority=0)
        assert [f.result(DEADLINE_S)["usage"]["completion_tokens"] for f in low] == [80] * 2

    (high,) = ids_where(upstream, lambda s: s.priority == 0)
    ended = [output.request_id for _, output in upstream.history if output.finish_reason]
    assert ended[0] == high


def test_B117_first_tokens_are_those_of_requests_that_ended_or_left_after_them(
    engine: FakeEngine, tokenizer: TextTokenizer
) -> None:
    config = GatewayConfig()
    with serving(create_app(config, engine, tokenizer)) as port:
        for _ in range(3):
            ask(port)
        engine.step_delay_s = 0.01
        hang_up(port, 3, stream=True, ignore_eos=True)
        wait_until(lambda: len(engine.aborted) == 1)
        engine.gate = asyncio.Event()  # never set
        hang_up(port, 0, until=lambda: len(engine.submitted) == 5)
        wait_until(lambda: len(engine.aborted) == 2 and not engine.running)
        wait_until(lambda: total(scrape(port), "request_success_total") == 5)
        text = scrape(port)

    assert 'whalepod_request_success_total{finished_reason="abort"} 2.0' in text
    assert total(text, "time_to_first_token_seconds_count") == 4
    assert total(text, "time_to_first_token_seconds_sum") > 0
    assert total(text, "e2e_request_latency_seconds_count") == 3


@pytest.mark.parametrize("num_scrapes", [4])
def test_B119_every_scrape_counts_all_requests(
    engine: FakeEngine, tokenizer: TextTokenizer, num_scrapes: int
) -> None:
    with serving(create_app(GatewayConfig(), engine, tokenizer)) as port:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ask(port, max_tokens=1), range(10)))
        texts = [scrape(port) for _ in range(num_scrapes)]

    for text in texts:
        assert total(text, "request_success_total") == 10
        series = re.findall(r"^(whalepod_\S+) ", text, re.MULTILINE)
        assert len(series) == len(set(series)), "no series comes twice"


def test_item_69_tokens_are_counted_once_for_the_engine(nano: Path) -> None:
    """The counters are the engine's, whatever the number of answers, streams and ranks."""
    with real_gateway(nano, speculation=OFF) as gateway, serving(gateway.app) as port:
        fields = {"max_tokens": 5, "ignore_eos": True}
        usages = [ask(port, text, **fields, n=n)["usage"] for text, n in (("a", 1), ("b c d", 3))]
        text = scrape(port)

    expected = sum(usage["completion_tokens"] for usage in usages)
    assert expected == 20
    for name in ("generation_tokens_total", "prompt_tokens_total"):
        lines = re.findall(rf"^whalepod_{name}.*$", text, re.MULTILINE)
        assert len(lines) == 1
    assert total(text, "generation_tokens_total") == expected
    assert total(text, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
