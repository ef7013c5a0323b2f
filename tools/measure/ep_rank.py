"""What one rank does in `measure ep`: time an exchange, and a copy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from whalepod.ep_comm.config import ExchangeConfig, reserve
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.symmetric_heap import CHUNK_TOKENS
from whalepod.ep_comm.transport.shm import ShmTransport
from whalepod.tools.flags import require_positive

Mode = Literal["low_latency", "throughput"]
Dtype = Literal["fp32", "bf16", "fp8"]
_MODES: tuple[Mode, ...] = ("low_latency", "throughput")
TIMEOUT_MS = 60_000.0
_ROW_DTYPES: dict[str, RowDtype] = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8"}
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
        require_positive(self, "hidden", "experts", "choices", "repeats", "ranks", "tokens")


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


def run_rank(
    config: EpConfig, case: Case, rank: int, descriptors: Sequence[int], end: Connection
) -> None:
    """Measure all repeats of a case, and send the samples, or what went wrong, to `end`."""
    torch.set_num_threads(1)
    try:
        transport = ShmTransport(rank, descriptors)
        measured = Measured(config, case)
        measured.open(Group(transport))
        samples: list[Sample] = []
        for number in range(-_WARM_UPS, config.repeats):
            pair = measured.repeat()
            if number >= 0:
                samples += pair
        end.send(samples)
        missing = transport.barrier(transport.now_ms() + TIMEOUT_MS)
        assert not missing, f"ranks {missing} did not end"
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


class Measured:
    """An exchange on one rank, and its input."""

    def __init__(self, config: EpConfig, case: Case) -> None:
        self._config = config
        self._case = case
        self._exchange_config = ExchangeConfig(
            num_ranks=case.num_ranks,
            num_experts=config.experts,
            top_k=config.choices,
            hidden=config.hidden,
            max_tokens=case.num_tokens,
            dispatch_dtype=_ROW_DTYPES[config.dtype],
            combine_dtype="float32" if config.dtype == "fp32" else "bfloat16",
        )
        if case.mode == "throughput":
            self._exchange_config = replace(
                self._exchange_config, layout="per_token", chunk_tokens=CHUNK_TOKENS
            )
        heap = HeapLayout(case.num_ranks)
        self._regions = reserve(heap, self._exchange_config, "exchange")
        self.heap_bytes = heap.num_bytes

    def open(self, group: Group) -> None:
        config, num_tokens = self._config, self._case.num_tokens
        self._group = group
        self._exchange = ExpertExchange(group, self._exchange_config, self._regions)
        self._num_rows = 1
        random = torch.Generator().manual_seed(group.rank)
        self._x_TH = torch.randn(num_tokens, config.hidden, generator=random)
        if config.dtype != "fp32":
            self._x_TH = self._x_TH.bfloat16()
        scores_TE = torch.rand(num_tokens, config.experts, generator=random)
        self._ids_TK = scores_TE.argsort(dim=1)[:, : config.choices].contiguous()
        self._weights_TK = torch.rand(num_tokens, config.choices, generator=random)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def repeat(self) -> tuple[Sample, Sample]:
        """Measure one dispatch and one combine."""
        exchange, sent_R = self._exchange, self._exchange.send_buffer.sent_bytes_R
        dispatched = self._exchange_config.dispatch_format.torch_dtype
        num_bytes = self._num_rows * self._config.hidden * dispatched.itemsize
        copy, before_R = self._copy(num_bytes), sent_R.clone()
        self._start_together()
        send, flight = _timed(
            lambda: exchange.send_dispatch(self._x_TH, self._ids_TK, self._weights_TK)
        )
        receive, result = _timed(lambda: flight.receive(TIMEOUT_MS))
        assert result.status.ok, result.status
        by_expert = self._exchange_config.is_by_expert
        self._num_rows = int(result.count_E.sum()) if by_expert else len(result.rows)
        dispatch = Sample(
            copy=copy,
            send=send,
            receive=receive,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=num_bytes,
        )
        returned = self._exchange_config.combine_format.torch_dtype
        y = result.rows if dispatched.itemsize > 1 else result.rows.to(returned)
        num_bytes = self._num_rows * self._config.hidden * returned.itemsize
        copy, before_R = self._copy(num_bytes), sent_R.clone()
        self._start_together()
        send, back_flight = _timed(lambda: exchange.send_combine(y, result.handle))
        receive, (_, status) = _timed(lambda: back_flight.receive(TIMEOUT_MS))
        assert status.ok, status
        combine = Sample(
            copy=copy,
            send=send,
            receive=receive,
            wire_bytes=self._wire_bytes(sent_R - before_R),
            payload_bytes=num_bytes,
        )
        return dispatch, combine

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
