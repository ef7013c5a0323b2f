"""How compiled code waits for a word that another process sets: without the interpreter's lock.

A wait looks again and again for some microseconds, then gives its core to whoever wants it between
two looks, and sleeps only when nothing has come for long: a sleep lasts at least as long as the
kernel's timers are coarse, and a rank that has its core to itself loses nothing by looking.
(8 ranks on 2 cores, waiting in Python: a pure spin took 46 ms in the median, with yields 1.1 ms.)
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from whalepod.ep_comm.row_kernels.cache import compiled
from whalepod.ep_comm.row_kernels.memory import load_acquire
from whalepod.kernels.cpu.simd import intrinsic

SPIN_LOOKS = 200
"""Looks, some 10 us of them, before a wait gives its core away."""
YIELD_NS = 5_000_000
"""How long it gives its core away between looks before it sleeps between them."""
SLEEP_US = 50

_MONOTONIC = 1
"""`CLOCK_MONOTONIC`, the clock of `time.monotonic`."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _call(builder, name, result, *arguments):
    """Call a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(arguments))


@intrinsic
def now_ns(typingctx):
    """Return the time of `time.monotonic_ns`."""

    def codegen(context, builder, signature, args):
        pair = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        first = builder.bitcast(pair, _I64.as_pointer())
        _call(builder, "clock_gettime", _I32, _I32(_MONOTONIC), first)
        seconds, rest = builder.load(first), builder.load(builder.gep(first, [_I64(1)]))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def _relax(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        if str(builder.module.triple).startswith(("x86_64", "i686")):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield(typingctx):
    """Let another thread have the core."""

    def codegen(context, builder, signature, args):
        _call(builder, "sched_yield", _I32)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _sleep(typingctx):
    """Sleep for `SLEEP_US`, and as long as it takes to be woken."""

    def codegen(context, builder, signature, args):
        _call(builder, "usleep", _I32, _I32(SLEEP_US))
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def wait_until(word, at_least, until_ns):
    """Return the value at the address `word` once it is high enough, or as it is at the end."""
    for _ in range(SPIN_LOOKS):
        value = load_acquire(word)
        if value >= at_least:
            return value
        _relax()
    start_ns = now_ns()
    while True:
        time_ns = now_ns()  # before the last look: what came in time counts
        value = load_acquire(word)
        if value >= at_least or time_ns >= until_ns:
            return value
        if time_ns - start_ns < YIELD_NS:
            _yield()
        else:
            _sleep()


@compiled
def wait_for_word(word, at_least, until_ns):
    """Do as `wait_until`, for callers in Python."""
    return wait_until(word, at_least, until_ns)
