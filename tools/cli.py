"""The command `whalepod`: parses flags, imports the one command that was asked for, exits.

Exit codes: 0 done, 1 it did not work, 2 the command line is wrong. Errors are one sentence on
stderr that says what to change; `--debug` shows the traceback instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, UnusedCliTokensError

import whalepod
from whalepod.mtp.config import SpeculationConfig
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.cluster.node_plan import NodePlan, plan_nodes
from whalepod.server.config import (
    DeviceConfig,
    EngineConfig,
    EplbConfig,
    GatewayConfig,
    ModelSource,
    NodesConfig,
    ParallelConfig,
)
from whalepod.server.errors import GroupLost, StartupError
from whalepod.tools.client import CLIENT_ENV, ClientError
from whalepod.tools.config_check import CheckOptions, FlagsOptions, Sources
from whalepod.tools.doctor import DoctorConfig, doctor
from whalepod.tools.flags import Flag, UsageError, command_of, flags_of, read_config_file
from whalepod.tools.ps import PsConfig, ps
from whalepod.tools.serve import ServeOptions
from whalepod.tools.synth import SynthConfig, synth
from whalepod.tools.terminal import (
    ChatConfig,
    CompleteConfig,
    Sampling,
    ServerAddress,
    chat,
    complete,
)

GROUPS: dict[type | str, str] = {
    ModelSource: "Model",
    DeviceConfig: "Device",
    SchedulerConfig: "Scheduler",
    SpeculationConfig: "Speculation",
    ParallelConfig: "Parallel",
    EplbConfig: "Balance of experts",
    NodesConfig: "Machines",
    GatewayConfig: "Server",
    **dict.fromkeys(("api_key", "api_key_file", "cors_allow_origin"), "Access"),
    **dict.fromkeys(("admin_port", "admin_host", "admin_key"), "Access"),
    **dict.fromkeys(("reasoning_parser", "tool_call_parser", "chat_template"), "Answers"),
    "structured_outputs_backend": "Answers",
    **dict.fromkeys(("max_body_bytes", "request_timeout_s", "drain_timeout_s"), "Limits"),
    **dict.fromkeys(("sse_keep_alive_interval_s", "ready_timeout_s"), "Limits"),
    **dict.fromkeys(("enable_test_hooks", "test_script", "record"), "Debugging"),
    ServerAddress: "Server",
    Sampling: "Sampling",
    EngineConfig: "Debugging",
    ServeOptions: "Command line",
    CheckOptions: "Command line",
}
SERVE_CONFIGS = (EngineConfig, GatewayConfig, NodesConfig, ServeOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionConfig:
    shell: Annotated[Literal["bash", "zsh", "fish"], "the shell to complete for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    file: Annotated[Path, "log written by `whalepod serve --record FILE`"]


def serve(
    engine: EngineConfig, gateway: GatewayConfig, nodes: NodesConfig, options: ServeOptions
) -> int:
    """Serve a model behind an OpenAI-compatible API.

    MODEL is a checkpoint folder in Hugging Face layout, a preset or a Hugging Face id; without
    one the embedded model `tiny` is served. Each flag can also be set by an environment variable
    (--max-model-len: WHALEPOD_MAX_MODEL_LEN) and by a key of the --config file; the command line
    wins, then the environment, then the file. Numbers may be written 25.6k, 512M or 2G.
    """
    from whalepod.tools.serve import serve as run, work

    plan = plan_of(engine, nodes)
    return run(engine, gateway, plan) if plan is None or plan.is_leader else work(engine, plan)


def worker(engine: EngineConfig, nodes: NodesConfig, options: ServeOptions) -> int:
    """Run this machine's ranks of a model that machine 0 serves.

    Takes the flags of `whalepod serve` on machine 0, the same ones, and --node-rank. Under
    torchrun or in a LeaderWorkerSet the environment says the rest.
    """
    from whalepod.tools.serve import work

    plan = plan_of(engine, nodes)
    if plan is None or plan.is_leader:
        raise UsageError(
            "a worker is one of several machines, and not the first: give --num-nodes and "
            "--node-rank 1 or higher, or start it by torchrun or a LeaderWorkerSet"
        )
    return work(engine, plan)


def plan_of(engine: EngineConfig, nodes: NodesConfig) -> NodePlan | None:
    """Return this machine's part in a group of several; None: it serves alone."""
    return plan_nodes(nodes, engine.parallel.expert_parallel_size, os.environ)


def serve_flags() -> dict[str, Flag]:
    """Return the flags of `whalepod serve` by field name."""
    return flags_of(SERVE_CONFIGS, GROUPS)


