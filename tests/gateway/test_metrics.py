"""What the histograms observe of one request, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.test_doors import metric
from tests.gateway.wire import chat, complete
from whalepod.scheduler.stats import Stats
from whalepod.server.gateway.metrics import Metrics
from whalepod.server.gateway.timers import INTERVAL_S, RequestTimer, measuring_lag


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def observed(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Return count and sum of each histogram, without prefix and unit."""
    values: dict[str, dict[str, float]] = {}
    for family in metrics.registry.collect():
        if family.type == "histogram":
            for sample in family.samples:
                name = family.name.removeprefix("whalepod_").removesuffix("_seconds")
                values.setdefault(name, {})[sample.name.rpartition("_")[2]] = sample.value
    return {name: (parts["count"], round(parts["sum"], 6)) for name, parts in values.items()}


def test_a_stop_string_at_the_limit_counts_as_a_stop(client: TestClient) -> None:
    answer = chat(client, stop="b", max_tokens=2, test_steps=["a", "b", "c"])

    assert answer["choices"][0]["finish_reason"] == "stop"
    counted = 'whalepod_request_success_total{finished_reason="stop"}'
    assert metric(client, counted) == 1


def test_the_phases_of_a_request_add_up() -> None:
    """2 s to read it, 3 s of queue, 5 s of prefill, then 4 tokens more within 8 s."""
    metrics, clock = Metrics(Stats), Clock()
    request = RequestTimer(metrics, clock)
    clock.now_s += 2
    prompt = request.prompt(num_tokens=64)
    clock.now_s += 3 + 4
    prompt.output(0, 0, queue_s=3)  # a chunk of the prompt
    clock.now_s += 1
    request.token()
    prompt.output(0, 1, queue_s=3)
    for num_tokens in (1, 3):
        clock.now_s += 4
        request.token()
        prompt.output(0, num_tokens, queue_s=3)
    prompt.finished(0, "stop")
    request.ended(None)

    assert observed(metrics) == {
        "time_to_first_token": (1, 10),
        "inter_token_latency": (2, 8),
        "request_time_per_output_token": (1, 2),
        "e2e_request_latency": (1, 18),
        "request_queue_time": (1, 3),
        "request_prefill_time": (1, 5),
        "request_decode_time": (1, 8),
        "request_inference_time": (1, 13),
        "request_prompt_tokens": (1, 64),
        "request_generation_tokens": (1, 5),
        "event_loop_lag": (0, 0),
    }


@pytest.mark.parametrize("end", ["error", "abort"])
def test_a_request_that_fails_has_no_latency(end: str) -> None:
    metrics, clock = Metrics(Stats), Clock()
    request = RequestTimer(metrics, clock)
    request.prompt(num_tokens=1).output(0, 1, queue_s=0)
    request.ended(end)

    counts = {name: count for name, (count, _) in observed(metrics).items() if count}
    assert counts == {
        "request_queue_time": 1,
        "request_prefill_time": 1,
        "request_prompt_tokens": 1,
    }


def test_each_prompt_and_each_choice_is_observed(client: TestClient, engine: FakeEngine) -> None:
    chat(client, n=2)
    complete(client, ["a", "b"], max_tokens=1)

    counts = {
        "request_queue_time_seconds": 3,
        "request_prefill_time_seconds": 3,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 4,
        "request_decode_time_seconds": 4,
        "request_time_per_output_token_seconds": 2,
    }
    assert {n: metric(client, f"whalepod_{n}_count") for n in counts} == counts
    prompt_tokens = sum(len(submit.prompt_token_ids) for submit in engine.submitted)
    assert metric(client, "whalepod_request_prompt_tokens_sum") == prompt_tokens


def test_moves_of_experts_are_counted(client: TestClient, engine: FakeEngine) -> None:
    engine.stats = Stats(
        num_expert_slots_changed=7, expert_bytes_sent=90, num_expert_plans=2,
        num_expert_failures=1, expert_balance_ppm=750_000,
    )  # fmt: skip
    expected = {
        "slots_changed_total": 7, "sent_bytes_total": 90, "placements_total": 2,
        "failures_total": 1, "balancedness": 0.75,
    }  # fmt: skip
    assert {n: metric(client, f"whalepod_eplb_{n}") for n in expected} == expected


def test_a_blocked_event_loop_is_late() -> None:
    metrics, blocked_s = Metrics(Stats), 3 * INTERVAL_S

    async def run() -> None:
        async with measuring_lag(metrics.loop_lag):
            await asyncio.sleep(0)  # its timer is set now
            time.sleep(blocked_s)  # what must not happen
            for _ in range(9):  # its timer, its future, its task
                await asyncio.sleep(0)

    asyncio.run(run())

    count, sum_s = observed(metrics)["event_loop_lag"]
    assert count == 1
    assert sum_s >= blocked_s - INTERVAL_S
