"""`whalepod ps`: what runs, where, how busy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from whalepod.tools.client import DEFAULT_URL, Client, ClientError, model_names, root_url
from whalepod.tools.table import format_table

_SAMPLE = re.compile(r"(?:whalepod[_:]|vllm:)(\w+?)(?:\{[^}]*\})?\s+([0-9.eE+-]+)$")

_COUNTS = {
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "generation_tokens": "generation_tokens_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PsConfig:
    url: Annotated[tuple[str, ...], "servers to ask"] = (DEFAULT_URL,)
    api_key: Annotated[str | None, "their key, if they ask for one"] = None
    timeout_s: Annotated[float, "seconds to wait for each answer"] = 5.0
    json: Annotated[bool, "print JSON instead of a table"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What one server said; None: it did not say."""

    url: str
    state: str
    """"ready", "not ready: ..." or "down: ..."."""
    models: tuple[str, ...] = ()
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_used_percent: float | None = None
    prefix_hit_percent: float | None = None
    generation_tokens: int | None = None


def ps(config: PsConfig) -> int:
    """List running servers: state, model, load, cache.

    The exit code is 1 if one of them is not ready.
    """
    states = [ask(url, config.api_key, config.timeout_s) for url in config.url]
    if config.json:
        print(json.dumps([asdict(state) for state in states], indent=2))
    else:
        print(_table(states))
    return 0 if all(state.state == "ready" for state in states) else 1


def ask(url: str, api_key: str | None, timeout_s: float) -> ServerState:
    """Ask one server for its readiness, models and metrics. Never raises for a broken server."""
    try:
        with Client(url, api_key, timeout_s=timeout_s) as client:
            ready = client.get("/ready")
            state = "ready" if ready.status_code == 200 else f"not ready: {ready.text[:200]}"
            models = client.get("/v1/models")
            metrics = client.get("/metrics")
    except ClientError as error:
        return ServerState(url=root_url(url), state=f"down: {error}")
    names: tuple[str, ...] = ()
    try:
        names = model_names(models) if models.status_code == 200 else ()
    except ClientError as error:  # something else answers there
        state = f"not ready: {error}"
    samples = parse_metrics(metrics.text if metrics.status_code == 200 else "")
    counts = {name: int(samples[key]) for name, key in _COUNTS.items() if key in samples}
    used, queries = samples.get("kv_cache_usage_perc"), samples.get("prefix_cache_queries_total")
    hits = samples.get("prefix_cache_hits_total", 0.0)
    return ServerState(
        url=root_url(url),
        state=state,
        models=names,
        kv_cache_used_percent=None if used is None else round(100 * used, 1),
        prefix_hit_percent=round(100 * hits / queries, 1) if queries else None,
        **counts,
    )


def parse_metrics(text: str) -> dict[str, float]:
    """Read our (or vLLM's) samples from Prometheus text, summed over their labels."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            samples[match[1]] = samples.get(match[1], 0.0) + float(match[2])
    return samples


def _table(states: Sequence[ServerState]) -> str:
    rows = [("URL", "MODELS", "RUNNING", "WAITING", "KV USED", "PREFIX HITS", "TOKENS", "STATE")]
    for s in states:
        shares = (_cell(s.kv_cache_used_percent, "%"), _cell(s.prefix_hit_percent, "%"))
        running, waiting = _cell(s.num_running), _cell(s.num_waiting)
        models, tokens = ",".join(s.models) or "-", _cell(s.generation_tokens)
        rows.append((s.url, models, running, waiting, *shares, tokens, s.state))
    return format_table(rows)


def _cell(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,}{unit}"
