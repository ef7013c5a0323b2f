"""What `whalepod serve` settles before it loads anything, and says when it is ready."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.tools.table import format_bytes

if TYPE_CHECKING:
    from whalepod.server.cluster.node_plan import NodePlan
    from whalepod.server.messages import EngineInfo

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


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


def check_files_for_chats(gateway: GatewayConfig, folder: Path) -> None:
    """Raise StartupError for a template or defaults that cannot be read: now, not after loading."""
    from whalepod.server.chat_template import read_chat_template, read_default_params

    read_chat_template(folder, Path(gateway.chat_template) if gateway.chat_template else None)
    read_default_params(folder)


def parsers_of(gateway: GatewayConfig, folder: Path) -> str | None:
    """Name the family that divides answers; None: the model has no chat template.

    Raises StartupError for a parser that does not fit: now, not after minutes of loading.
    """
    from whalepod.server.chat_template import read_chat_template
    from whalepod.server.gateway.chat_formats.registry import choose_chat_format

    override = Path(gateway.chat_template) if gateway.chat_template else None
    template = read_chat_template(folder, override)
    family = choose_chat_format(
        template,
        reasoning_parser=gateway.reasoning_parser,
        tool_call_parser=gateway.tool_call_parser,
    )
    if template is None:
        return None
    name = "none (answers are plain text)" if family is None else family.name
    if template.habits.renders_tools:
        return name
    if family is None:
        return f"{name}; tools are refused: the chat template leaves them out"
    return f"{name}; the chat template leaves tools out: they go into the system prompt"


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
        "model": f"{name} ({info.model_type}), {info.dtype}, {format_bytes(info.weights_bytes)}",
        "kernels": info.kernels,
        "ranks": _ranks(info, plan),
        "KV cache": f"{info.num_blocks:,} blocks of {info.block_tokens} = {num_tokens:,} tokens, "
        f"{format_bytes(num_tokens * info.kv_bytes_per_token)}",
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
