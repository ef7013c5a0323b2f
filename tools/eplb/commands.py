"""`whalepod eplb ...`: the commands."""

from __future__ import annotations

from cyclopts import App

from whalepod.tools.client import CLIENT_ENV
from whalepod.tools.eplb.live import ApplyConfig, RecordConfig, ShowConfig, apply, record, show
from whalepod.tools.eplb.offline import PlanConfig, SimulateConfig, plan, simulate_trace
from whalepod.tools.flags import command_of

eplb = App(
    name="eplb",
    help="Look at where experts lie, plan where they should, and move them.",
    help_format="plaintext",
    result_action="return_value",
)
eplb.command(command_of(show, ShowConfig, env_fields=CLIENT_ENV))
eplb.command(command_of(plan, PlanConfig, positional=("loads",), env_fields=()))
eplb.command(
    command_of(apply, ApplyConfig, positional=("placement",), env_fields=("admin_url", "admin_key"))
)
eplb.command(
    command_of(simulate_trace, SimulateConfig, positional=("trace",), env_fields=()),
    name="simulate",
)
eplb.command(command_of(record, RecordConfig, positional=("out",), env_fields=CLIENT_ENV))
