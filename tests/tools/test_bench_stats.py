"""Statistics on hand-made timelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whalepod.tools.bench.stats import (
    RequestRecord,
    bucket,
    describe,
    find_gaps,
    max_overlap,
    meets,
    resent_hit_ratio,
    summarize,
)


def record(start: float, *chunks: float, tokens: int | None = None, **other: int) -> RequestRecord:
    return RequestRecord(
        start_s=start,
        end_s=chunks[-1],
        chunk_times_s=chunks,
        prompt_tokens=other.get("prompt", 100),
        completion_tokens=len(chunks) if tokens is None else tokens,
        cached_tokens=other.get("cached", 0),
    )


def test_latencies_of_one_request() -> None:
    one = record(10.0, 10.5, 10.6, 10.8)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(150)
    assert one.itls_ms == pytest.approx([100, 200])
    assert one.e2el_ms == pytest.approx(800)


def test_tpot_counts_tokens_not_chunks() -> None:
    assert record(0.0, 1.0, 1.3, tokens=4).tpot_ms == pytest.approx(100)
    assert record(0.0, 1.0, tokens=1).tpot_ms is None


def test_percentiles_interpolate_between_ranks() -> None:
    summary = describe([4.0, 1.0, 3.0, 2.0])
    assert summary == pytest.approx({"mean": 2.5, "median": 2.5, "p90": 3.7, "p99": 3.97})
    assert describe([]) == {}


def test_summary_has_vllms_keys_and_rates_over_the_whole_run() -> None:
    failed = RequestRecord(start_s=0.0, end_s=4.0, error="HTTP 503: lost")
    result = summarize([record(1.0, 2.0, 3.0), record(1.0, 2.0, 2.5, tokens=3), failed], {})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["errors"] == {"HTTP 503: lost": 1}
    assert result["duration"] == 4.0
    assert result["request_throughput"] == pytest.approx(0.5)
    assert result["output_throughput"] == pytest.approx(5 / 4)
    assert result["total_token_throughput"] == pytest.approx(205 / 4)
    assert result["median_ttft_ms"] == pytest.approx(1000)
    assert result["mean_tpot_ms"] == pytest.approx((1000 + 250) / 2)
    assert result["mean_itl_ms"] == pytest.approx(750)
    assert result["p99_e2el_ms"] == pytest.approx(1500 + 0.99 * 500)
    assert result["goodput"] is None


def test_an_answer_without_a_token_has_failed() -> None:
    result = summarize([RequestRecord(start_s=0.0, end_s=1.0)], {})
    assert (result["completed"], result["failed"]) == (0, 1)
    assert "mean_ttft_ms" not in result


def test_goodput_counts_requests_that_kept_every_limit() -> None:
    good, slow_first, slow_gap = record(0, 0.1, 0.2), record(0, 0.9, 1.0), record(0, 0.1, 2.0)
    slo = {"ttft": 500.0, "tpot": 150.0}
    assert [meets(r, slo) for r in (good, slow_first, slow_gap)] == [True, False, False]
    assert summarize([good, slow_first, slow_gap], slo)["goodput"] == pytest.approx(1 / 2.0)


def test_warm_and_cold_first_tokens_are_apart() -> None:
    records = [record(0, 1.0), record(0, 0.1, cached=64), record(0, 0.3, cached=64)]
    groups = summarize(records, {})["ttft_ms_by_cache"]
    assert groups["cold"]["count"] == 1
    assert groups["warm"]["mean"] == pytest.approx(200)


def test_a_gap_knows_how_many_decode_and_prefill_beside_it() -> None:
    # a decodes 1..4; b waits and prefills 1.5..2.5, then decodes until 3.4
    a, b = record(0.0, 1.0, 2.0, 3.0, 4.0), record(1.5, 2.5, 3.4)
    of_a = list(find_gaps([a, b]))[:3]
    assert [g.num_decoding for g in of_a] == [1, 2, 1]  # at 1.5, 2.5 and 3.5
    assert [g.num_prefilling for g in of_a] == [1, 1, 0]


def test_a_chunk_of_several_tokens_counts_per_token() -> None:
    (gap,) = find_gaps([record(0.0, 1.0, 2.0, tokens=5)])
    assert gap.ms_per_token == pytest.approx(250)
    assert gap.kv_tokens == 104


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [
        (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (9, 16),
    ]  # fmt: skip


def test_intervals_that_only_touch_do_not_overlap() -> None:
    assert max_overlap([(0, 1), (1, 2), (1.5, 3)]) == 2
    assert max_overlap([]) == 0


def test_only_hits_on_resent_blocks_count_as_such() -> None:
    def turn(resent: int, cached: int) -> RequestRecord:
        return replace(record(0, 1.0, cached=cached), resent_tokens=resent)

    assert resent_hit_ratio([turn(0, 64), turn(128, 192), turn(128, 64)]) == pytest.approx(
        192 / 256
    )
    assert resent_hit_ratio([turn(0, 64)]) is None
