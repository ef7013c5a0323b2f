"""`whalepod serve`: an engine process, and the gateway in this one."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import whalepod
from whalepod.server.config import EngineConfig, GatewayConfig
from whalepod.server.errors import GroupLost, StartupError

if TYPE_CHECKING:
    from whalepod.server.channel import EngineChannel
    from whalepod.server.cluster.node_plan import NodePlan
    from whalepod.server.cluster.rank_group import RankGroup
    from whalepod.server.cluster.router import RankRouter
    from whalepod.server.engine_launcher import EngineProcess
    from whalepod.server.messages import EngineInfo
    from whalepod.server.tokenizer import TextTokenizer

END_POLL_S = 0.2
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    config: Annotated[Path | None, "TOML file whose keys are these flags' names"] = None


def serve(engine: EngineConfig, gateway: GatewayConfig, plan: NodePlan | None = None) -> int:
    """Start both processes and serve until a signal. Raises StartupError, one sentence.

    plan  this machine's part, if several serve together; then raises GroupLost, too
    """
    _begin()
    gateway = claim_port(gateway)
    _note(f"loading {engine.source.model} ...")
    folder = find_model(engine)
    family = parsers_of(gateway, folder)
    gateway = replace(
        gateway,
        served_model_name=gateway.served_model_name or (model_name(engine.source.model),),
    )
    # the gateway's imports and tokenizer take as long as a small model: load both at once
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(_load_tokenizer, folder, gateway.chat_template)
        with _new_engine(engine, plan, folder) as process:
            print(start_report(gateway, process.info, family, plan))
            _warn_if_open(gateway)
            sys.stdout.flush()
            reason = _run_gateway(gateway, process, tokenizer.result(), folder)
            if reason is not None:
                raise GroupLost(reason)
    return 0


def work(engine: EngineConfig, plan: NodePlan) -> int:
    """Start this machine's ranks for the gateway of machine 0, and stay until it ends.

    Raises StartupError and GroupLost, one sentence.
    """
    from whalepod.server.cluster.run_worker import run_worker

    _begin()
    stop = threading.Event()

    def tell(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    _note(f"worker: ranks {list(plan.ranks)} of {plan.num_ranks} ({plan.source})")
    run_worker(engine, plan, find_model(engine), stop)
    return 0


def _begin() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the report below says it all


def find_model(engine: EngineConfig) -> Path:
    """Return the checkpoint's folder. Raises StartupError."""
    from whalepod.models.source import SourceError, resolve_model

    source = engine.source
    try:
        return resolve_model(
            source.model, source.revision, with_weights=source.load_format != "dummy"
        )
    except SourceError as error:
        raise StartupError(str(error)) from error


def _new_engine(
    engine: EngineConfig, plan: NodePlan | None, folder: Path
) -> EngineProcess | RankGroup:
    """Return the one engine, or the ranks, that serve; not started yet."""
    from whalepod.server.cluster.rank_group import RankGroup
    from whalepod.server.engine_launcher import EngineProcess

    if engine.parallel.expert_parallel_size == 1:
        return EngineProcess(engine)
    return RankGroup(engine, plan, folder)


def claim_port(gateway: GatewayConfig) -> GatewayConfig:
    """Fail now, not after minutes of loading, if the port is taken; settle what port 0 means."""
    if gateway.admin_port:
        _claim(gateway.admin_host, gateway.admin_port, "--admin-port or --admin-host")
    return replace(gateway, port=_claim(gateway.host, gateway.port, "--port or --host"))


def _claim(host: str, port: int, flags: str) -> int:
    from whalepod.tools.machine import bind_port

    try:
        return bind_port(host, port)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with {flags}"
        ) from error


