"""Medians of a comparison, their ratios, and the ratios that this engine is meant to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from whalepod.tools.peers.programs import Samples, decode_row, prefill_row
from whalepod.tools.peers.servers import rate_row, ttft_row
from whalepod.tools.table import format_table

OURS = "whalepod"
BARS = {
    ("llama.cpp", prefill_row(256, "bf16")): 1.5,
    ("llama.cpp", prefill_row(2048, "bf16")): 3.0,
    ("llama.cpp", decode_row(1, "bf16")): 1.0,
    ("llama.cpp", decode_row(8, "bf16")): 1.6,
    ("llama.cpp", decode_row(16, "bf16")): 2.0,
    ("llama.cpp", prefill_row(256, "int8")): 2.0,
    ("llama.cpp", prefill_row(2048, "int8")): 2.0,
    ("llama.cpp", decode_row(1, "int8")): 1.1,
    ("llama.cpp", decode_row(16, "int8")): 2.5,
    ("llama.cpp", rate_row(1)): 1.0,
    ("llama.cpp", rate_row(16)): 1.8,
    ("vLLM", rate_row(1)): 3.3,
    ("vLLM", rate_row(16)): 4.0,
    ("vLLM", ttft_row(1)): 0.5,
    ("vLLM", ttft_row(16)): 0.5,
}
"""Ratios to reach by (peer, row): the least share of its rate, the most of its time."""
LONG_CONTEXT_SHARE = 0.75
"""Decoding after the long context keeps at least this share of the rate after a short one."""

Engines = Mapping[str, Samples]
"""Samples by the name of the engine that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How this engine stands to another in one row."""

    peer: str
    row: str
    value: float
    bar: float | None
    """What it should be; None: it is not said."""

    @property
    def is_time(self) -> bool:
        return self.row.endswith(" ms")

    @property
    def is_met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.is_time else self.value >= self.bar

    def __str__(self) -> str:
        if self.bar is None:
            return f"{self.value:.2f}"
        sign = "<=" if self.is_time else ">="
        return f"{self.value:.2f} ({sign} {self.bar:g}{'' if self.is_met else ', missed'})"


def medians_of(engines: Engines) -> dict[str, dict[str, float]]:
    """Return the median of every row and engine, in the order of this engine's rows."""
    rows = dict.fromkeys(row for samples in engines.values() for row in samples)
    return {
        row: {name: median(samples[row]) for name, samples in engines.items() if row in samples}
        for row in rows
    }


def ratios_of(row: str, medians: Mapping[str, float]) -> list[Ratio]:
    """Compare this engine with each of the others that has the row."""
    if OURS not in medians:
        return []
    return [
        Ratio(peer=peer, row=row, value=medians[OURS] / value, bar=BARS.get((peer, row)))
        for peer, value in medians.items()
        if peer != OURS
    ]


def long_context_ratio(
    medians: Mapping[str, Mapping[str, float]], context: int
) -> tuple[float, bool] | None:
    """Return the rate after the long context by that after a short one, and if it is enough."""
    rows = decode_row(1, "bf16", context), decode_row(1, "bf16")
    values = [medians.get(row, {}).get(OURS) for row in rows]
    if not context or None in values:
        return None
    long, short = (value or 0.0 for value in values)
    return long / short, long / short >= LONG_CONTEXT_SHARE


def as_json(engines: Engines, context: int) -> dict[str, Any]:
    """Return rows with samples, medians and ratios."""
    medians = medians_of(engines)
    rows = [
        {
            "row": row,
            "medians": values,
            "samples": {name: samples.get(row, []) for name, samples in engines.items()},
            "ratios": [
                {"peer": ratio.peer, "ratio": ratio.value, "bar": ratio.bar, "met": ratio.is_met}
                for ratio in ratios_of(row, values)
            ],
        }
        for row, values in medians.items()
    ]
    found = long_context_ratio(medians, context)
    return {"rows": rows, "long_context_share": found[0] if found else None}


def format_comparison(engines: Engines, context: int) -> str:
    """Lay out the medians with a column of ratios after each peer."""
    peers = [name for name in engines if name != OURS]
    medians = medians_of(engines)
    table = [["row (tok/s unless it says ms)", OURS, *_pairs(peers, ("", ": ratio (bar)"))]]
    notes = []
    for row, values in medians.items():
        if ": " in row:
            notes.append(f"{row}: {values.get(OURS, 0.0):.0%}")
            continue
        by_peer = {ratio.peer: ratio for ratio in ratios_of(row, values)}
        cells = [_number(values.get(OURS))]
        for peer in peers:
            ratio = by_peer.get(peer)
            cells += [_number(values.get(peer)), "" if ratio is None else str(ratio)]
        table.append([row, *cells])
    if found := long_context_ratio(medians, context):
        verdict = "" if found[1] else ", missed"
        notes.append(
            f"after {context:,} tokens decode keeps {found[0]:.0%} of its rate "
            f"(>= {LONG_CONTEXT_SHARE:.0%}{verdict})"
        )
    return "\n".join([format_table(table, numeric=True), "", *notes])


def _pairs(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    return [name + ending for name in names for ending in endings]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
