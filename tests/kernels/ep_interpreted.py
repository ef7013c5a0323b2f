"""A program, not a test: ranks of the low-latency mode in processes, over shared memory.

    TRITON_INTERPRET=1 python -m tests.kernels.ep_interpreted triton python triton ...

Each word is a rank: the GPU kernels under the interpreter, or the mode in Python. Exits with 1 if a
rank's results differ from plain loops. Triton decides at import how kernels run, so this has to be
a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.ep_comm import test_by_expert as case
from tests.equality import assert_same_bits
from whalepod.ep_comm.gpu.device_exchange import DeviceExchange, DeviceResult
from whalepod.ep_comm.group import signal_value
from whalepod.ep_comm.transport.shm import ShmTransport, create_heaps

SEEDS = range(6)
TIMEOUT_S = 240


class Device:
    """NVSHMEM's device functions over shared memory: puts wait for `quiet`, in any order."""

    def __init__(self, transport: ShmTransport, seed: int, *, quiets: bool) -> None:
        self._transport = transport
        self._base = transport.heap.data_ptr()
        self._puts: list[tuple[int, int, int]] = []
        self._random = random.Random(seed)
        self._quiets = quiets
        self.symbols: dict[str, Callable[..., int]] = {
            "nvshmemx_putmem_nbi_block": self.put,
            "nvshmem_quiet": self.quiet,
            "nvshmemx_signal_op": self.signal_op,
            "nvshmem_signal_fetch": self.fetch,
            "nvshmem_signal_wait_until": self.wait_until,
        }

    def put(self, destination: int, source: int, size: int, rank: int) -> int:
        peer = self._transport.peer_view(rank)
        assert peer is not None
        self._puts.append((peer.data_ptr() + destination - self._base, source, size))
        return 0

    def quiet(self) -> int:
        if self._quiets:
            self.deliver()
        return 0

    def deliver(self) -> None:
        self._random.shuffle(self._puts)
        while self._puts:
            ctypes.memmove(*self._puts.pop())

    def signal_op(self, word: int, value: int, operation: int, rank: int) -> int:
        assert operation == 9
        self._transport.signal_op(word - self._base, value, rank)
        return 0

    def fetch(self, word: int) -> int:
        os.sched_yield()
        return self._transport.signal_fetch(word - self._base)

    def wait_until(self, word: int, comparison: int, value: int) -> int:
        found = self.fetch(word)
        assert comparison == 5
        assert found >= value
        return found


def emulate(device: Device) -> None:
    """Give the interpreter the device's functions in place of linked symbols."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def extern(
        self: Any, name: str, path: str, symbol: str, arguments: Any, result: Any, is_pure: bool
    ) -> Any:
        values = [int(np.asarray(argument.data).item()) for argument in arguments]
        kind = {32: np.int32, 64: np.int64}[result.primitive_bitwidth]
        return TensorHandle(np.array([device.symbols[symbol](*values)], dtype=kind), result)

    InterpreterBuilder.create_extern_elementwise = extern


def run_triton(rank: int, transport: ShmTransport, program: case.Round, *, quiets: bool) -> None:
    config = program.config
    device = Device(transport, rank, quiets=quiets)
    emulate(device)
    mode = DeviceExchange(
        rank, config, program.regions, transport.heap, max_polls=1_000_000, extern_libs={}
    )
    for call, seed in enumerate(SEEDS, start=1):
        inputs = program.inputs(seed)
        mine = inputs[rank]
        mode.send_dispatch(mine.x_TH, mine.ids_TK)
        result = mode.receive_dispatch(mine.ids_TK)
        check(result, inputs, config, rank, call)
        factors = torch.arange(config.num_local) + 1 + rank * config.num_local
        mode.send_combine(result.rows_ESH * factors[:, None, None], result)
        y_TH, found_R = mode.receive_combine(result, mine.weights_TK)
        assert bool((found_R >= signal_value(call, 0)).all()), found_R
        assert_same_bits(case.expected_sum(mine, config), y_TH, f"rank {rank} seed {seed}")
        device.deliver()


def check(
    result: DeviceResult, inputs: Sequence[case.Inputs], config: Any, rank: int, call: int
) -> None:
    assert bool((result.found_R >= signal_value(call, 0)).all()), result.found_R
    for e in range(config.num_local):
        rows = case.expected_rows(list(inputs), rank * config.num_local + e)
        assert int(result.count_ER[e].sum()) == len(rows)
        assert result.info_ES[e, : len(rows)].tolist() == [token for _, token in rows]
        if rows:
            sent = torch.stack([inputs[s].x_TH[t] for s, t in rows])
            assert_same_bits(sent, result.rows_ESH[e, : len(rows)], f"expert {e}")


def main(kinds: Sequence[str]) -> int:
    config = case.make_config(len(kinds))
    heap, regions = case.make_heap(config)
    program = case.Round(config, regions, tuple(SEEDS))
    descriptors = create_heaps(len(kinds), heap.num_bytes)
    context = multiprocessing.get_context("fork")
    errors: multiprocessing.Queue[str] = context.Queue()

    def body(rank: int, kind: str) -> None:
        torch.set_num_threads(1)
        try:
            transport = ShmTransport(rank, descriptors)
            if kind == "python":
                program(transport)
            else:
                run_triton(rank, transport, program, quiets=kind == "triton")
            errors.put("")
        except BaseException:
            errors.put(traceback.format_exc())

    ranks = [context.Process(target=body, args=pair) for pair in enumerate(kinds)]
    for process in ranks:
        process.start()
    found = ""
    for _ in ranks:
        found = found or errors.get(timeout=TIMEOUT_S)
    for process in ranks:
        process.join(timeout=0 if found else 10)
        process.kill()
    print(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
