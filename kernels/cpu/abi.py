"""The calling convention of parallel kernels, and what they call to share their work.

A kernel is a compiled function of one block of memory, which all threads get. The block holds
counters, then the arguments: the fields of a `record`, eight bytes each, in order. Python fills in
numbers and addresses; compiled code reads the fields of `arguments`, addresses as pointers.

Work is split into items that threads take one by one from an atomic counter. A stage ends when its
items are finished, not when every thread has arrived: a thread that the system has put aside does
not hold up the others between stages. Which thread computes an item never changes its bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import extending, njit, types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr

from whalepod.kernels.cpu.simd import (
    BF16_POINTER,
    F32_POINTER,
    I32_POINTER,
    I64,
    I64_POINTER,
    U8_POINTER,
    give_way,
    intrinsic,
    relax,
)

_NUM_STAGES = 8
_PATIENCE = 2000
"""Looks at a counter (some 100 us of them) before a waiting thread gives its core away."""
NUM_COUNTERS = 2 * _NUM_STAGES
"""int64 values before the arguments: items taken, then items finished, of each stage. The last
stage numbers the threads."""

_POINTERS = {
    "f32": F32_POINTER, "i32": I32_POINTER, "i64": I64_POINTER, "bytes": U8_POINTER,
}  # fmt: skip


def record(*fields: str) -> Any:
    """Return a named tuple class of arguments.

    fields: names, split by blanks, each with its kind: `name` int64, `name:bool`, `name:float` (f32
    in compiled code), or an address: `name:f32`, `:i32`, `:i64`, `:bytes`, `:values` (of the model
    dtype), `:operands` (weights and rows that they multiply: what the kernel is compiled for)
    """
    pairs = [field.partition(":") for line in fields for field in line.split()]
    new_class: Any = namedtuple
    created = new_class("record", [name for name, _, _ in pairs])
    created.kinds = {name: kind or "int" for name, _, kind in pairs}
    return created


@dataclass(frozen=True, slots=True, eq=False)
class ParallelKernel:
    """A function of a block, and the `record` of its arguments.

    The function is compiled once for each model dtype and each type of operands; None: values of
    the model dtype.
    """

    body: Callable[[Any], None]
    arguments: Any
    operands: types.CPointer | None = None

    @property
    def layout(self) -> str:
        """Return the `struct` format of a block."""
        kinds = self.arguments.kinds.values()
        return f"={8 * NUM_COUNTERS}x" + "".join("d" if k == "float" else "q" for k in kinds)

    def block_type(self, dtype: torch.dtype) -> types.Type:
        """Return the type of a block's pointer, which says what the code is compiled for."""
        values = BF16_POINTER if dtype == torch.bfloat16 else F32_POINTER
        if self.operands is None or self.operands == values:
            return values
        return types.CPointer(types.Tuple((values.dtype, self.operands.dtype)))


@functools.cache
def with_operands(kernel: ParallelKernel, pointer: types.CPointer) -> ParallelKernel:
    """Return the kernel for operands that a type of pointer points to."""
    return dataclasses.replace(kernel, operands=pointer)


class _Arguments(types.Type):
    """The arguments in a block: a pointer, whose attributes are read where they are used."""

    def __init__(self, kinds: dict[str, str], block: Any) -> None:
        self.names = list(kinds)
        self.types = {name: _compiled_type(kind, block) for name, kind in kinds.items()}
        super().__init__(name=f"Arguments({kinds}, {block})")


@extending.register_model(_Arguments)
class _ArgumentsModel(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Arguments) -> None:
        super().__init__(manager, kind, I64.as_pointer())


@intrinsic
def arguments(typingctx, block, record):
    """Return the arguments in a block as a record of the given class."""

    def codegen(context, builder, signature, args):
        return _int64_at(builder, args[0], NUM_COUNTERS)

    return _Arguments(record.instance_class.kinds, block)(block, record), codegen


@infer_getattr
class _ArgumentsAttributes(AttributeTemplate):
    key = _Arguments

    def generic_resolve(self, record: Any, name: str) -> Any:  # type: ignore[override]
        return record.types.get(name)


