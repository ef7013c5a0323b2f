"""What was lost, an engine or a rank, is started until it comes up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from whalepod.server.errors import GroupLost

RETRY_S = 1.0
"""From a start that failed to the next one; then twice as long each time."""

logger = logging.getLogger(__name__)


async def retry_start(start: Callable[[], Awaitable[object]], name: str) -> None:
    """Call `start` until it succeeds. Logs and raises GroupLost once it never will."""
    retry_s = RETRY_S
    while True:
        try:
            await start()
            return
        except GroupLost as error:
            logger.error("%s", error)
            raise
        except Exception as error:
            logger.error("%s did not come up and is tried again: %s", name, error)
            await asyncio.sleep(retry_s)
            retry_s *= 2
