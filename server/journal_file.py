"""The file of `--record`: a recording that fails ends, and serving goes on."""

from __future__ import annotations

import atexit
import io
import logging
import os

from whalepod.server.errors import StartupError

logger = logging.getLogger(__name__)


class JournalFile(io.BufferedWriter):
    """Takes frames until one cannot be written (a full disk); later ones are dropped.

    Replay ends where the last whole frame does.
    """

    _has_failed = False

    def write(self, data: object) -> int:
        if not self._has_failed:
            try:
                return super().write(data)  # type: ignore[arg-type]
            except OSError as error:
                self._stop(error)
        return 0

    def flush(self) -> None:
        if not self._has_failed:
            try:
                super().flush()
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._has_failed = True
        logger.error("the recording stops here, serving goes on: %s", error.strerror)


def open_journal(path: str | None) -> JournalFile | None:
    """Create the file of `--record`; only its owner may read the prompts in it.

    Raises StartupError.
    """
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise StartupError(f"cannot record to {path}: {error.strerror}") from error
    file = JournalFile(io.FileIO(descriptor, "wb"))
    # an engine that fails is frozen for the garbage collector: its last steps would be lost
    atexit.register(file.close)
    return file