def model_name(model: str) -> str:
    """Name a model in the API: a folder by its own name, anything else as it was asked for."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def parsers_of(gateway: GatewayConfig, folder: Path) -> str | None:
    """Name the family that divides answers; None: the model has no chat template.

    Raises StartupError for a parser that does not fit: now, not after minutes of loading.
    """
    from whalepod.server.gateway.chat_formats.registry import choose_chat_format, read_chat_template

    override = Path(gateway.chat_template) if gateway.chat_template else None
    template = read_chat_template(folder, override)
    family = choose_chat_format(
        template,
        reasoning_parser=gateway.reasoning_parser,
        tool_call_parser=gateway.tool_call_parser,
    )
    if family is not None:
        return family.name
    return None if template is None else "none (answers are plain text)"


def start_report(
    gateway: GatewayConfig, info: EngineInfo, family: str | None, plan: NodePlan | None = None
) -> str:
    """Say on one screen what is served, how much fits, and how to try it.

    family  who parses chats, for people; None: the model has no chat template
    plan    of the machines, if there are several
    """
    name = gateway.served_model_name[0]
    num_tokens = info.num_blocks * info.block_tokens
    fitting = num_tokens / info.max_model_len
    rows = {
        "model": f"{name} ({info.model_type}), {info.dtype}, {_size(info.weights_bytes)}",
        "kernels": info.kernels,
        "ranks": _ranks(info, plan),
        "KV cache": f"{info.num_blocks:,} blocks of {info.block_tokens} = {num_tokens:,} tokens, "
        f"{_size(num_tokens * info.kv_bytes_per_token)}",
        "at once": f"{info.max_num_seqs} requests; the cache holds {fitting:.1f} of "
        f"{info.max_model_len:,} tokens",
        "drafts": info.speculation,
        "parsers": family or "none (no chat template: use /v1/completions)",
        "keys": "asked for" if gateway.asks_for_key else "none",
        "ready in": f"{info.load_seconds:.1f} s",
        "url": f"{base_url(gateway)}  (docs at /docs)",
    }
    if gateway.admin_port:
        rows["admin"] = f"http://{gateway.admin_host}:{gateway.admin_port}"
    lines = [f"whalepod {whalepod.__version__}"]
    lines += [f"  {title:<9} {text}" for title, text in rows.items() if text]
    return "\n".join([*lines, "", "Try:", example(gateway, name, family is not None), ""])


def _ranks(info: EngineInfo, plan: NodePlan | None) -> str:
    """Say what carries rows between how many ranks; nothing where there is one."""
    if info.num_ranks == 1:
        return ""
    text = f"{info.num_ranks} over {info.transport}"
    return text if plan is None else f"{text}, on {plan.num_nodes} machines ({plan.source})"


def example(gateway: GatewayConfig, name: str, has_chat_template: bool) -> str:
    """A curl command to paste."""
    route, question = "completions", {"prompt": "Hello", "max_tokens": 20}
    if has_chat_template:
        route, question = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({"model": name, **question})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if gateway.asks_for_key else ""
    return (
        f"  curl {base_url(gateway)}/v1/{route}{key} \\\n"
        f"    -H 'Content-Type: application/json' -d '{body}'"
    )


def base_url(gateway: GatewayConfig) -> str:
    """The address to use on this machine."""
    host = _ANY_ADDRESS.get(gateway.host, gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def _load_tokenizer(folder: Path, chat_template: str | None) -> TextTokenizer:
    import whalepod.server.gateway.run  # noqa: F401  (its imports take time, too)
    from whalepod.server.tokenizer import TextTokenizer

    return TextTokenizer.from_folder(folder, Path(chat_template) if chat_template else None)


def _run_gateway(
    gateway: GatewayConfig,
    process: EngineProcess | RankGroup,
    tokenizer: TextTokenizer,
    folder: Path,
) -> str | None:
    """Serve until a signal, or until there is nothing left to serve with: return why, then."""
    import uvloop

    from whalepod.server.gateway.run import serve as serve_http
    from whalepod.server.tokenizer import read_default_params

    async def run() -> str | None:
        async with process.channel() as upstream:
            told_to_stop = asyncio.Event()
            watch = asyncio.create_task(_tell_to_stop(process, upstream, told_to_stop))
            try:
                await serve_http(
                    gateway,
                    upstream,
                    tokenizer,
                    default_params=read_default_params(folder),
                    told_to_stop=told_to_stop,
                )
            finally:
                watch.cancel()
            return upstream.failure

    return uvloop.run(run())


async def _tell_to_stop(
    process: EngineProcess | RankGroup,
    upstream: EngineChannel | RankRouter,
    told_to_stop: asyncio.Event,
) -> None:
    """Let the gateway stop when another machine asks for it, or when no engine will be back."""
    while upstream.failure is None and not process.is_told_to_stop:
        await asyncio.sleep(END_POLL_S)
    told_to_stop.set()


def _warn_if_open(gateway: GatewayConfig) -> None:
    if not gateway.is_local and not gateway.asks_for_key:
        _note(
            f"warning: anyone who reaches {gateway.host}:{gateway.port} may use this server; "
            "pass --api-key KEY to ask for a key"
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _size(num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"
    )
