"""Runs programs whose reader has left."""

from __future__ import annotations

import os
import subprocess
import sys


def run_without_reader(program: str) -> tuple[int, str]:
    """Run Python with a closed pipe as stdout; return the exit code and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    os.close(writer)
    return done.returncode, done.stderr
