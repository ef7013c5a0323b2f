"""What the metrics observe of requests and of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from prometheus_client import Histogram

from whalepod.server.gateway.metrics import Metrics

INTERVAL_S = 0.1
"""Between two looks at how late the event loop is."""


@dataclass(slots=True)
class _ChoiceTimes:
    first_s: float
    last_s: float
    num_tokens: int = 0


class PromptTimer:
    """Observes one prompt of a request in the engine: its wait, then the times of its choices."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._admitted_s = clock()
        self._has_output = False
        self._choices: dict[int, _ChoiceTimes] = {}

    def output(self, index: int, num_tokens: int, queue_s: float) -> None:
        """Note that a choice got tokens now, after `queue_s` in the queue of the engine."""
        now_s = self._clock()
        if not self._has_output:
            self._has_output = True
            self._admitted_s += queue_s
            self._metrics.queue.observe(queue_s)
        if not num_tokens:
            return
        times = self._choices.get(index)
        if times is None:
            if not self._choices:
                self._metrics.prefill.observe(max(now_s - self._admitted_s, 0.0))
            times = self._choices[index] = _ChoiceTimes(now_s, now_s)
        else:
            self._metrics.inter_token.observe(now_s - times.last_s)
        times.last_s = now_s
        times.num_tokens += num_tokens

    def finished(self, index: int, reason: str) -> None:
        """Note that a choice ended by itself."""
        metrics, times = self._metrics, self._choices.get(index)
        metrics.success.labels(reason).inc()
        metrics.generation_tokens.observe(times.num_tokens if times else 0)
        if times is None:
            return
        decode_s = times.last_s - times.first_s
        metrics.decode.observe(decode_s)
        metrics.inference.observe(max(times.last_s - self._admitted_s, 0.0))
        if times.num_tokens > 1:
            metrics.time_per_token.observe(decode_s / (times.num_tokens - 1))


class RequestTimer:
    """Observes one HTTP request: its first token once, its prompts, its end once."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        arrived_s: float | None = None,
    ) -> None:
        """`arrived_s` is on the clock; None: now."""
        self._metrics = metrics
        self._clock = clock
        self._arrived_s = clock() if arrived_s is None else arrived_s
        self._has_token = False

    def prompt(self, num_tokens: int) -> PromptTimer:
        """Note that a prompt goes to the engine now."""
        self._metrics.prompt_tokens.observe(num_tokens)
        return PromptTimer(self._metrics, self._clock)

    def token(self) -> None:
        """Note that a choice has a token."""
        if not self._has_token:
            self._has_token = True
            self._metrics.first_token.observe(self._clock() - self._arrived_s)

    def ended(self, failure: str | None) -> None:
        """Note the end of the request: `failure` is "error", "abort" (the client left) or None."""
        if failure is None:
            self._metrics.end_to_end.observe(self._clock() - self._arrived_s)
        else:
            self._metrics.success.labels(failure).inc()


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
