"""A measure of work that does not depend on how fast the processor is."""

from __future__ import annotations

import time
from functools import cache


@cache
def million_steps_s() -> float:
    """Return the CPU time of a million empty steps of a Python loop here, the most of three."""
    found = []
    for _ in range(3):
        started_s = time.process_time()
        for _ in range(1_000_000):
            pass
        found.append(time.process_time() - started_s)
    return max(found)
