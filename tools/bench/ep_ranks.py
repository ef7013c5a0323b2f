"""What one rank does in `whalepod bench ep`: time a mode, and a copy of the same bytes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch import Tensor

from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.modes import low_latency_config, throughput_config
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.modes.throughput import Throughput
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.transport.shm import ShmTransport
from whalepod.tools.bench.config import TIMEOUT_MS, Case, Elapsed, EpConfig, Sample

_ROW_DTYPES: dict[str, RowDtype] = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8"}
_WARM_UPS = 2


def run_rank(
    config: EpConfig, case: Case, rank: int, descriptors: Sequence[int], end: Connection
) -> None:
    """Measure all repeats of a case, and send the samples, or what went wrong, to `end`."""
    torch.set_num_threads(1)
    try:
        transport = ShmTransport(rank, descriptors)
        mode = make_mode(config, case)
        mode.open(Group(transport))
        samples: list[Sample] = []
        for number in range(-_WARM_UPS, config.repeats):
            pair = mode.repeat()
            if number >= 0:
                samples += pair
        end.send(samples)
        missing = transport.barrier(transport.now_ms() + TIMEOUT_MS)
        assert not missing, f"ranks {missing} did not end"
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


class _Measured(ABC):
    """A mode on one rank, and its input."""

    heap_bytes: int

    def __init__(self, config: EpConfig, case: Case) -> None:
        self._config = config
        self._case = case
        self._back: Literal["float32", "bfloat16"] = (
            "float32" if config.dtype == "fp32" else "bfloat16"
        )

    def open(self, group: Group) -> None:
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

    @abstractmethod
    def repeat(self) -> tuple[Sample, Sample]:
        """Measure one dispatch and one combine."""

    def _copy(self, num_bytes: int) -> Elapsed:
        """Return the time of one plain copy, from a common start."""
        if num_bytes not in self._copies:
            self._copies[num_bytes] = (
                torch.ones(num_bytes, dtype=torch.uint8),
                torch.ones(num_bytes, dtype=torch.uint8),
            )
        source, target = self._copies[num_bytes]
        self._start_together()
        return _timed(lambda: target.copy_(source))[0]

    def _start_together(self) -> None:
        missing = self._group.transport.barrier(self._group.deadline(TIMEOUT_MS))
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
        receive, result = _timed(lambda: flight.receive(TIMEOUT_MS))
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
        receive, (_, status) = _timed(lambda: back_flight.receive(self._weights_TK, TIMEOUT_MS))
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
            lambda: mode.dispatch(self._x, self._ids_TK, self._weights_TK, TIMEOUT_MS)
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
        elapsed, (_, _, status) = _timed(lambda: mode.combine(y_NH, received.routing, TIMEOUT_MS))
        assert status.ok, status
        combine = Sample(
            copy=copy,
            send=Elapsed(),
            receive=elapsed,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=back_bytes,
        )
        return dispatch, combine


def make_mode(config: EpConfig, case: Case) -> _Measured:
    """Return the mode of a case, not yet opened."""
    return _LowLatency(config, case) if case.mode == "low_latency" else _Throughput(config, case)
