"""The load generator end to end, against a server that speaks just enough OpenAI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.fake_openai_server import FakeServer
from whalepod.tools import cli
from whalepod.tools.bench.http import Endpoint, RequestFailed, _Response


def bench(
    server: FakeServer, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0
) -> list[dict[str, Any]]:
    assert cli.main(["bench", "serve", "--url", server.url, "--json", *flags]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_closed_loop_sends_what_was_asked_and_counts_it(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--num-requests 6 --concurrency 2 --input-len 100 --output-len 5"
    (result,) = bench(fake_server, capsys, *flags.split())
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (6, 0, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (600, 30)
    assert result["max_concurrent_requests"] <= 2
    assert result["mean_ttft_ms"] > 0
    trial, *sent = fake_server.bodies
    assert trial["max_tokens"] == 1
    assert all(len(body["prompt"]) == 100 for body in sent)
    assert all(body["max_tokens"] == 5 and body["ignore_eos"] for body in sent)
    assert len({tuple(body["prompt"]) for body in sent}) == 6


def test_a_list_of_concurrencies_makes_a_run_each_with_fresh_prompts(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.jsonl"
    flags = "--num-requests 4 --concurrency 1,4 --input-len 64 --output-len 2"
    results = bench(fake_server, capsys, *flags.split(), "--out", str(out))
    assert [result["max_concurrency"] for result in results] == [1, 4]
    assert [result["cached_tokens"] for result in results] == [0, 0]
    assert results[0]["config_hash"] != results[1]["config_hash"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == results


def test_agents_hit_the_prefix_that_they_send_again(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--profile agent --num-requests 8 --turns 4 --concurrency 1 --pause-ms 1"
    lengths = "--input-len 128 --turn-len 64 --output-len 2"
    (result,) = bench(fake_server, capsys, *flags.split(), *lengths.split())
    # all blocks of each prompt but its own new ones; the second session has the system prompt
    assert result["ttft_ms_by_cache"]["cold"]["count"] == 1
    assert result["ttft_ms_by_cache"]["warm"]["count"] == 7
    assert result["prefix_hit_ratio"] > 0.6
    assert result["resent_hit_ratio"] == 1.0


def test_a_recorded_trace_replays_the_same_prompts_in_the_same_sessions(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    flags = "--profile chat --num-requests 6 --turns 3 --concurrency 2 --pause-ms 1 --output-len 2"
    bench(fake_server, capsys, *flags.split(), "--record-trace", trace)
    recorded = {tuple(body["prompt"]) for body in fake_server.bodies}
    fake_server.bodies.clear()
    (result,) = bench(fake_server, capsys, "--trace", trace, "--time-scale", "0")
    assert (result["completed"], result["max_concurrency"]) == (6, None)
    assert {tuple(body["prompt"]) for body in fake_server.bodies} == recorded


def test_an_open_loop_arrives_at_its_rate_whatever_the_server_does(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.step_s = 0.1
    flags = "--num-requests 20 --request-rate 100 --output-len 4 --input-len 8"
    (result,) = bench(fake_server, capsys, *flags.split())
    assert result["max_concurrent_requests"] > 8  # a closed loop's default is 8
    assert result["request_rate"] == 100


def test_failures_are_counted_by_reason_and_make_the_exit_code_1(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.fail_after = 3
    flags = "--num-requests 5 --concurrency 1 --output-len 2"
    (result,) = bench(fake_server, capsys, *flags.split(), code=1)
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["errors"] == {"HTTP 503: the engine is lost": 3}


def test_a_server_that_refuses_the_trial_stops_the_run_with_its_words(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.fail_after = 0
    assert cli.main(["bench", "serve", "--url", fake_server.url]) == 1
    assert "a trial request failed: HTTP 503: the engine is lost" in capsys.readouterr().err


def test_the_table_for_people_shows_rates_latencies_and_breakdowns(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--num-requests 4 --concurrency 4 --output-len 3 --slo ttft:10000,tpot:10000"
    assert cli.main(["bench", "serve", "--url", fake_server.url, *flags.split()]) == 0
    out = capsys.readouterr().out
    for fragment in ("4 completed, 0 failed", "time to first token", "goodput", "output tok/s"):
        assert fragment in out


def test_an_answer_slower_than_the_deadline_fails(fake_server: FakeServer) -> None:
    fake_server.step_s = 30.0
    endpoint = Endpoint(fake_server.url, None)
    body = {"prompt": [1], "max_tokens": 5}
    with pytest.raises(RequestFailed, match=r"no complete answer within 0.2 s"):
        asyncio.run(endpoint.complete(body, timeout_s=0.2))
    assert fake_server.left_early.wait(timeout=10)


STREAM = (
    b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\ndata: {"choices":[{"text":"a"}]}\r\n\r\n'
    b': ping\n\ndata: {"choices": [{"text": "\\"usage\\": {"}], "usage": null}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, '
    b'"prompt_tokens_details": {"cached_tokens": 1}}}\n\ndata: [DONE]\n\n'
)
STREAM = STREAM % len(STREAM.partition(b"\r\n\r\n")[2])


def test_an_answer_is_read_alike_wherever_the_network_cuts_it() -> None:
    for cut in range(1, len(STREAM)):
        response = _Response()
        response.feed(STREAM[:cut], 1.0)
        response.feed(STREAM[cut:], 2.0)
        answer = response.result()
        assert len(answer.chunk_times_s) == 2, cut
        assert (answer.usage["completion_tokens"], answer.cached_tokens) == (2, 1), cut


def test_a_stream_that_is_cut_short_is_a_failure() -> None:
    response = _Response()
    response.feed(STREAM[:-80], 1.0)
    with pytest.raises(RequestFailed, match="before the end of its answer"):
        response.result()


def test_an_error_event_is_a_failure_with_its_message() -> None:
    event = b'data: {"error": {"message": "lost"}}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(event)
    with pytest.raises(RequestFailed, match="the stream failed: lost"):
        _Response().feed(head + event, 1.0)
