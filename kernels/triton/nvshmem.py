"""NVSHMEM's device functions in Triton kernels: calls, the library to link, modules to announce.

No wheel has an interface for Triton. A call names a symbol of the device bitcode, which is linked
when a kernel is compiled; after a kernel is loaded, NVSHMEM must be told of its module.

Scalar calls run in every thread of a program: only what may happen many times (SET, not ADD) is
declared here. Addresses are i64, of this rank's own symmetric heap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triton import knobs
from triton.language import core

LIBRARY = "libnvshmem_device"
"""The name under which kernels are linked with the bitcode (`extern_libs`)."""

SIGNAL_SET = 9
COMPARE_GE = 5


def device_function(symbol: str, arguments: Sequence[Any], result: Any = core.int32) -> Any:
    """Return a function that kernels can call; arguments are cast to the types that are given.

    Under the interpreter a function of another module gets no `_semantic`, so it is bound here;
    what the symbol does is then for `InterpreterBuilder.create_extern_elementwise` to say.
    """

    def call(*values: Any, _semantic: Any = None) -> Any:
        cast = [
            core.cast(value, kind, _semantic=_semantic)
            for value, kind in zip(values, arguments, strict=True)
        ]
        symbols = {tuple(arguments): (symbol, result)}
        return core.extern_elementwise("", "", cast, symbols, is_pure=False, _semantic=_semantic)

    if knobs.runtime.interpret:
        from triton.runtime.interpreter import interpreter_semantic

        return functools.partial(call, _semantic=interpreter_semantic)
    return core.extern(call)


put_block = device_function(
    "nvshmemx_putmem_nbi_block", (core.int64, core.int64, core.int64, core.int32)
)
"""(destination, source, bytes, rank): begin a copy, by all threads of the program."""

quiet = device_function("nvshmem_quiet", ())
"""Complete what this program has put."""

signal_op = device_function("nvshmemx_signal_op", (core.int64, core.int64, core.int32, core.int32))
"""(word, value, SIGNAL_SET, rank)."""

signal_fetch = device_function("nvshmem_signal_fetch", (core.int64,), core.int64)
"""(word): its value; orders nothing."""

signal_wait_until = device_function(
    "nvshmem_signal_wait_until", (core.int64, core.int32, core.int64), core.int64
)
"""(word, comparison, value): return when it holds; later reads see what was put before."""


def find_bitcode(arch: int, folders: Sequence[Path] | None = None) -> Path:
    """Return the device bitcode for `arch` (90 for sm_90): its own file, or the one for all.

    folders  to look in; default: where the nvidia-nvshmem wheel keeps its libraries
    Raises FileNotFoundError that says what is there and what to install.
    """
    searched = _library_folders() if folders is None else list(folders)
    for name in (f"{LIBRARY}_sm_{arch}.bc", f"{LIBRARY}.bc"):
        for folder in searched:
            if (folder / name).is_file():
                return folder / name
    found = sorted(path.name for folder in searched for path in folder.glob(f"{LIBRARY}*.bc"))
    raise FileNotFoundError(
        f"no NVSHMEM bitcode for sm_{arch} in {[str(folder) for folder in searched]}, "
        f"found {found or 'none'}: install whalepod[cuda]"
    )


def _library_folders() -> list[Path]:
    spec = find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(place) / "nvshmem" / "lib" for place in spec.submodule_search_locations]


def announce_modules(init: Callable[[int], Any], kernel_names: Sequence[str]) -> None:
    """Call `init` (`nvshmem.bindings.cumodule_init`) with the module of each kernel that is loaded.

    kernel_names  of the kernels that call NVSHMEM
    """
    names = frozenset(kernel_names)

    def on_load(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        if name in names:
            init(int(module))

    knobs.runtime.kernel_load_end_hook.add(on_load)
