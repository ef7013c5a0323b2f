"""`python -m whalepod.tools.measure COMMAND`: the engine's parts, each by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from cyclopts import App

from whalepod.server.config import EngineConfig
from whalepod.tools.bench.engine import DecodeConfig
from whalepod.tools.cli import GROUPS, run_app
from whalepod.tools.flags import command_of
from whalepod.tools.measure.drafts import measure_drafts
from whalepod.tools.measure.ep import measure_ep
from whalepod.tools.measure.ep_rank import EpConfig
from whalepod.tools.measure.passes import (
    DecodePassesConfig,
    PrefillPassesConfig,
    measure_decode,
    measure_prefill,
)
from whalepod.tools.measure.ranks import RanksConfig, measure_ranks
from whalepod.tools.measure.steps import StepsConfig, measure_steps

COMMANDS: dict[str, tuple[Callable[..., int], tuple[type, ...]]] = {
    "decode": (measure_decode, (EngineConfig, DecodePassesConfig)),
    "prefill": (measure_prefill, (EngineConfig, PrefillPassesConfig)),
    "drafts": (measure_drafts, (EngineConfig, DecodeConfig)),
    "steps": (measure_steps, (EngineConfig, StepsConfig)),
    "ranks": (measure_ranks, (EngineConfig, RanksConfig)),
    "ep": (measure_ep, (EpConfig,)),
}


def make_app() -> App:
    """Build the command tree."""
    app = App(
        name="python -m whalepod.tools.measure",
        help="Measure the engine's parts, each by itself.",
        help_format="plaintext",
        result_action="return_value",
    )
    for name, (run, configs) in COMMANDS.items():
        positional = ("model",) if EngineConfig in configs else ()
        groups = {**GROUPS, configs[-1]: "Measurement"}
        command = command_of(run, *configs, groups=groups, positional=positional, env_fields=())
        app.command(command, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_app(make_app(), arguments)


if __name__ == "__main__":
    sys.exit(main())
