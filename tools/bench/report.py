"""The result of a run as text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalepod.tools.table import format_table

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
_BREAKDOWNS = {
    "ttft_ms_by_cache": "TTFT by prefix cache",
    "tpot_ms_by_batch": "TPOT by requests decoding",
    "tpot_ms_by_kv_tokens": "TPOT by tokens in the KV cache",
    "itl_ms_by_prefill": "ITL beside another's prefill",
}
_STATISTICS = ("mean", "median", "p90", "p99")


def format_report(result: Mapping[str, Any]) -> str:
    """Lay out one run on one screen."""
    limit = result["max_concurrency"]
    rate = result["request_rate"]
    load = f"{rate:g} requests/s" if rate else f"concurrency {limit}" if limit else "as recorded"
    head = [
        f"{result['model_id']}: {result['profile']}, {load}, seed {result['seed']}",
        f"  {result['completed']} completed, {result['failed']} failed "
        f"in {result['duration']:.2f} s; at most {result['max_concurrent_requests']} at once",
        f"  {result['request_throughput']:.2f} requests/s, "
        f"{result['output_throughput']:.1f} output tok/s, "
        f"{result['total_token_throughput']:.1f} total tok/s",
        f"  {result['total_input_tokens']:,} prompt tokens, "
        f"{100 * result['prefix_hit_ratio']:.1f} % from the prefix cache",
    ]
    if result["resent_hit_ratio"] is not None:
        head.append(f"  {100 * result['resent_hit_ratio']:.1f} % of re-sent full blocks hit")
    if result["profile"] == "random" and result["cached_tokens"]:
        head.append("  NOTE: the cache knows these prompts from a run before: change --seed")
    if result["goodput"] is not None:
        head.append(f"  goodput {result['goodput']:.2f} requests/s within the SLO")
    head += [f"  failed {count}x: {error}" for error, count in result["errors"].items()]
    return "\n".join([*head, "", _table(result)]) + "\n"


def _table(result: Mapping[str, Any]) -> str:
    rows: list[list[str]] = [["ms", *_STATISTICS, "count"]]
    for name, title in _LATENCIES.items():
        if f"mean_{name}_ms" in result:
            cells = [f"{result[f'{s}_{name}_ms']:.2f}" for s in _STATISTICS]
            rows.append([title, *cells, ""])
    for key, title in _BREAKDOWNS.items():
        groups = result[key]
        if len(groups) > 1:
            rows.append([title, *[""] * (len(_STATISTICS) + 1)])
            for group, summary in groups.items():
                cells = [f"{summary[s]:.2f}" for s in _STATISTICS]
                rows.append([f"  {group}", *cells, f"{summary['count']:,}"])
    return format_table(rows, numeric=True)
