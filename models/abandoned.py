"""What a process that was killed has left half written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ABANDONED_S = 3600.0
"""Whoever still writes has touched the file, or a file of the folder, since."""


def drop_abandoned(partials: Iterable[Path]) -> None:
    """Remove the files and folders among `partials` that nobody goes on with."""
    for partial in partials:
        with suppress(FileNotFoundError):  # it was finished just now
            newest_s = max(path.stat().st_mtime for path in (partial, *partial.glob("*")))
            if time.time() - newest_s <= ABANDONED_S:
                continue
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink()
