"""Runs tokenizing and templating on a few threads, with a bound on what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from whalepod.server.gateway.api_errors import ApiError

Result = TypeVar("Result")


class Offload:
    """A small thread pool for work that would hold up the event loop."""

    def __init__(self, num_threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="whalepod-tokenizer")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, computed on a thread; ApiError queue_full when too much waits."""
        if self._num_pending >= self._max_pending:
            raise ApiError("queue_full", f"{self._num_pending} prompts wait for the tokenizer")
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Drop what waits and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
