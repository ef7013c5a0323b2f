"""`whalepod bench peers`: this engine beside llama.cpp and vLLM, in the same minutes.

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

from whalepod.tools.bench.peer_programs import (
    LlamaEngine,
    PeerFailed,
    Precision,
    Samples,
    WhalepodEngine,
)
from whalepod.tools.bench.peer_servers import llama_server, vllm_server, whalepod_server
from whalepod.tools.bench.peer_table import as_json, format_comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """Whom to compare with, and how long."""

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
    context: Annotated[int, "also decode behind so many tokens; 0: no"] = 8000
    peer_context: Annotated[
        bool, "llama.cpp decodes behind them, too: it computes them first, which takes minutes"
    ] = False
    num_requests: Annotated[int, "requests of a run with 16 at once; one by one a 16th"] = 32
    timeout_s: Annotated[float, "longest time of one program, or until a server is ready"] = 600.0
    json: Annotated[bool, "print one JSON object instead of a table"] = False
    out: Annotated[Path | None, "write the JSON object to this file as well"] = None

    def __post_init__(self) -> None:
        for name in ("repeats", "num_threads", "num_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context < 0 or self.timeout_s <= 0:
            raise ValueError(
                f"context must be at least 0 and timeout above 0, got {self.context} and "
                f"{self.timeout_s:g}"
            )
        if (self.llama_dir is None) != (self.gguf is None and self.gguf_q8 is None):
            raise ValueError(
                "--llama-dir goes with --gguf or --gguf-q8: programs and a model for them"
            )


class Contestant(Protocol):
    """One engine in one setting."""

    @property
    def name(self) -> str: ...

    def measure(self, turn: int) -> Samples:
        """Measure each row of the table that it has. Raises PeerFailed."""

    def close(self) -> None:
        """End what may still run."""


def bench_peers(config: PeersConfig) -> int:
    """Measure, print, and return the exit code: 1 if an engine failed."""
    found, failures, started = Comparison(), [], time.monotonic()
    contestants = list_contestants(config)
    with _ended(contestants):
        for turn in range(config.repeats):
            for contestant in list(contestants):
                try:
                    found.add(contestant.name, contestant.measure(turn))
                except PeerFailed as error:
                    failures.append(f"{contestant.name}: {error}")
                    contestants.remove(contestant)
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


def list_contestants(config: PeersConfig) -> list[Contestant]:
    """Return who takes turns, in order: rivals in one setting follow each other."""
    limits = config.num_threads, config.num_requests, config.timeout_s
    contestants: list[Contestant] = []
    files: dict[Precision, Path | None] = {"bf16": config.gguf, "int8": config.gguf_q8}
    for precision, gguf in files.items():
        context = config.context if precision == "bf16" else 0
        contestants.append(
            WhalepodEngine(
                precision=precision,
                model=config.model,
                num_threads=config.num_threads,
                context=context,
                timeout_s=config.timeout_s,
            )
        )
        if config.llama_dir and gguf:
            contestants.append(
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
    contestants.append(whalepod_server(config.model, *limits))
    if config.llama_dir and config.gguf:
        contestants.append(llama_server(config.llama_dir, config.gguf, *limits))
    if config.vllm_python:
        contestants.append(vllm_server(config.vllm_python, config.model, *limits))
    return contestants


class Comparison:
    """Collects samples by engine and row."""

    def __init__(self) -> None:
        self.engines: dict[str, Samples] = {}

    def add(self, name: str, samples: Samples) -> None:
        """Take what one turn measured, and show it to whoever watches."""
        rows = self.engines.setdefault(name, {})
        for row, values in samples.items():
            rows.setdefault(row, []).extend(values)
            shown = ", ".join(f"{value:.4g}" for value in values)
            print(f"  {name}, {row}: {shown}", file=sys.stderr, flush=True)


@contextmanager
def _ended(contestants: Sequence[Contestant]) -> Iterator[None]:
    """Close all on every way out; SIGTERM is one, as Ctrl-C."""
    everyone = list(contestants)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for contestant in everyone:
            contestant.close()
        signal.signal(signal.SIGTERM, before)
