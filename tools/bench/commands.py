"""`whalepod bench ...`: the commands; what they measure is imported when they run."""

from __future__ import annotations

from cyclopts import App

from whalepod.server.config import EngineConfig
from whalepod.tools.bench.config import (
    BenchServeConfig,
    EpConfig,
    LoadConfig,
    ReportConfig,
    TargetConfig,
    WorkloadConfig,
)
from whalepod.tools.bench.decode import DecodeConfig, bench_decode
from whalepod.tools.bench.ep import bench_ep
from whalepod.tools.bench.prefill import PrefillConfig, bench_prefill
from whalepod.tools.bench.ranks import RanksConfig, bench_ranks
from whalepod.tools.bench.run import bench_serve
from whalepod.tools.cli import GROUPS as SERVE_GROUPS
from whalepod.tools.client import CLIENT_ENV
from whalepod.tools.flags import add_command

GROUPS: dict[type | str, str] = {
    **SERVE_GROUPS,
    TargetConfig: "Server",
    WorkloadConfig: "Workload",
    LoadConfig: "Load",
    ReportConfig: "Report",
    **dict.fromkeys((DecodeConfig, EpConfig, PrefillConfig), "Measurement"),
}

bench = App(
    name="bench", help="Measure a server, the engine, or its parts.", help_format="plaintext"
)
add_command(
    bench, bench_serve, BenchServeConfig, name="serve", groups=GROUPS, env_fields=CLIENT_ENV
)
add_command(bench, bench_ep, EpConfig, name="ep", groups=GROUPS, env_fields=())
for _name, _run, *_configs in (
    ("decode", bench_decode, EngineConfig, DecodeConfig),
    ("prefill", bench_prefill, EngineConfig, PrefillConfig),
    ("ranks", bench_ranks, EngineConfig, RanksConfig),
):
    add_command(
        bench, _run, *_configs, name=_name, groups=GROUPS, positional=("model",), env_fields=()
    )
