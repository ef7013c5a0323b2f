"""A process that compiles grammars to see whether they can be: `python -m ...worker`.

A line of JSON comes in, a line of JSON goes out. First the vocabulary, answered by {}; then one
constraint at a time, answered by {"error": null or text}. Whoever waits too long kills it.
"""

from __future__ import annotations

import resource
import sys

import orjson

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import GrammarError
from whalepod.server.structured.llguidance_backend import LlguidanceCompiler

MAX_MEMORY_BYTES = 2 * 1024**3


def check(compiler: LlguidanceCompiler, constraint: Constraint) -> str | None:
    """Return what is wrong with a grammar, None when it compiles and something may begin it."""
    try:
        if not compiler.compile(constraint).allowed().any():
            return "no text fulfils it"
    except GrammarError as error:
        return str(error)
    return None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    vocabulary = orjson.loads(sys.stdin.buffer.readline())
    compiler = LlguidanceCompiler(**vocabulary)
    _answer({})
    for line in sys.stdin.buffer:
        _answer({"error": check(compiler, Constraint(**orjson.loads(line)))})


def _answer(value: dict[str, str | None]) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
