"""A process that compiles grammars to see whether they can be: `python -m ...worker`.

A line of JSON comes in, a line of JSON goes out. First the vocabulary, answered by {}; then one
constraint at a time, answered by {"error": null or text}. The checker kills it if it takes too
long.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
from pathlib import Path

import orjson

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import Compiler, GrammarError
from whalepod.server.structured.llguidance_backend import LlguidanceCompiler

MAX_CPU_S = 2
"""Of one grammar, counted in whole seconds: wall time says little on a busy machine."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""Of addresses, on top of what the loaded library has taken."""


def check(compiler: Compiler, constraint: Constraint) -> str | None:
    """Return what is wrong with a grammar, None when it compiles and something may begin it."""
    try:
        if not compiler.compile(constraint).allowed().any():
            return "no text fulfils it"
    except GrammarError as error:
        return str(error)
    return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this one
    compiler = LlguidanceCompiler(**orjson.loads(sys.stdin.buffer.readline()))
    limit_bytes = _address_bytes() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    _answer({})
    for line in sys.stdin.buffer:
        _allow_cpu_time()
        _answer({"error": check(compiler, Constraint(**orjson.loads(line)))})


def _allow_cpu_time() -> None:
    """Let the kernel end this process (SIGXCPU) when the next grammar takes too long."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = math.ceil(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + MAX_CPU_S, resource.RLIM_INFINITY))


def _address_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def _answer(value: dict[str, str | None]) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
