"""Prometheus metrics: vLLM's names and meaning, with the prefix `whalepod_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whalepod.scheduler.stats import Stats

_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_PHASES = {
    "e2e_request_latency_seconds": "Arrival of a request to its last token.",
    "request_queue_time_seconds": "Arrival of a prompt in the engine to its admission.",
    "request_prefill_time_seconds": "Admission of a prompt to its first token.",
    "request_decode_time_seconds": "First to last token of a choice.",
    "request_inference_time_seconds": "Admission of a prompt to the last token of a choice.",
}
_TOKEN_COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class _EngineCollector(Collector):
    """Exports the engine's own counters, read from its newest statistics at each scrape."""

    def __init__(
        self, read_stats: Callable[[], Stats], read_ranks: Callable[[], Mapping[int, Stats]]
    ) -> None:
        self._read_stats, self._read_ranks = read_stats, read_ranks

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for name, (text, value) in _gauges(stats).items():
            yield GaugeMetricFamily(f"whalepod_{name}", text, value=value)
        for name, (text, value) in _counters(stats).items():
            yield CounterMetricFamily(f"whalepod_{name}", text, value=value)
        by_position = CounterMetricFamily(
            "whalepod_spec_decode_num_accepted_tokens_per_pos",
            "Right guesses by their place in a run.",
            labels=["position"],
        )
        for position, count in enumerate(stats.num_accepted_by_position):
            by_position.add_metric([str(position)], count)
        yield by_position
        ranks = self._read_ranks()
        if len(ranks) > 1:
            yield from _rank_series(ranks)


def _used_blocks(stats: Stats) -> float:
    return stats.num_owned_blocks / stats.num_blocks if stats.num_blocks else 0.0


def _gauges(stats: Stats) -> dict[str, tuple[str, float]]:
    return {
        "num_requests_running": ("Sequences that run.", stats.num_running),
        "num_requests_waiting": (
            "Requests that wait for their grammars or for admission.",
            stats.num_waiting,
        ),
        "kv_cache_usage_perc": (
            "Share of KV blocks in use (1 is full).",
            _used_blocks(stats),
        ),
        "kv_cache_free_blocks": ("KV blocks that hold nothing.", stats.num_free_blocks),
        "kv_cache_cached_blocks": ("Unused KV blocks kept for reuse.", stats.num_cached_blocks),
        "kv_cache_owned_blocks": ("KV blocks of live requests.", stats.num_owned_blocks),
        "kv_cache_blocks": ("All KV blocks.", stats.num_blocks),
        "num_speculative_tokens": (
            "Tokens guessed ahead in the last step.",
            stats.num_speculative_tokens,
        ),
        "eplb_balancedness": (
            "Mean over maximum expert load of the ranks under the last placement; 0: none yet.",
            stats.expert_balance_ppm / 1e6,
        ),
    }


def _counters(stats: Stats) -> dict[str, tuple[str, float]]:
    return {
        "prefix_cache_queries": ("Prompt tokens looked up.", stats.prefix_cache_queries_tokens),
        "prefix_cache_hits": ("Prompt tokens found.", stats.prefix_cache_hits_tokens),
        "prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generation_tokens),
        "num_preemptions": ("Sequences preempted for lack of blocks.", stats.num_preemptions),
        "engine_steps": ("Steps of the engine loop.", stats.num_steps),
        "spec_decode_num_drafts": ("Runs of guesses verified.", stats.num_drafts),
        "spec_decode_num_draft_tokens": ("Guesses verified.", stats.num_draft_tokens),
        "spec_decode_num_accepted_tokens": (
            "Guesses that were right.",
            stats.num_accepted_tokens,
        ),
        "eplb_placements": ("Placements of experts.", stats.num_expert_plans),
        "eplb_failures": ("Moves of experts that were given up.", stats.num_expert_failures),
        "eplb_slots_changed": (
            "Slots that another expert moved into.",
            stats.num_expert_slots_changed,
        ),
        "eplb_sent_bytes": ("Bytes of experts sent between ranks.", stats.expert_bytes_sent),
    }


def _rank_series(ranks: Mapping[int, Stats]) -> Iterator[Metric]:
    """Yield gauges of the ranks that serve a model together, and their waits for each other.

    Token counters are published once, by the engine's series, which are sums over the ranks.
    """
    gauges: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
        "num_requests_running": ("Sequences that run.", lambda s: s.num_running),
        "num_requests_waiting": ("Requests that wait.", lambda s: s.num_waiting),
        "kv_cache_usage_perc": ("Share of KV blocks in use.", _used_blocks),
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


class Metrics:
    """All series of one gateway, in a registry of their own."""

    def __init__(
        self,
        read_stats: Callable[[], Stats],
        read_ranks: Callable[[], Mapping[int, Stats]] = dict,
    ) -> None:
        """`read_ranks` gives the counters of each rank; of a single engine nothing is shown."""
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_EngineCollector(read_stats, read_ranks))
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Arrival of a request to its first token.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a choice.", _TOKEN_BUCKETS_S
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a choice's tokens after the first.",
            _TOKEN_BUCKETS_S,
        )
        self.end_to_end, self.queue, self.prefill, self.decode, self.inference = (
            self._histogram(name, text, _REQUEST_BUCKETS_S) for name, text in _PHASES.items()
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNT_BUCKETS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a choice.", _TOKEN_COUNT_BUCKETS
        )
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the gateway's event loop is.", _LAG_BUCKETS_S
        )
        self.success = self._counter(
            "request_success", "Ended choices by reason.", "finished_reason"
        )
        self.errors = self._counter("request_errors", "Error answers by code.", "code")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"whalepod_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"whalepod_{name}", text, [label], registry=self.registry)

    def count_error(self, code: str) -> None:
        """Count an error answer."""
        self.errors.labels(code).inc()

    def render(self) -> bytes:
        """Return the text exposition of all series."""
        return generate_latest(self.registry)
