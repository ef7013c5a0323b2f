"""Where each rank is: the last operation that it began, readable by others whatever becomes of it.

A rank that is stopped or hangs cannot say what it does; the file it shares with its launcher can.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from functools import lru_cache
from pathlib import Path

SLOT_BYTES = 256
_HEAD = struct.Struct("<qqH")
_MAX_TEXT = SLOT_BYTES - _HEAD.size


class ProgressBoard:
    """One slot per rank in a file of the group's folder, mapped by all.

    Every slot has one writer. A reader may catch a slot half written: that shows as a wrong name in
    a message for people, nothing is decided by it.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        size = num_ranks * SLOT_BYTES
        descriptor = os.open(folder / "progress", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def write(self, rank: int, step: int, operation: str) -> None:
        """Note that `rank` begins an operation; "": none runs."""
        text, start = _encode(operation), rank * SLOT_BYTES
        _HEAD.pack_into(self._map, start, time.monotonic_ns(), step, len(text))
        self._map[start + _HEAD.size : start + _HEAD.size + len(text)] = text

    def where(self, rank: int) -> str:
        """Return what a rank did last, for people."""
        start = rank * SLOT_BYTES
        began_ns, step, length = _HEAD.unpack_from(self._map, start)
        if not began_ns:
            return "it has not begun"
        text = self._map[start + _HEAD.size : start + _HEAD.size + min(length, _MAX_TEXT)]
        age_s = (time.monotonic_ns() - began_ns) / 1e9
        place = text.decode(errors="replace") or "between steps"
        return f"it is in {place} of step {step}, for {age_s:.1f} s"

    def close(self) -> None:
        self._map.close()


class StepProgress:
    """One rank's slot: the step it is in, and the operation of that step."""

    def __init__(self, board: ProgressBoard, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._num_steps = 0

    def begin_step(self) -> None:
        self._num_steps += 1
        self._board.write(self._rank, self._num_steps, "")

    def note(self, layer: str, operation: str) -> None:
        """Note that an operation of a layer begins; "": none runs."""
        place = f"{operation} of {layer}" if operation else ""
        self._board.write(self._rank, self._num_steps, place)


@lru_cache(maxsize=4096)
def _encode(operation: str) -> bytes:
    """Return the text of a slot. Each step has the same operations, five in each layer."""
    return operation.encode()[:_MAX_TEXT]