def replay(config: ReplayConfig) -> int:
    """Feed a recorded log to a fresh scheduler and report the first step that differs."""
    from whalepod.scheduler.journal import replay as run

    with config.file.open("rb") as journal:
        difference = run(journal)
    if difference is None:
        print(f"{config.file}: every step is the same")
        return 0
    print(
        f"{config.file}: step {difference.step}, frame {difference.frame}, {difference.call}: "
        f"recorded {difference.recorded}, replayed {difference.replayed}"
    )
    return 1


def make_app() -> App:
    """Build the command tree. Imports no torch, no transformers, no web framework."""
    sources = Sources()
    app = App(
        name="whalepod",
        help="Serve DeepSeek-V3-style models behind an OpenAI-compatible API.\n\n"
        "Start with: whalepod serve",
        help_epilogue="`whalepod COMMAND --help` lists a command's flags; "
        "--debug shows the traceback of an error.",
        help_format="plaintext",
        version=whalepod.__version__,
        config=(read_config_file, sources),
        result_action="return_value",
    )
    app["--help"].group = app["--version"].group = "Options"
    _add_configuration_commands(app, sources)
    app.command(  # imported when it is asked for
        "whalepod.tools.bench.commands:bench",
        name="bench",
        help="Measure a server, or the engine without one.",
    )
    app.command(
        "whalepod.tools.eplb.commands:eplb",
        name="eplb",
        help="Look at where experts lie, plan where they should, and move them.",
    )
    served = partial(command_of, groups=GROUPS, positional=("model",))
    client = partial(command_of, groups=GROUPS, env_fields=CLIENT_ENV)
    for command in (
        served(serve, *SERVE_CONFIGS),
        served(worker, EngineConfig, NodesConfig, ServeOptions),
        client(chat, ChatConfig),
        client(complete, CompleteConfig, positional=("prompt",)),
        command_of(ps, PsConfig, positional=("url",), env_fields=CLIENT_ENV),
        command_of(doctor, DoctorConfig, positional=("model",), env_fields=()),
        command_of(synth, SynthConfig, positional=("shape", "out"), env_fields=()),
        command_of(replay, ReplayConfig, positional=("file",), env_fields=()),
    ):
        app.command(command)
    return app


def _add_configuration_commands(app: App, sources: Sources) -> None:
    """Add `config check`, `flags` and `completion`."""

    def check(
        engine: EngineConfig,
        gateway: GatewayConfig,
        nodes: NodesConfig,
        options: ServeOptions,
        how: CheckOptions,
    ) -> int:
        """Check what `whalepod serve` would get, and say where each value comes from.

        Takes the flags of `whalepod serve`, reads the environment and the --config file as it
        does, and starts nothing. An unknown key of the file is refused by its name.
        """
        from whalepod.tools.config_check import check as run

        return run(serve_flags(), (engine, gateway, nodes, options), sources, how)

    def flags(options: FlagsOptions) -> int:
        """Find flags of `whalepod serve` by a word: name, environment variable, meaning.

        For example `whalepod flags cache`.
        """
        from whalepod.tools.config_check import list_flags

        return list_flags(serve_flags().values(), options)

    def completion(config: CompletionConfig) -> int:
        """Print a script that completes commands and flags.

        For bash: whalepod completion bash > ~/.local/share/bash-completion/completions/whalepod
        """
        print(app.generate_completion(prog_name="whalepod", shell=config.shell))
        return 0

    config = App(name="config", help="Look at the configuration.", help_format="plaintext")
    app.command(config)
    config.command(
        command_of(check, *SERVE_CONFIGS, CheckOptions, groups=GROUPS, positional=("model",))
    )
    app.command(command_of(flags, FlagsOptions, positional=("word",), env_fields=()))
    app.command(command_of(completion, CompletionConfig, positional=("shell",), env_fields=()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_app(make_app(), arguments)


def run_app(app: App, arguments: Sequence[str] | None) -> int:
    """Run an app and return the exit code; an error is one sentence on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code = app(words, exit_on_error=False, print_error=False) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # a reader that has seen enough, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 0
    except (UsageError, CycloptsError) as error:
        message, code = f"{_sentence(error)} (see `{_command(app, words)} --help`)", 2
        cause: Exception = error
    except (StartupError, GroupLost, ClientError, OSError, ValueError, RuntimeError) as error:
        message, code, cause = _sentence(error), 1, error
    except KeyboardInterrupt:
        return 130
    if debug:
        raise cause
    print(f"whalepod: {message}", file=sys.stderr)
    return code


def _sentence(error: Exception) -> str:
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or ['?'])[0]!r}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _command(app: App, words: Sequence[str]) -> str:
    """Return the command that `words` begin with, for an error's hint."""
    names = [*app.name]
    for word in words:
        if word.startswith("-") or word not in app:
            break
        app = app[word]
        names.append(word)
    return " ".join(names)
