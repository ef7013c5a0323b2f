"""Deadlines: of several waits in a row, and of a call that has none of its own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from whalepod.server.errors import StartupError

FIRST_REPORT_S = 5.0
NEXT_REPORT_S = 15.0

LOOK_S = 0.1
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Deadline:
    """One for several waits in a row, which tells people what is waited for.

    Begins when it is made. why_stop: why to wait no longer; None: wait.
    """

    def __init__(
        self,
        timeout_s: float,
        why_stop: Callable[[], str | None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._why_stop = why_stop
        self._clock = clock
        self._started = clock()
        self._next_report_s = FIRST_REPORT_S

    def allows(self, what: str) -> bool:
        """Return whether to wait on for `what`. Raises StartupError if told to stop.

        Every now and then says "waiting for `what`, 31 s of 300 s".
        """
        if (reason := self._why_stop()) is not None:
            raise StartupError(reason)
        passed_s = self._clock() - self._started
        if passed_s >= self.timeout_s:
            return False
        if passed_s >= self._next_report_s:
            self._next_report_s = passed_s + NEXT_REPORT_S
            logger.info("waiting for %s, %.0f s of %g s", what, passed_s, self.timeout_s)
        return True


def call_within(timeout_s: float, function: Callable[[], T]) -> T:
    """Return what `function` returns. Raises TimeoutError, and its RuntimeError.

    A call that hangs in a library hangs there for ever, so it runs in a thread, which is then left
    as it is. Looks are counted, not seconds: a process that was stopped, or whose interpreter a
    compiler held for long, must not blame the one it called.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=run, name="call-within", daemon=True).start()
    for _ in range(math.ceil(timeout_s / LOOK_S)):
        if future in wait([future], LOOK_S).done:
            return future.result()
    raise TimeoutError
