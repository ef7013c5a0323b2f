"""A wait with a deadline that tells people what it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from whalepod.server.errors import StartupError

FIRST_WORD_S = 5.0
NEXT_WORD_S = 15.0

logger = logging.getLogger(__name__)


class Waiting:
    """Time that is left for several waits in a row.

    why_stop  says why to wait no longer; None: wait
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
        self._next_word_s = FIRST_WORD_S

    def goes_on(self, what: str) -> bool:
        """Say whether to wait on; False: the time is over. Raises StartupError if told to stop.

        Every now and then says "waiting for `what`, 31 s of 300 s".
        """
        if (reason := self._why_stop()) is not None:
            raise StartupError(reason)
        passed_s = self._clock() - self._started
        if passed_s >= self.timeout_s:
            return False
        if passed_s >= self._next_word_s:
            self._next_word_s = passed_s + NEXT_WORD_S
            logger.info("waiting for %s, %.0f s of %g s", what, passed_s, self.timeout_s)
        return True
