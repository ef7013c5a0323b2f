"""Order of stores and loads between ranks on processors that keep less of it than x86-64 does."""

from __future__ import annotations

import re
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

from whalepod.ep_comm.row_kernels import phases, waiting
from whalepod.ep_comm.row_kernels.memory import (
    fence_acquire,
    i64_at,
    load_acquire,
    store_release,
)

NUM_VALUES, NUM_ROUNDS = 16, 20_000


@njit(nogil=True)
def publish(values: int, signal: int, read: int) -> None:
    """Message passing, the writer: all values, then the signal; a round begins when the last was
    read."""
    for number in range(1, NUM_ROUNDS):
        while load_acquire(read) < number - 1:
            pass
        for i in range(NUM_VALUES):
            i64_at(values, NUM_VALUES)[i] = number
        store_release(signal, number)


@njit(nogil=True)
def observe(values: int, signal: int, read: int) -> int:
    """Message passing, the reader: returns how many values were not those of their signal."""
    torn = 0
    for number in range(1, NUM_ROUNDS):
        while load_acquire(signal) < number:
            pass
        for value in i64_at(values, NUM_VALUES):
            torn += value != number
        fence_acquire()
        torn += load_acquire(signal) != number
        store_release(read, number)
    return torn


def test_C9_what_stands_before_a_signal_is_seen_after_it() -> None:
    words = np.zeros((3, 64), dtype=np.int64)
    addresses = [int(row.ctypes.data) for row in words]
    writer = threading.Thread(target=publish, args=addresses)
    writer.start()

    assert observe(*addresses) == 0
    writer.join()


def ir_of(function: Any, result: str) -> str:
    """Return the optimised LLVM IR of a compiled function of int64s; cached code has none."""
    plain = function.py_func
    anew = njit(f"{result}({', '.join(['int64'] * plain.__code__.co_argcount)})")(plain)
    [text] = anew.inspect_llvm().values()
    return str(text)


def on_aarch64(ir: str) -> list[str]:
    """Return the instructions that LLVM emits of IR for 64-bit ARM."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(
        re.sub(r'target (triple|datalayout) = ".*"|"target-(cpu|features)"="[^"]*"', "", ir)
    )
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=2)
    module.triple = machine.triple
    return [line.split()[0] for line in machine.emit_assembly(module).splitlines() if line.strip()]


def test_C9_signals_are_ordered_by_instructions_of_arm() -> None:
    assert "stlr" in on_aarch64(ir_of(waiting.set_signal, "void"))
    reading = on_aarch64(ir_of(waiting.read_signal, "int64"))
    assert reading.index("dmb") < next(
        i for i, name in enumerate(reading) if name.startswith("lda")
    )


@pytest.mark.parametrize("phase", ["receive_dispatch", "receive_combine"])
def test_C9_a_phase_looks_again_at_its_signals_after_a_fence(phase: str) -> None:
    """The look that says whether rows were torn must not be done before they are read."""
    ir = ir_of(getattr(phases, phase), "int64")

    fence, last_load = ir.rindex("fence acquire"), ir.rindex("load atomic i64")
    assert fence < last_load
    assert "load atomic i64" in ir[:fence]  # the wait


def test_C9_a_phase_sets_its_signals_after_the_rows() -> None:
    assert re.search(r"store atomic i64 .* release", ir_of(phases.send_combine, "void"))
