"""A deadline for several waits in a row that tells people what is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from whalepod.server.errors import StartupError

FIRST_REPORT_S = 5.0
NEXT_REPORT_S = 15.0

logger = logging.getLogger(__name__)


class Deadline:
    """Begins when it is made. why_stop: why to wait no longer; None: wait."""

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
