"""The command line of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cyclopts import App

from whalepod.tools.cli import GROUPS, run_app
from whalepod.tools.flags import Groups, command_of


def run_alone(
    module: str,
    run: Callable[..., int],
    *configs: type,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a tool that is a module of its own, with MODEL as its one positional argument."""
    app = App(name=f"python -m {module}", help_format="plaintext", result_action="return_value")
    groups: Groups = {**GROUPS, configs[-1]: "Measurement"}
    app.default(command_of(run, *configs, groups=groups, positional=("model",), env_fields=()))
    return run_app(app, arguments)
