"""The gateway in front of an engine that runs, until there is nothing left to serve with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from whalepod.server.config import GatewayConfig

if TYPE_CHECKING:
    from whalepod.server.channel import EngineChannel
    from whalepod.server.cluster.rank_group import RankGroup
    from whalepod.server.cluster.router import RankRouter
    from whalepod.server.engine_launcher import EngineProcess
    from whalepod.server.tokenizer import TextTokenizer

END_POLL_S = 0.2


def run_gateway(
    gateway: GatewayConfig,
    process: EngineProcess | RankGroup,
    tokenizer: TextTokenizer,
    folder: Path,
) -> str | None:
    """Serve until a signal, or until there is nothing left to serve with: return why, then."""
    import uvloop

    from whalepod.server.chat_template import read_default_params
    from whalepod.server.gateway.run import serve as serve_http

    async def run() -> str | None:
        async with process.restarting_channel() as upstream:
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
