"""How compiled code waits for a signal that another process sets: without the interpreter's lock.

A wait looks again and again for some microseconds, then gives its core to others between
two looks, and sleeps only when nothing has come for long: a sleep lasts at least as long as the
kernel's timers are coarse, and a rank that has its core to itself loses nothing by looking.
(8 ranks on 2 cores, waiting in Python: a pure spin took 46 ms in the median, with yields 1.1 ms.)
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.ep_comm.row_kernels.memory import (
    fence_acquire,
    load_acquire,
    store_release,
)
from whalepod.kernels.cpu.compile_cache import compiled
from whalepod.kernels.cpu.simd import I32, I64, call_c, give_way, intrinsic, relax

SPIN_LOOKS = 200
"""Looks, some 10 us of them, before a wait gives its core away."""
YIELD_NS = 5_000_000
"""How long it gives its core away between looks before it sleeps between them."""
SLEEP_US = 50

_MONOTONIC = 1
"""`CLOCK_MONOTONIC`, the clock of `time.monotonic`."""


@intrinsic
def now_ns(typingctx):
    """Return the time of `time.monotonic_ns`."""

    def codegen(context, builder, signature, args):
        pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        first = builder.bitcast(pair, I64.as_pointer())
        call_c(builder, "clock_gettime", I32, I32(_MONOTONIC), first)
        seconds, rest = builder.load(first), builder.load(builder.gep(first, [I64(1)]))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def _sleep(typingctx):
    """Sleep for `SLEEP_US`, and as long as it takes to be woken."""

    def codegen(context, builder, signature, args):
        call_c(builder, "usleep", I32, I32(SLEEP_US))
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def wait_until(signal, at_least, until_ns):
    """Return the value at the address `signal` once it is high enough, or as it is at the end."""
    for _ in range(SPIN_LOOKS):
        value = load_acquire(signal)
        if value >= at_least:
            return value
        relax()
    start_ns = now_ns()
    while True:
        time_ns = now_ns()  # before the last look: what came in time counts
        value = load_acquire(signal)
        if value >= at_least or time_ns >= until_ns:
            return value
        if time_ns - start_ns < YIELD_NS:
            give_way()
        else:
            _sleep()


@compiled
def wait_for_signal(signal, at_least, until_ns):
    """Do as `wait_until`, for callers in Python."""
    return wait_until(signal, at_least, until_ns)


@compiled
def read_signal(signal):
    """Return the value at the address `signal`, read after all that was read before."""
    fence_acquire()
    return load_acquire(signal)


@compiled
def set_signal(signal, value):
    """Set the value at the address `signal` after all that was stored before."""
    store_release(signal, value)
