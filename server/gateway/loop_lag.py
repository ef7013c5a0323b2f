"""Measures how late the event loop is: whatever blocks it holds up every stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from prometheus_client import Histogram

INTERVAL_S = 0.1


@contextlib.asynccontextmanager
async def measuring_lag(histogram: Histogram) -> AsyncGenerator[None]:
    """Observe ten times a second by how much a timer of the running loop is late."""
    task = asyncio.create_task(_measure(histogram))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _measure(histogram: Histogram) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due_s = clock() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        histogram.observe(max(clock() - due_s, 0.0))
