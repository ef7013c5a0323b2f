"""Latency statistics of a run: pure functions of what each request did and when.

Times are seconds of one clock; results are milliseconds under vLLM's key names. A request's
decode phase lasts from its first to its last chunk, its prefill phase (waiting included) from
its start to its first chunk.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Summary = dict[str, float]
PERCENTILES = (90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request."""

    start_s: float
    """When it was due; the client's own lateness is the server's user's wait."""
    end_s: float
    chunk_times_s: tuple[float, ...] = ()
    """When each streamed piece of the answer arrived."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resent_tokens: int = 0
    """Tokens of full blocks at its beginning that the session's last prompt had as well."""
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return 1e3 * (self.chunk_times_s[0] - self.start_s)

    @property
    def e2el_ms(self) -> float:
        """End-to-end latency."""
        return 1e3 * (self.chunk_times_s[-1] - self.start_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        decode_s = self.chunk_times_s[-1] - self.chunk_times_s[0]
        return 1e3 * decode_s / (self.completion_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Inter-token latencies: gaps between chunks."""
        times = self.chunk_times_s
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Gap:
    """The wait between two chunks of one answer, and what else the server did meanwhile."""

    latency_ms: float
    num_tokens: float
    """Tokens that the gap produced, from the answer's average per chunk."""
    num_decoding: int
    """Requests in their decode phase in the middle of the gap, this one included."""
    num_prefilling: int
    """Requests whose prefill phase overlaps the gap."""
    kv_tokens: int

    @property
    def ms_per_token(self) -> float:
        return self.latency_ms / self.num_tokens


def summarize(records: Sequence[RequestRecord], slo_ms: Mapping[str, float]) -> dict[str, Any]:
    """Fold the records of one run into vLLM's result keys and our own breakdowns."""
    done = [record for record in records if record.error is None and record.chunk_times_s]
    failed = [record for record in records if record.error is not None or not record.chunk_times_s]
    start_s = min((record.start_s for record in records), default=0.0)
    duration_s = max((record.end_s for record in records), default=0.0) - start_s
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.completion_tokens for record in done)
    cached_tokens = sum(record.cached_tokens for record in done)
    result: dict[str, Any] = {
        "completed": len(done),
        "failed": len(failed),
        "errors": dict(Counter(record.error or "the answer had no token" for record in failed)),
        "duration": duration_s,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "cached_tokens": cached_tokens,
        "prefix_hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "resent_hit_ratio": resent_hit_ratio(done),
        "request_throughput": _rate(len(done), duration_s),
        "output_throughput": _rate(output_tokens, duration_s),
        "total_token_throughput": _rate(prompt_tokens + output_tokens, duration_s),
        "goodput": _rate(sum(meets(r, slo_ms) for r in done), duration_s) if slo_ms else None,
        "max_concurrent_requests": max_overlap([(r.start_s, r.end_s) for r in done]),
    }
    latencies = {
        "ttft": [r.ttft_ms for r in done],
        "tpot": [r.tpot_ms for r in done if r.tpot_ms is not None],
        "itl": [itl for r in done for itl in r.itls_ms],
        "e2el": [r.e2el_ms for r in done],
    }
    for name, values in latencies.items():
        result |= {f"{statistic}_{name}_ms": x for statistic, x in describe(values).items()}
    return result | breakdowns(done)


def resent_hit_ratio(done: Sequence[RequestRecord]) -> float | None:
    """Share of the re-sent full blocks that came from the prefix cache; None if none was."""
    resent = sum(record.resent_tokens for record in done)
    hits = sum(min(record.resent_tokens, record.cached_tokens) for record in done)
    return hits / resent if resent else None


def breakdowns(done: Sequence[RequestRecord]) -> dict[str, dict[str, Summary]]:
    """Split TTFT by cache state, TPOT by batch and KV length, ITL by prefill interference."""
    warm = [r.ttft_ms for r in done if r.cached_tokens]
    cold = [r.ttft_ms for r in done if not r.cached_tokens]
    gaps = list(find_gaps(done))
    return {
        "ttft_ms_by_cache": _describe_groups({"cold": cold, "warm": warm}),
        "tpot_ms_by_batch": _describe_buckets((g.num_decoding, g.ms_per_token) for g in gaps),
        "tpot_ms_by_kv_tokens": _describe_buckets((g.kv_tokens, g.ms_per_token) for g in gaps),
        "itl_ms_by_prefill": _describe_groups(
            {
                "none": [g.latency_ms for g in gaps if not g.num_prefilling],
                "beside a prefill": [g.latency_ms for g in gaps if g.num_prefilling],
            }
        ),
    }


def describe(values: Iterable[float]) -> Summary:
    """Give count-free statistics of a sample; {} of an empty one."""
    ordered = sorted(values)
    if not ordered:
        return {}
    # between the two nearest ranks, as NumPy does
    ranks = statistics.quantiles(
        ordered * 2 if len(ordered) == 1 else ordered, n=100, method="inclusive"
    )
    summary = {"mean": statistics.fmean(ordered), "median": ranks[49]}
    return summary | {f"p{q}": ranks[q - 1] for q in PERCENTILES}


def meets(record: RequestRecord, slo_ms: Mapping[str, float]) -> bool:
    """Return whether a request kept every limit; its worst gap counts for itl."""
    worst = {
        "ttft": record.ttft_ms,
        "tpot": record.tpot_ms or 0.0,
        "itl": max(record.itls_ms, default=0.0),
        "e2el": record.e2el_ms,
    }
    return all(worst[metric] <= limit for metric, limit in slo_ms.items())


def max_overlap(intervals: Iterable[tuple[float, float]]) -> int:
    """Count the most half-open intervals that hold one common moment."""
    edges = sorted(edge for a, b in intervals for edge in ((a, 1), (b, -1)))
    most = depth = 0
    for _, change in edges:
        depth += change
        most = max(most, depth)
    return most


def find_gaps(done: Sequence[RequestRecord]) -> Iterator[Gap]:
    """Yield every gap between chunks, with what the other requests did meanwhile."""
    starts = sorted(r.start_s for r in done)
    firsts = sorted(r.chunk_times_s[0] for r in done)
    lasts = sorted(r.chunk_times_s[-1] for r in done)
    for record in done:
        times = record.chunk_times_s
        if len(times) < 2:
            continue
        tokens_per_gap = max(1, record.completion_tokens - 1) / (len(times) - 1)
        for i, (a, b) in enumerate(itertools.pairwise(times)):
            middle = (a + b) / 2
            yield Gap(
                latency_ms=1e3 * (b - a),
                num_tokens=tokens_per_gap,
                num_decoding=bisect_right(firsts, middle) - bisect_left(lasts, middle),
                num_prefilling=bisect_left(starts, b) - bisect_right(firsts, a),
                kv_tokens=record.prompt_tokens + round((i + 1) * tokens_per_gap),
            )


def bucket(value: int) -> tuple[int, int]:
    """Round a count to powers of two: 1, 2, 3-4, 5-8, 9-16, ..."""
    high = 1 << max(0, value - 1).bit_length()
    return (high // 2 + 1 if high > 1 else high), high


def _describe_buckets(pairs: Iterable[tuple[int, float]]) -> dict[str, Summary]:
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for count, value in pairs:
        groups[bucket(count)].append(value)
    return _describe_groups(
        {f"{a}-{b}" if a < b else str(a): groups[a, b] for a, b in sorted(groups)}
    )


def _describe_groups(groups: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
    return {
        name: {"count": len(values), **describe(values)}
        for name, values in groups.items()
        if values
    }


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