@lower_getattr_generic(_Arguments)
def _read_argument(context: Any, builder: Any, record: _Arguments, value: Any, name: str) -> Any:
    kind = record.types[name]
    source = builder.gep(value, [I64(record.names.index(name))])
    if kind == types.float32:
        source = builder.bitcast(source, ir.DoubleType().as_pointer())
    found = builder.load(source)
    found.set_metadata("invariant.load", builder.module.add_metadata([]))  # may be read once
    if kind == types.float32:
        return builder.fptrunc(found, ir.FloatType())
    if kind == types.boolean:
        return builder.icmp_signed("!=", found, I64(0))
    if isinstance(kind, types.CPointer):
        return builder.inttoptr(found, context.get_value_type(kind))
    return found


def _compiled_type(kind: str, block: Any) -> Any:
    """Return what numba calls a kind of field of a block."""
    plain = {"int": types.int64, "bool": types.boolean, "float": types.float32}
    if kind in plain or kind in _POINTERS:
        return plain.get(kind) or _POINTERS[kind]
    if not isinstance(block.dtype, types.BaseTuple):
        return block
    values, operands = block.dtype.types  # type: ignore[attr-defined]
    return types.CPointer(values if kind == "values" else operands)


def by_operands(declared: Any) -> Any:
    """Make a function for compiled code whose code depends on the type of its first argument.

    `@declared.written_for(pointer, ...)` adds what is called for these types: a module of a weight
    format or an instruction set does, and a machine that has none of it never loads the module.
    """
    known: dict[types.Type, Any] = {}

    @extending.overload(declared, strict=False)
    def _choose(operands, *rest):
        chosen = known[operands]

        def call(operands, *rest):
            return chosen(operands, *rest)

        return call

    def written_for(*pointers):
        def keep(function):
            compiled = njit(function)
            known.update(dict.fromkeys(pointers, compiled))
            return compiled

        return keep

    declared.written_for = written_for
    return declared


kernel_part = njit(inline="always")
"""Makes a function a part of the kernels that call it. One that is compiled apart takes longer to
compile the more it calls: LLVM optimises all of that for each caller anew."""


# -- counters --------------------------------------------------------------------------------------


def _int64_at(builder: Any, block: Any, index: Any) -> Any:
    start = builder.bitcast(block, I64.as_pointer())
    return builder.gep(start, [I64(index) if isinstance(index, int) else index])


@intrinsic
def _fetch_add(typingctx, block, index):
    """Add 1 to the int64 at `index` of a block, atomically; return the old value."""

    def codegen(context, builder, signature, args):
        counter = _int64_at(builder, args[0], args[1])
        return builder.atomic_rmw("add", counter, I64(1), "seq_cst")

    return types.int64(block, types.int64), codegen


@intrinsic
def _load_acquire(typingctx, block, index):
    """Return the int64 at `index` of a block; later loads see what was stored before it rose."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_int64_at(builder, args[0], args[1]), "acquire", 8)

    return types.int64(block, types.int64), codegen


@njit
def thread_number(block):
    """Return 0, 1, ... to the threads that ask, once each."""
    return _fetch_add(block, _NUM_STAGES - 1)


@njit
def items(block, stage, num_items, is_last=False):
    """Yield the items that this thread takes; end when all items of the stage are finished.

    In a kernel's last stage there is nothing to wait for.
    """
    while True:
        item = _fetch_add(block, stage)
        if item >= num_items:
            break
        yield item
        if not is_last:
            finish(block, stage)
    if not is_last:
        while _load_acquire(block, _NUM_STAGES + stage) < num_items:
            relax()


@njit
def finish(block, stage):
    """Tell that an item of a stage is done."""
    _fetch_add(block, _NUM_STAGES + stage)


@njit
def wait_patiently(block, stage, num_items):
    """Return when all items of a stage are done; after a while, give the core away meanwhile."""
    num_looks = 0
    while _load_acquire(block, _NUM_STAGES + stage) < num_items:
        relax()
        num_looks += 1
        if num_looks > _PATIENCE:
            give_way()
