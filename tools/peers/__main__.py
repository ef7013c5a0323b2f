"""`python -m whalepod.tools.peers`: this engine beside llama.cpp and vLLM, in the same minutes.

All take turns, one at work at a time, with the same number of threads; a figure is the median of
the turns. Peers are what the flags name: programs that were built or installed elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Protocol

from whalepod.tools.flags import require_positive
from whalepod.tools.peers.command import run_alone
from whalepod.tools.peers.programs import (
    LlamaEngine,
    PeerFailed,
    Precision,
    Samples,
    WhalepodEngine,
)
from whalepod.tools.peers.servers import llama_server, vllm_server, whalepod_server
from whalepod.tools.peers.table import as_json, format_comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """Which engines to compare with, and how long."""

    model: Annotated[str, "checkpoint folder that all engines serve"]
    llama_dir: Annotated[
        Path | None, "folder of llama-bench, llama-batched-bench and llama-server"
    ] = None
    gguf: Annotated[Path | None, "MODEL in llama.cpp's format, bf16"] = None
    gguf_q8: Annotated[Path | None, "the same quantised to q8_0, beside int8"] = None
    gguf_repack: Annotated[
        bool, "llama.cpp may rearrange weights of q8_0; a build whose AMX code crashes must not"
    ] = True
    vllm_python: Annotated[Path | None, "the Python of an environment that has vLLM"] = None
    repeats: Annotated[int, "turns of each engine; figures are their medians"] = 5
    num_threads: Annotated[int, "threads of each engine"] = 2
    context: Annotated[int, "also decode after this many tokens; 0: no"] = 8000
    peer_context: Annotated[
        bool, "llama.cpp decodes after them, too: it computes them first, which takes minutes"
    ] = False
    num_requests: Annotated[int, "requests of a run with 16 at once; one by one a 16th"] = 32
    timeout_s: Annotated[float, "longest time of one program, or until a server is ready"] = 600.0
    json: Annotated[bool, "print one JSON object instead of a table"] = False
    out: Annotated[Path | None, "write the JSON object to this file as well"] = None

    def __post_init__(self) -> None:
        require_positive(self, "repeats", "num_threads", "num_requests")
        if self.context < 0 or self.timeout_s <= 0:
            raise ValueError(
                f"context must be at least 0 and timeout above 0, got {self.context} and "
                f"{self.timeout_s:g}"
            )
        if (self.llama_dir is None) != (self.gguf is None and self.gguf_q8 is None):
            raise ValueError(
                "--llama-dir goes with --gguf or --gguf-q8: programs and a model for them"
            )


class EngineUnderTest(Protocol):
    """One engine in one setting."""

    @property
    def name(self) -> str: ...

    def measure(self, turn: int) -> Samples:
        """Measure each row of the table that it has. Raises PeerFailed."""

    def close(self) -> None:
        """End what may still run."""


def peers(config: PeersConfig) -> int:
    """Measure this engine beside llama.cpp and vLLM in the same minutes.

    The flags name the peers' programs; a peer that is not named is left out. They take turns with
    the engine alone (prefill, decode) and over HTTP. The exit code is 1 if an engine failed.
    """
    found, failures, started = Comparison(), [], time.monotonic()
    engines = list_engines(config)
    with _ended(engines):
        for turn in range(config.repeats):
            for engine in list(engines):
                try:
                    found.add(engine.name, engine.measure(turn))
                except PeerFailed as error:
                    failures.append(f"{engine.name}: {error}")
                    engines.remove(engine)
                    print(failures[-1], file=sys.stderr, flush=True)
    minutes = (time.monotonic() - started) / 60
    head = {"model": config.model, "repeats": config.repeats, "failures": failures}
    line = json.dumps(head | {"minutes": minutes} | as_json(found.engines, config.context))
    if config.out is not None:
        config.out.write_text(line + "\n", encoding="utf-8")
    if config.json:
        print(line)
    else:
        print(
            f"{config.model}: medians of {config.repeats} turns, {config.num_threads} threads, "
            f"{minutes:.1f} min, load {os.getloadavg()[0]:.1f}\n"
        )
        print("\n".join([format_comparison(found.engines, config.context), *failures]))
    return 1 if failures else 0


def list_engines(config: PeersConfig) -> list[EngineUnderTest]:
    """Return who takes turns, in order: rivals in one setting follow each other."""
    limits = config.num_threads, config.num_requests, config.timeout_s
    engines: list[EngineUnderTest] = []
    files: dict[Precision, Path | None] = {"bf16": config.gguf, "int8": config.gguf_q8}
    for precision, gguf in files.items():
        context = config.context if precision == "bf16" else 0
        engines.append(
            WhalepodEngine(
                precision=precision,
                model=config.model,
                num_threads=config.num_threads,
                context=context,
                timeout_s=config.timeout_s,
            )
        )
        if config.llama_dir and gguf:
            engines.append(
                LlamaEngine(
                    precision=precision,
                    folder=config.llama_dir,
                    gguf=gguf,
                    context=context if config.peer_context else 0,
                    num_threads=config.num_threads,
                    num_turns=config.repeats,
                    timeout_s=config.timeout_s,
                    repacks=config.gguf_repack,
                )
            )
    engines.append(whalepod_server(config.model, *limits))
    if config.llama_dir and config.gguf:
        engines.append(llama_server(config.llama_dir, config.gguf, *limits))
    if config.vllm_python:
        engines.append(vllm_server(config.vllm_python, config.model, *limits))
    return engines


class Comparison:
    """Collects samples by engine and row."""

    def __init__(self) -> None:
        self.engines: dict[str, Samples] = {}

    def add(self, name: str, samples: Samples) -> None:
        """Take what one turn measured, and show it on stderr."""
        rows = self.engines.setdefault(name, {})
        for row, values in samples.items():
            rows.setdefault(row, []).extend(values)
            shown = ", ".join(f"{value:.4g}" for value in values)
            print(f"  {name}, {row}: {shown}", file=sys.stderr, flush=True)


@contextmanager
def _ended(engines: Sequence[EngineUnderTest]) -> Iterator[None]:
    """Close all on every way out; SIGTERM is one, as Ctrl-C."""
    everyone = list(engines)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for engine in everyone:
            engine.close()
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_alone("whalepod.tools.peers", peers, PeersConfig, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
