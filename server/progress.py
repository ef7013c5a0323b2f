"""How far a start has got: a bar for people, a line now and then for logs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

PROGRESS_S = 2.0
"""Seconds of silence at the start, and between two lines."""

logger = logging.getLogger(__name__)


def reporter(
    title: str, unit: str, divisor: int = 1, *, is_terminal: bool | None = None
) -> Callable[[int, int], None]:
    """Return what takes how many are done, of how many; counts are shown divided by `divisor`.

    What is over within two seconds is not shown at all. `is_terminal` None: ask stderr.
    """
    on_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
    return _bar(title, unit, divisor) if on_terminal else _lines(title, unit, divisor)


def _lines(title: str, unit: str, divisor: int) -> Callable[[int, int], None]:
    last_s = time.monotonic()

    def report(num_done: int, num_all: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > PROGRESS_S:
            last_s = time.monotonic()
            logger.info("%s: %d of %d %s", title, num_done // divisor, num_all // divisor, unit)

    return report


def _bar(title: str, unit: str, divisor: int) -> Callable[[int, int], None]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    started_s = time.monotonic()
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    console = Console(stderr=True, force_terminal=True)
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(title, total=None)

    def report(num_done: int, num_all: int) -> None:
        if time.monotonic() - started_s < PROGRESS_S:
            return
        progress.update(task, completed=num_done // divisor, total=num_all // divisor)
        progress.start()  # after the update: it draws at once, and later ones wait for a tenth
        if num_done >= num_all:
            progress.stop()

    return report
