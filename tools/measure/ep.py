"""`measure ep`: how fast rows travel between ranks, beside a plain copy of the same bytes.

Ranks are processes of this machine over shared memory, one thread each. A repeat measures, one
after the other and each from a common start: a copy of as many bytes as the dispatch delivers to
the experts of this rank, the dispatch, the copy again, the combine. A figure is that of the slowest
rank.

What other programs do to a shared machine is least in the fastest repeat, so both it and the median
are shown; where ranks have to wait for a core, only CPU times can be compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Literal

from whalepod.ep_comm.transport.shm import create_heaps
from whalepod.tools.measure.ep_rank import (
    TIMEOUT_MS,
    Case,
    Elapsed,
    EpConfig,
    Measured,
    Mode,
    Sample,
    run_rank,
)
from whalepod.tools.table import format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A dispatch or a combine of a case; times of the slowest rank, bytes of all ranks together.

    wire_bytes     sent to other ranks
    payload_bytes  rows that the experts get, or give back: what a copy is compared with
    times_limit    fastest time over the fastest copy of the same bytes; cpu_: by CPU time
    send_ms        medians of the two halves; a throughput call alternates between them, so it
                   counts as receiving
    """

    mode: Mode
    phase: Literal["dispatch", "combine"]
    num_ranks: int
    num_tokens: int
    time_ms: float
    fastest_ms: float
    send_ms: float
    receive_ms: float
    wire_bytes: int
    payload_bytes: int
    gb_per_s: float
    limit_gb_per_s: float
    times_limit: float
    cpu_times_limit: float


def measure_ep(config: EpConfig) -> int:
    """Measure dispatch and combine between ranks of this machine, beside a copy of the same bytes.

    Send and receive phases apart, bytes on the wire, GB/s, and the limit of this run.
    """
    phases = []
    for mode in config.modes:
        for num_ranks in config.ranks:
            for num_tokens in config.tokens:
                case = Case(mode=mode, num_ranks=num_ranks, num_tokens=num_tokens)
                phases += measure_case(config, case)
    if config.json:
        settings = {k: v for k, v in asdict(config).items() if k != "json"}
        print(json.dumps({"settings": settings, "results": [asdict(p) for p in phases]}))
    else:
        print(
            f"{config.dtype} rows of {config.hidden}, {config.choices} of {config.experts} "
            f"experts, shared memory; the limit is a copy of the same bytes in the same run\n\n"
            f"{_table(phases)}"
        )
    return 0


def measure_case(config: EpConfig, case: Case) -> list[Phase]:
    """Run the ranks of a case and add up what they found."""
    heap_bytes = Measured(config, case).heap_bytes
    descriptors = create_heaps(case.num_ranks, heap_bytes)
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    ranks = []
    for rank in range(case.num_ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(config, case, rank, descriptors, there))
        process.start()
        there.close()
        ends.append(here)
        ranks.append(process)
    try:
        found = [_receive(rank, end) for rank, end in enumerate(ends)]
    finally:
        for process in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        for descriptor in descriptors:
            os.close(descriptor)
    return [
        _phase(case, "dispatch", [samples[0::2] for samples in found]),
        _phase(case, "combine", [samples[1::2] for samples in found]),
    ]


def _receive(rank: int, end: Connection) -> list[Sample]:
    if not end.poll(TIMEOUT_MS / 1e3 * 5):
        raise RuntimeError(f"rank {rank} did not answer in time")
    try:
        found: list[Sample] | str = end.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without an answer") from None
    if isinstance(found, str):
        raise RuntimeError(f"rank {rank}: {found}")
    return found


def _phase(
    case: Case, name: Literal["dispatch", "combine"], by_rank: Sequence[Sequence[Sample]]
) -> Phase:
    repeats = list(zip(*by_rank, strict=True))
    times = [max(_total(s).wall_ms for s in repeat) for repeat in repeats]
    copies = [max(s.copy.wall_ms for s in repeat) for repeat in repeats]
    cpu_times = [max(_total(s).cpu_ms for s in repeat) for repeat in repeats]
    cpu_copies = [max(s.copy.cpu_ms for s in repeat) for repeat in repeats]
    payload = sum(samples[-1].payload_bytes for samples in by_rank)
    return Phase(
        mode=case.mode,
        phase=name,
        num_ranks=case.num_ranks,
        num_tokens=case.num_tokens,
        time_ms=median(times),
        fastest_ms=min(times),
        send_ms=median(max(s.send.wall_ms for s in repeat) for repeat in repeats),
        receive_ms=median(max(s.receive.wall_ms for s in repeat) for repeat in repeats),
        wire_bytes=sum(samples[-1].wire_bytes for samples in by_rank),
        payload_bytes=payload,
        gb_per_s=payload / min(times) / 1e6,
        limit_gb_per_s=payload / min(copies) / 1e6,
        times_limit=min(times) / min(copies),
        cpu_times_limit=min(cpu_times) / min(cpu_copies),
    )


def _total(sample: Sample) -> Elapsed:
    return sample.send + sample.receive


def _table(phases: Sequence[Phase]) -> str:
    rows = [
        ["mode, phase", "ranks", "tokens", "median ms", "fastest ms", "send ms", "receive ms",
         "wire MB", "rows MB", "GB/s", "limit GB/s", "x limit", "x limit (CPU)"]
    ]  # fmt: skip
    for p in phases:
        rows.append([
            f"{p.mode} {p.phase}", str(p.num_ranks), str(p.num_tokens), f"{p.time_ms:.3f}",
            f"{p.fastest_ms:.3f}", f"{p.send_ms:.3f}", f"{p.receive_ms:.3f}",
            f"{p.wire_bytes / 1e6:.2f}", f"{p.payload_bytes / 1e6:.2f}", f"{p.gb_per_s:.2f}",
            f"{p.limit_gb_per_s:.2f}", f"{p.times_limit:.2f}", f"{p.cpu_times_limit:.2f}",
        ])  # fmt: skip
    return format_table(rows, numeric=True)
