"""`/cluster`: facts, counters and gauges of the engine and its ranks, as one JSON object.

Counters run since the start and never fall; a reader keeps the history and takes differences.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter, Histogram

import whalepod
from whalepod.server.gateway.gateway import Gateway
from whalepod.server.gateway.metrics import Metrics


def cluster_status(gateway: Gateway) -> dict[str, object]:
    """Describe the model, the engine's counters, latencies, speculation, ranks and experts.

    `time_s` is a monotonic clock: the difference of two answers' values is the time between them.
    `speculation` and `experts` are null while there is nothing to show.
    """
    stats, experts = asdict(gateway.engine.stats), gateway.engine.experts
    return {
        "time_s": time.monotonic(),
        "version": whalepod.__version__,
        "models": list(gateway.model_names),
        "engine": {**asdict(gateway.engine.info), "failure": gateway.engine.failure},
        "stats": stats,
        "latency_s": _latencies(gateway.metrics),
        "finished": _by_label(gateway.metrics.success),
        "errors": _by_label(gateway.metrics.errors),
        "speculation": _speculation(stats),
        "ranks": [{"rank": rank, **asdict(own)} for rank, own in gateway.engine.rank_stats.items()],
        "experts": None if experts is None else asdict(experts),
    }


def _latencies(metrics: Metrics) -> dict[str, object]:
    histograms = {
        "time_to_first_token": metrics.first_token,
        "inter_token": metrics.inter_token,
        "end_to_end": metrics.end_to_end,
    }
    return {name: _histogram(histogram) for name, histogram in histograms.items()}


def _histogram(histogram: Histogram) -> dict[str, object]:
    """Return upper bounds in seconds and, for each, how many observations lie at or below it.

    The last bound is null: it has none.
    """
    (family,) = histogram.collect()
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    sums = [sample.value for sample in family.samples if sample.name.endswith("_sum")]
    bounds = [float(sample.labels["le"]) for sample in buckets]
    return {
        "bounds_s": [*bounds[:-1], None],
        "counts": [int(sample.value) for sample in buckets],
        "sum_s": sums[0],
    }


def _by_label(counter: Counter) -> dict[str, int]:
    (family,) = counter.collect()
    return {
        next(iter(sample.labels.values())): int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _speculation(stats: dict[str, Any]) -> dict[str, object] | None:
    """Return how many drafts were accepted at each position, once an engine has drafted."""
    if not stats.get("num_drafts"):
        return None
    return {
        "num_drafts": stats["num_drafts"],
        "accepted_by_position": list(stats["num_accepted_by_position"]),
    }
