"""A process that takes an engine's arguments and does nothing until it is ended."""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    sys.stdin.buffer.read()
    time.sleep(600)
