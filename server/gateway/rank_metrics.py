"""Series of single ranks, where several serve a model together; their sums are the engine's own.

Token counters are published once, by the engine's series: here are gauges, and who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whalepod.server.messages import Stats


class RankCollector(Collector):
    """Exports nothing where there is one rank only."""

    def __init__(self, read_stats: Callable[[], Mapping[int, Stats]]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        ranks = self._read_stats()
        if len(ranks) < 2:
            return
        gauges: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
            "num_requests_running": ("Sequences that run.", lambda s: s.num_running),
            "num_requests_waiting": ("Requests that wait.", lambda s: s.num_waiting),
            "kv_cache_usage_perc": (
                "Share of KV blocks in use.",
                lambda s: s.num_owned_blocks / s.num_blocks if s.num_blocks else 0.0,
            ),
            "step_seconds": ("Time of the last step with rows.", lambda s: s.step_time_us / 1e6),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"whalepod_rank_{name}", text, labels=["rank"])
            for rank, stats in ranks.items():
                family.add_metric([str(rank)], read(stats))
            yield family
        waits = CounterMetricFamily(
            "whalepod_rank_wait_seconds",
            "Time that a rank has waited for another one: the slow rank's column stands out.",
            labels=["rank", "on"],
        )
        for rank, stats in ranks.items():
            for other, waited_ms in enumerate(stats.waited_ms):
                waits.add_metric([str(rank), str(other)], waited_ms / 1e3)
        yield waits
