"""`whalepod bench ...`: the commands; what they measure is imported when they run."""

from __future__ import annotations

from cyclopts import App

from whalepod.server.config import EngineConfig
from whalepod.tools.bench.config import (
    BenchServeConfig,
    LoadConfig,
    ReportConfig,
    TargetConfig,
    WorkloadConfig,
)
from whalepod.tools.bench.engine import DecodeConfig, PrefillConfig, bench_decode, bench_prefill
from whalepod.tools.bench.run import bench_serve
from whalepod.tools.cli import GROUPS as SERVE_GROUPS
from whalepod.tools.client import CLIENT_ENV
from whalepod.tools.flags import command_of

GROUPS: dict[type | str, str] = {
    **SERVE_GROUPS,
    TargetConfig: "Server",
    WorkloadConfig: "Workload",
    LoadConfig: "Load",
    ReportConfig: "Report",
    **dict.fromkeys((DecodeConfig, PrefillConfig), "Measurement"),
}

bench = App(
    name="bench", help="Measure a server, or the engine without one.", help_format="plaintext"
)
bench.command(
    command_of(bench_serve, BenchServeConfig, groups=GROUPS, env_fields=CLIENT_ENV), name="serve"
)
for _name, _run, _config in (
    ("decode", bench_decode, DecodeConfig),
    ("prefill", bench_prefill, PrefillConfig),
):
    _command = command_of(
        _run, EngineConfig, _config, groups=GROUPS, positional=("model",), env_fields=()
    )
    bench.command(_command, name=_name)
