"""Writes `deploy/grafana.json`: `python -m whalepod.tools.grafana [FILE]`.

The dashboard follows from the registry of the gateway's metrics, so that a new metric has a panel
and a panel has a metric: a test compares the file with what this module makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric

from whalepod.server.gateway.metrics import Metrics
from whalepod.server.messages import Stats

FILE: Final = Path("deploy/grafana.json")
PREFIX: Final = "whalepod_"
PANELS_PER_ROW: Final = 3
PANEL_WIDTH: Final = 24 // PANELS_PER_ROW
PANEL_HEIGHT: Final = 7
QUANTILES: Final = (0.5, 0.9, 0.99)
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
LABELS: Final = {
    "request_success": "finished_reason",
    "request_errors": "code",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}
"""The label that divides a counter."""
SECTIONS: Final = {
    "Load": (
        *("num_requests", "request_success", "request_errors", "request_queue"),
        "event_loop",
    ),
    "Latency": (
        *("time_to_first", "inter_token", "e2e", "request_time"),
        *("request_prefill", "request_decode", "request_inference"),
    ),
    "Tokens": ("prompt_tokens", "generation_tokens", "request_prompt", "request_gen"),
    "Cache": ("kv_cache", "prefix_cache", "num_preemptions"),
    "Speculation": ("spec_decode", "num_speculative"),
    "Everything else": ("",),
}
"""Beginnings of the names in each section; a metric goes to the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One line of a panel."""

    expr: str
    legend: str


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: a panel for every metric of the gateway."""
    families = _families(Metrics(lambda: Stats(num_accepted_by_position=(0,))).registry)
    sections: dict[str, list[Metric]] = {title: [] for title in SECTIONS}
    for family in families:
        name = family.name.removeprefix(PREFIX)
        title = next(title for title, starts in SECTIONS.items() if name.startswith(starts))
        sections[title].append(family)
    return {
        "title": "whalepod",
        "uid": "whalepod",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_panels(sections)),
    }


def queries(family: Metric) -> list[Query]:
    """Return what a panel of a metric shows, in Prometheus' language."""
    name, window = family.name, "[$__rate_interval]"
    if family.type == "histogram":
        rate = f"sum by (le) (rate({name}_bucket{window}))"
        return [
            Query(expr=f"histogram_quantile({q:g}, {rate})", legend=f"p{q * 100:g}")
            for q in QUANTILES
        ]
    if family.type == "counter":
        label = LABELS.get(name.removeprefix(PREFIX))
        by = f" by ({label})" if label else ""
        legend = f"{{{{{label}}}}}" if label else "per second"
        return [Query(expr=f"sum{by} (rate({name}_total{window}))", legend=legend)]
    return [Query(expr=name, legend="{{instance}}")]


def _families(registry: CollectorRegistry) -> list[Metric]:
    return sorted(registry.collect(), key=lambda family: family.name)


def _panels(sections: dict[str, list[Metric]]) -> Iterator[dict[str, Any]]:
    panel_id = y = 0
    for title, families in sections.items():
        if not families:
            continue
        panel_id += 1
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": panel_id, "type": "row", "title": title, "gridPos": place, "panels": []}
        y += 1
        for i, family in enumerate(families):
            panel_id += 1
            x = i % PANELS_PER_ROW * PANEL_WIDTH
            top = y + i // PANELS_PER_ROW * PANEL_HEIGHT
            place = {"h": PANEL_HEIGHT, "w": PANEL_WIDTH, "x": x, "y": top}
            yield {"id": panel_id, "gridPos": place, **_panel(family)}
        y += -(-len(families) // PANELS_PER_ROW) * PANEL_HEIGHT


def _panel(family: Metric) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query.expr, "legendFormat": query.legend}
        for i, query in enumerate(queries(family))
    ]
    return {
        "type": "timeseries",
        "title": family.name.removeprefix(PREFIX).replace("_", " "),
        "description": family.documentation,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": _unit(family), "min": 0}, "overrides": []},
        "targets": targets,
    }


def _unit(family: Metric) -> str:
    if family.name.endswith("_seconds"):
        return "s"
    if family.name.endswith("_perc"):
        return "percentunit"
    return "cps" if family.type == "counter" else "short"


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main(arguments: Sequence[str]) -> int:
    file = Path(arguments[0]) if arguments else FILE
    file.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
