"""Engines without HTTP around them: `measure` and llama.cpp's benchmarks, as processes.

Both compute random tokens and do not sample. Every measurement is a process of its own with a
deadline, so only one engine is in memory and at work at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Precision = Literal["bf16", "int8"]
Samples = dict[str, list[float]]
"""Measured values by the row of the table that they belong to."""

WHALEPOD = "import sys; from whalepod.tools.cli import main; sys.exit(main(sys.argv[1:]))"
MEASURE = (
    "import sys; from whalepod.tools.measure.__main__ import main; sys.exit(main(sys.argv[1:]))"
)
PREFILL_LENGTHS = (256, 2048)
BATCH_SIZES = (1, 8, 16)
CONTEXT = 64
"""Tokens before the decoded one; llama.cpp decodes around it, its cache grows meanwhile."""
_STEPS = 32
_WARM_UP_TOKENS = 32
_REASON_LINES = 3


class PeerFailed(RuntimeError):
    """A program of a comparison cannot be run; the message is one sentence for the user."""


def prefill_row(length: int, precision: Precision) -> str:
    """Name a row: tokens/s of one prompt."""
    return f"prefill {length:,}, {precision}"


def decode_row(batch_size: int, precision: Precision, context: int = CONTEXT) -> str:
    """Name a row: tokens/s of all requests together, after `context` tokens each."""
    after = "" if context == CONTEXT else f" after {context:,}"
    return f"decode x {batch_size}{after}, {precision}"


def whalepod_command(*arguments: str) -> list[str]:
    """Return a command line of this very installation."""
    return [sys.executable, "-c", WHALEPOD, *arguments]


def own_environment() -> dict[str, str]:
    """Return the environment in which `whalepod_command` finds the caller's modules."""
    paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return os.environ | {"PYTHONPATH": paths}


def peer_environment(**extra: str) -> dict[str, str]:
    """Return the caller's environment without its Python modules."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | extra


def run_program(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> list[str]:
    """Run a program to its end and return the lines that it wrote, errors last.

    It is killed at the deadline. Raises PeerFailed if it does not end by itself with code 0.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, text=True, capture_output=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise PeerFailed(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"{name} was not done after {timeout_s:g} s: raise --timeout") from None
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    if done.returncode:
        raise PeerFailed(f"{name} ended with code {done.returncode}: {last_words(lines)}")
    return lines


def last_words(lines: Sequence[str]) -> str:
    """Join the last lines that are not empty."""
    written = [line.strip() for line in lines if line.strip()]
    return " / ".join(written[-_REASON_LINES:]) or "it wrote nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhalepodEngine:
    """This engine: `python -m whalepod.tools.measure decode` and `prefill`."""

    precision: Precision
    model: str
    num_threads: int
    context: int
    """A long context to decode after as well; 0: none."""
    timeout_s: float
    name: str = "whalepod"

    def measure(self, turn: int) -> Samples:
        """Measure every row once. Raises PeerFailed."""
        sizes = [word for size in BATCH_SIZES for word in ("--batch-sizes", str(size))]
        lengths = [word for n in PREFILL_LENGTHS for word in ("--lengths", str(n))]
        decode = ("decode", self.model)
        samples = {}
        for roof in self._roofs(*decode, "--rounds", "2", *sizes):
            row = decode_row(roof["num_requests"], self.precision)
            samples[row] = [roof["tokens_per_s"]]
            samples[f"{row}: share of the read limit"] = [roof["share_of_read_limit"]]
        for roof in self._roofs("prefill", self.model, "--rounds", "1", *lengths):
            samples[prefill_row(roof["num_tokens"], self.precision)] = [roof["tokens_per_s"]]
        if self.context:
            long = ("--rounds", "1", "--batch-sizes", "1", "--context", str(self.context))
            (roof,) = self._roofs(*decode, *long)
            samples[decode_row(1, self.precision, self.context)] = [roof["tokens_per_s"]]
        return samples

    def close(self) -> None:
        """Do nothing: no process outlives its measurement."""

    def _roofs(self, *arguments: str) -> list[dict[str, Any]]:
        form = ["--dtype", "bf16", "--num-threads", str(self.num_threads), "--json"]
        if self.precision == "int8":
            form += ["--quantization", "int8"]
        command = [sys.executable, "-c", MEASURE, *arguments, *form]
        lines = run_program(command, own_environment(), self.timeout_s)
        return list(next(_json_lines(lines))["results"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaEngine:
    """llama.cpp: `llama-bench` for one request, `llama-batched-bench` for several."""

    precision: Precision
    """int8 stands for q8_0."""
    folder: Path
    gguf: Path
    num_threads: int
    context: int
    num_turns: int
    timeout_s: float
    repacks: bool = True
    """It may rearrange quantised weights when it loads them, for AMX or wide vectors."""
    name: str = "llama.cpp"

    def measure(self, turn: int) -> Samples:
        """Measure every row once; the long context, which takes minutes to fill, in turn 0 only."""
        # the first, short prompt warms up, in place of the built-in warm-up as long as the prompt
        lengths = ",".join(map(str, (_WARM_UP_TOKENS, *PREFILL_LENGTHS)))
        samples = self._bench("-p", lengths, "-n", str(2 * CONTEXT), "-r", "1")
        samples |= self._batched_bench()
        if self.context and turn == 0:
            depth = ("-d", str(self.context), "-r", str(self.num_turns))
            samples |= self._bench("-p", "0", "-n", str(_STEPS), *depth)
        return samples

    def close(self) -> None:
        """Do nothing: no process outlives its measurement."""

    def _run(self, program: str, *arguments: str) -> list[str]:
        threads = ("-t", str(self.num_threads))
        command = [str(self.folder / program), "-m", str(self.gguf), *threads, *arguments]
        return run_program(command, peer_environment(), self.timeout_s)

    def _bench(self, *arguments: str) -> Samples:
        plain = () if self.repacks else ("--repack", "0")
        lines = self._run("llama-bench", "--no-warmup", "-o", "jsonl", *plain, *arguments)
        samples = {}
        for test in _json_lines(lines):
            length, depth = test["n_prompt"], test["n_depth"]
            row = decode_row(1, self.precision, depth or CONTEXT)
            if length:
                row = prefill_row(length, self.precision)
            if length != _WARM_UP_TOKENS:
                samples[row] = list(test["samples_ts"])
        return samples

    def _batched_bench(self) -> Samples:
        prompt, sizes = CONTEXT - _STEPS // 2, [size for size in BATCH_SIZES if size > 1]
        lines = self._run(
            "llama-batched-bench", "-npp", str(prompt), "-ntg", str(_STEPS),
            "-npl", ",".join(map(str, sizes)), "-c", str(2 * CONTEXT * max(sizes)),
            "--output-format", "jsonl", *(() if self.repacks else ("--no-repack",)),
        )  # fmt: skip
        return {
            decode_row(test["pl"], self.precision): [test["speed_tg"]]
            for test in _json_lines(lines)
        }


def _json_lines(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects. Raises PeerFailed if there is none."""
    found = [line for line in lines if line.startswith("{")]
    if not found:
        raise PeerFailed(f"no figures in what was written: {last_words(lines)}")
    for line in found:
        try:
            yield json.loads(line)
        except ValueError:
            raise PeerFailed(f"not a JSON object: {line[:200]}") from None
