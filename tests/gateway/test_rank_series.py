"""What clients and operators see of the single ranks of a group."""

from __future__ import annotations

from fastapi.testclient import TestClient

from tests.gateway.fake_engine import FakeEngine
from whalepod.scheduler.stats import Stats


def test_one_engine_has_no_series_of_ranks(client: TestClient) -> None:
    assert "whalepod_rank_" not in client.get("/metrics").text


def test_each_rank_has_its_gauges_and_the_waits_that_point_at_the_slow_one(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.stats = Stats(num_running=3, waited_ms=(0, 2500))
    engine.other_ranks = {1: Stats(num_running=1, num_blocks=8, num_owned_blocks=2)}
    text = client.get("/metrics").text
    assert 'whalepod_rank_num_requests_running{rank="0"} 3.0' in text
    assert 'whalepod_rank_kv_cache_usage_perc{rank="1"} 0.25' in text
    assert 'whalepod_rank_wait_seconds_total{on="1",rank="0"} 2.5' in text

    ranks = client.get("/cluster").json()["ranks"]
    assert [(rank["rank"], rank["num_running"]) for rank in ranks] == [(0, 3), (1, 1)]


def test_a_group_that_is_not_ready_is_not_called_an_engine(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.other_ranks, engine.answers_pings = {1: Stats()}, False
    message = client.get("/ready").json()["error"]["message"]
    assert message.startswith("the group did not answer: ")
