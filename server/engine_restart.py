"""A single engine that is lost is started again, as the ranks of a group are."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from whalepod.server.channel import EXIT_POLL_S, EngineChannel
from whalepod.server.engine_launcher import EngineProcess
from whalepod.server.errors import GroupLost
from whalepod.server.retry_start import retry_start

logger = logging.getLogger(__name__)


class RestartingChannel(EngineChannel):
    """The gateway's end of an engine that is started again whenever it is lost.

    What the lost engine had in hand fails; until the next one can serve, requests are refused.
    """

    def __init__(self, process: EngineProcess) -> None:
        super().__init__(process.socket.raw, process.info, process.exit_reason)
        self._process = process
        self._failure_for_good: str | None = None

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; an engine that is started again is no failure."""
        return self._failure_for_good

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._repairing = asyncio.create_task(self._repair())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._process.stop_restarting()
        self._repairing.cancel()
        await asyncio.gather(self._repairing, return_exceptions=True)
        await self.detach()

    async def _repair(self) -> None:
        while True:
            while not self.is_lost:
                await asyncio.sleep(EXIT_POLL_S)
            await self.detach()
            try:
                await retry_start(lambda: asyncio.to_thread(self._process.restart), "the engine")
            except GroupLost as error:
                self._failure_for_good = str(error)
                return
            self.attach(self._process.socket.raw, self._process.info)
            logger.info("the engine is back")
