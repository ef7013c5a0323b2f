"""`whalepod serve`: an engine process, and the gateway in this one."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from whalepod.server.config import EngineConfig, GatewayConfig
from whalepod.server.errors import GroupLost, StartupError
from whalepod.tools.run_gateway import run_gateway
from whalepod.tools.start_report import (
    check_files_for_chats,
    claim_port,
    model_name,
    parsers_of,
    start_report,
)

if TYPE_CHECKING:
    from whalepod.server.cluster.node_plan import NodePlan
    from whalepod.server.cluster.rank_group import RankGroup
    from whalepod.server.engine_launcher import EngineProcess
    from whalepod.server.tokenizer import TextTokenizer


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
    check_files_for_chats(gateway, folder)
    gateway = replace(
        gateway,
        served_model_name=gateway.served_model_name or (model_name(engine.source.model),),
    )
    # the gateway's imports and tokenizer take as long as a small model: load both at once
    with ThreadPoolExecutor(1) as pool:
        family = pool.submit(parsers_of, gateway, folder)
        if gateway.names_parsers:
            family.result()  # a name that does not fit is refused before the weights are read
        tokenizer = pool.submit(_load_tokenizer, folder, gateway.chat_template)
        with _new_engine(engine, plan, folder) as process:
            print(start_report(gateway, process.info, family.result(), plan))
            sys.stdout.flush()
            if not gateway.is_local and not gateway.asks_for_key:
                _note(
                    f"warning: anyone who reaches {gateway.host}:{gateway.port} may use this "
                    "server; pass --api-key KEY to ask for a key"
                )
            reason = run_gateway(gateway, process, tokenizer.result(), folder)
            if reason is not None:
                raise GroupLost(reason)
    return 0


def work(engine: EngineConfig, plan: NodePlan) -> int:
    """Start this machine's ranks for the gateway of machine 0, and stay until it ends.

    Raises StartupError and GroupLost, one sentence.
    """
    from whalepod.server.cluster.join_group import run_worker

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


def _load_tokenizer(folder: Path, chat_template: str | None) -> TextTokenizer:
    import whalepod.server.gateway.run  # noqa: F401  (its imports take time, too)
    from whalepod.server.tokenizer import TextTokenizer

    return TextTokenizer.from_folder(folder, Path(chat_template) if chat_template else None)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
