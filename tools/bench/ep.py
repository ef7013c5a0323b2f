"""`whalepod bench ep`: how fast rows travel between ranks, beside a plain copy of the same bytes.

Ranks are processes of this machine over shared memory, one thread each. A repeat measures, one
behind the other and each from a common start: a copy of as many bytes as the dispatch delivers to
the experts of this rank, the dispatch, the copy again, the combine. A figure is that of the slowest
rank.

What other programs do to a shared machine is least in the fastest repeat, so both it and the median
are shown; where ranks have to wait for a core, only CPU times can be compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from whalepod.tools.table import format_table

if TYPE_CHECKING:
    from torch import Tensor

    from whalepod.ep_comm.group import Group
    from whalepod.ep_comm.rows import RowDtype

Mode = Literal["low_latency", "throughput"]
Dtype = Literal["fp32", "bf16", "fp8"]
_ROW_DTYPES: dict[str, RowDtype] = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8"}
_MODES: tuple[Mode, ...] = ("low_latency", "throughput")
_TIMEOUT_MS = 60_000.0
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpConfig:
    """What is measured."""

    modes: Annotated[tuple[Mode, ...], "decode's and prefill's way"] = _MODES
    ranks: Annotated[tuple[int, ...], "processes, one run for each"] = (2,)
    tokens: Annotated[tuple[int, ...], "tokens of each rank, one run for each"] = (1, 16, 128)
    hidden: Annotated[int, "values of a row"] = 7168
    experts: Annotated[int, "routed experts"] = 256
    choices: Annotated[int, "experts of a token"] = 8
    dtype: Annotated[Dtype, "rows on the way to the experts"] = "bf16"
    repeats: Annotated[int, "measurements of each case"] = 20
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        for name in ("hidden", "experts", "choices", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("ranks", "tokens"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mode at one size."""

    mode: Mode
    num_ranks: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Time by the clock, and of it on a core."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0

    def __add__(self, other: Elapsed) -> Elapsed:
        return Elapsed(self.wall_ms + other.wall_ms, self.cpu_ms + other.cpu_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One repeat on one rank; times in ms."""

    copy: Elapsed
    send: Elapsed
    receive: Elapsed
    wire_bytes: int
    payload_bytes: int


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


def bench_ep(config: EpConfig) -> int:
    """Measure, print, and return the exit code."""
    phases = []
    for mode in config.modes:
        for num_ranks in config.ranks:
            for num_tokens in config.tokens:
                case = Case(mode=mode, num_ranks=num_ranks, num_tokens=num_tokens)
                phases += measure(config, case)
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


def measure(config: EpConfig, case: Case) -> list[Phase]:
    """Run the ranks of a case and add up what they found."""
    from whalepod.ep_comm.transport.shm import create_heaps

    heap_bytes = _mode(config, case).heap_bytes
    descriptors = create_heaps(case.num_ranks, heap_bytes)
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    ranks = []
    for rank in range(case.num_ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(config, case, rank, descriptors, there))
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
    if not end.poll(_TIMEOUT_MS / 1e3 * 5):
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


# -- on a rank ----------------------------------------------------------------------------------


def _run_rank(
    config: EpConfig, case: Case, rank: int, descriptors: Sequence[int], end: Connection
) -> None:
    import torch

    from whalepod.ep_comm.group import Group
    from whalepod.ep_comm.transport.shm import ShmTransport

    torch.set_num_threads(1)
    try:
        transport = ShmTransport(rank, descriptors)
        mode = _mode(config, case)
        mode.open(Group(transport))
        samples: list[Sample] = []
        for number in range(-_WARM_UPS, config.repeats):
            pair = mode.repeat()
            if number >= 0:
                samples += pair
        end.send(samples)
        missing = transport.barrier(transport.now_ms() + _TIMEOUT_MS)
        assert not missing, f"ranks {missing} did not end"
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


class _Measured:
    """A mode on one rank, and its input."""

    heap_bytes: int

    def __init__(self, config: EpConfig, case: Case) -> None:
        self._config = config
        self._case = case
        self._back: Literal["float32", "bfloat16"] = (
            "float32" if config.dtype == "fp32" else "bfloat16"
        )

    def open(self, group: Group) -> None:
        import torch

        config, num_tokens = self._config, self._case.num_tokens
        self._group = group
        random = torch.Generator().manual_seed(group.rank)
        self._x_TH = torch.randn(num_tokens, config.hidden, generator=random)
        if config.dtype != "fp32":
            self._x_TH = self._x_TH.bfloat16()
        scores_TE = torch.rand(num_tokens, config.experts, generator=random)
        self._ids_TK = scores_TE.argsort(dim=1)[:, : config.choices].contiguous()
        self._weights_TK = torch.rand(num_tokens, config.choices, generator=random)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def repeat(self) -> tuple[Sample, Sample]:
        raise NotImplementedError

    def _copy(self, num_bytes: int) -> Elapsed:
        """Return the time of one plain copy, from a common start."""
        import torch

        if num_bytes not in self._copies:
            self._copies[num_bytes] = (
                torch.ones(num_bytes, dtype=torch.uint8),
                torch.ones(num_bytes, dtype=torch.uint8),
            )
        source, target = self._copies[num_bytes]
        self._start_together()
        return _timed(lambda: target.copy_(source))[0]

    def _start_together(self) -> None:
        missing = self._group.transport.barrier(self._group.deadline(_TIMEOUT_MS))
        assert not missing, f"ranks {missing} did not come"

    def _wire_bytes(self, sent_R: Tensor) -> int:
        """Return what went to other ranks."""
        return int(sent_R.sum() - sent_R[self._group.rank])


def _timed(call: Callable[[], Any]) -> tuple[Elapsed, Any]:
    wall, cpu = time.perf_counter(), time.thread_time()
    result = call()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return Elapsed(wall * 1e3, cpu * 1e3), result


class _LowLatency(_Measured):
    def __init__(self, config: EpConfig, case: Case) -> None:
        from whalepod.ep_comm.heap import HeapLayout
        from whalepod.ep_comm.modes import low_latency_config

        super().__init__(config, case)
        self._mode_config = low_latency_config.LowLatencyConfig(
            num_ranks=case.num_ranks,
            num_experts=config.experts,
            num_choices=config.choices,
            hidden=config.hidden,
            max_tokens=case.num_tokens,
            dispatch_dtype=_ROW_DTYPES[config.dtype],
            combine_dtype=self._back,
        )
        heap = HeapLayout(case.num_ranks)
        self._regions = low_latency_config.carve(heap, self._mode_config)
        self.heap_bytes = heap.num_bytes

    def open(self, group: Group) -> None:
        from whalepod.ep_comm.modes.low_latency import LowLatency

        super().open(group)
        self._mode = LowLatency(group, self._mode_config, self._regions)
        self._num_rows = 1

    def repeat(self) -> tuple[Sample, Sample]:
        mode, sent_R = self._mode, self._mode.outbox.sent_bytes_R
        there = self._mode_config.dispatch_format
        there_bytes = self._num_rows * self._config.hidden * there.torch_dtype.itemsize
        copy, before_R = self._copy(there_bytes), sent_R.clone()
        self._start_together()
        send, flight = _timed(lambda: mode.send_dispatch(self._x_TH, self._ids_TK))
        receive, result = _timed(lambda: flight.receive(_TIMEOUT_MS))
        assert result.status.ok, result.status
        self._num_rows = int(result.count_E.sum())
        dispatch = Sample(
            copy=copy,
            send=send,
            receive=receive,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=there_bytes,
        )
        back = self._mode_config.combine_format.torch_dtype
        y = result.rows if there.dtype != "float8" else result.rows.to(back)
        back_bytes = self._num_rows * self._config.hidden * back.itemsize
        copy, before_R = self._copy(back_bytes), sent_R.clone()
        self._start_together()
        send, back_flight = _timed(lambda: mode.send_combine(y, result.handle))
        receive, (_, status) = _timed(lambda: back_flight.receive(self._weights_TK, _TIMEOUT_MS))
        assert status.ok, status
        combine = Sample(
            copy=copy,
            send=send,
            receive=receive,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=back_bytes,
        )
        return dispatch, combine


class _Throughput(_Measured):
    def __init__(self, config: EpConfig, case: Case) -> None:
        from whalepod.ep_comm.heap import HeapLayout
        from whalepod.ep_comm.modes import throughput_config

        super().__init__(config, case)
        self._mode_config = throughput_config.ThroughputConfig(
            num_ranks=case.num_ranks,
            ranks_per_node=case.num_ranks,
            num_experts=config.experts,
            num_choices=config.choices,
            hidden=config.hidden,
            max_tokens=case.num_tokens,
            chunk_tokens=min(256, case.num_tokens),
            dispatch_dtype=_ROW_DTYPES[config.dtype],
            combine_dtype=self._back,
        )
        heap = HeapLayout(case.num_ranks)
        self._regions = throughput_config.carve(heap, self._mode_config)
        self.heap_bytes = heap.num_bytes

    def open(self, group: Group) -> None:
        from whalepod.ep_comm.modes.throughput import Throughput
        from whalepod.ep_comm.row_kernels.compiled import CompiledRows

        super().open(group)
        self._mode = Throughput(group, self._mode_config, self._regions)
        self._x = self._x_TH
        if self._config.dtype == "fp8":
            self._x = CompiledRows().quantize(self._x_TH, round_scale=False)  # type: ignore[assignment]
        self._num_rows = 1

    def repeat(self) -> tuple[Sample, Sample]:
        mode, sent_R = self._mode, self._mode.outbox.sent_bytes_R
        there = self._mode_config.dispatch_format.torch_dtype
        there_bytes = self._num_rows * self._config.hidden * there.itemsize
        copy, before_R = self._copy(there_bytes), sent_R.clone()
        self._start_together()
        elapsed, received = _timed(
            lambda: mode.dispatch(self._x, self._ids_TK, self._weights_TK, _TIMEOUT_MS)
        )
        assert received.status.ok, received.status
        self._num_rows = received.num_rows
        dispatch = Sample(
            copy=copy,
            send=Elapsed(),
            receive=elapsed,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=there_bytes,
        )
        back = self._mode_config.combine_format.torch_dtype
        y_NH = received.x_NH.to(back)
        back_bytes = self._num_rows * self._config.hidden * back.itemsize
        copy, before_R = self._copy(back_bytes), sent_R.clone()
        self._start_together()
        elapsed, (_, _, status) = _timed(lambda: mode.combine(y_NH, received.routing, _TIMEOUT_MS))
        assert status.ok, status
        combine = Sample(
            copy=copy,
            send=Elapsed(),
            receive=elapsed,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=back_bytes,
        )
        return dispatch, combine


def _mode(config: EpConfig, case: Case) -> _Measured:
    return _LowLatency(config, case) if case.mode == "low_latency" else _Throughput(config, case)
