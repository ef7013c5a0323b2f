"""`whalepod bench ...`: the commands, each importing what it runs only when it runs."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App

from whalepod.server.config import EngineConfig
from whalepod.tools.bench.config import BenchServeConfig
from whalepod.tools.bench.decode import DecodeConfig
from whalepod.tools.bench.ep import EpConfig
from whalepod.tools.bench.prefill import PrefillConfig
from whalepod.tools.bench.ranks import RanksConfig
from whalepod.tools.flags import Groups, add_command


def add_bench_commands(app: App, groups: Groups, client_env: Sequence[str]) -> None:
    """Register them below `bench`; `client_env` are the fields that the environment may set."""
    bench = App(
        name="bench", help="Measure a server, the engine, or its parts.", help_format="plaintext"
    )
    app.command(bench)
    add_command(
        bench, bench_serve, BenchServeConfig, name="serve", groups=groups, env_fields=client_env
    )
    add_command(bench, bench_ep, EpConfig, name="ep", groups=groups, env_fields=())
    for name, run, *configs in (
        ("decode", bench_decode, EngineConfig, DecodeConfig),
        ("prefill", bench_prefill, EngineConfig, PrefillConfig),
        ("ranks", bench_ranks, EngineConfig, RanksConfig),
    ):
        add_command(
            bench, run, *configs, name=name, groups=groups, positional=("model",), env_fields=()
        )


def bench_serve(config: BenchServeConfig) -> int:
    """Load a running OpenAI-compatible server and measure it.

    Closed loop with --concurrency (a list runs one after the other), open loop with
    --request-rate, or the arrivals of a --trace.
    """
    from whalepod.tools.bench.run import bench_serve as run

    return run(config)


def bench_decode(engine: EngineConfig, config: DecodeConfig) -> int:
    """Measure in this process what speculation brings: rates, tokens per forward, acceptance.

    MODEL answers the same prompts with 0 to 4 drafts and with the adaptive depth, in turns.
    """
    from whalepod.tools.bench.decode import bench_decode as run

    return run(engine, config)


def bench_ep(config: EpConfig) -> int:
    """Measure dispatch and combine between ranks of this machine, beside a copy of the same bytes.

    Send and receive phases apart, bytes on the wire, GB/s, and the limit of this run.
    """
    from whalepod.tools.bench.ep import bench_ep as run

    return run(config)


def bench_ranks(engine: EngineConfig, config: RanksConfig) -> int:
    """Measure decoding with --expert-parallel-size beside one engine with all threads.

    MODEL is loaded by both, and both answer the same prompts in turns. No server is needed.
    """
    from whalepod.tools.bench.ranks import bench_ranks as run

    return run(engine, config)


def bench_prefill(engine: EngineConfig, config: PrefillConfig) -> int:
    """Measure how fast prompts are computed, against the limits of this machine.

    MODEL is a checkpoint folder, a preset or a Hugging Face id. No server is needed.
    """
    from whalepod.tools.bench.prefill import bench_prefill as run

    return run(engine, config)
