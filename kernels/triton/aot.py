"""Compiles the GPU kernels on any machine and lists what they need of an SM.

`python -m whalepod.kernels.triton.aot` fails if a kernel spills registers. Nothing is run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from whalepod.kernels.triton import ep
from whalepod.kernels.triton.nvshmem import LIBRARY, find_bitcode

_WARP_THREADS = 32
_RECORD, _AT_IDS, _AT_VALUES, _ITEM = 14384, 4, 48, 2
"""A record of 8 choices and 7168 bfloat16 values."""
_BLOCK_H = 1024
_PTXAS_FLAGS = ("--regAllocOptLevel=2",)
"""Triton's own, without which its ptxas allocates worse."""

_POINTERS = {
    "x_TH": "*bf16", "y_TH": "*bf16", "y_SH": "*bf16", "out_SH": "*bf16", "heap_values": "*bf16",
    "ids_TK": "*i64", "slots_TR": "*i64", "counts_R": "*i64", "found_R": "*i64",
    "row_of_RMK": "*i64", "heap_i32": "*i32", "count_ER": "*i32",
    "info_S": "*i32", "weights_TK": "*fp32",
}  # fmt: skip
"""Types of the kernels' tensors, by name."""

_I64 = (
    "heap_address",
    "staging",
    "staging_stride",
    "rows",
    "rows_stride",
    "word",
    "words",
    "epoch",
)
_CONSTANTS = {
    "RECORD": _RECORD, "AT_IDS": _AT_IDS, "AT_VALUES": _AT_VALUES, "ITEM": _ITEM, "BLOCK_K": 8,
    "BLOCK_H": _BLOCK_H, "BLOCK_M": 128, "BLOCK_R": 16, "BLOCK_S": 1024,
}  # fmt: skip

NVSHMEM_KERNELS = {"put": ep.put, "signal": ep.signal, "wait": ep.wait}
"""Kernels that call NVSHMEM: their modules must be announced to it."""

KERNELS = NVSHMEM_KERNELS | {
    "dispatch_pack": ep.dispatch_pack, "count_rows": ep.count_rows, "spread": ep.spread,
    "combine_pack": ep.combine_pack, "combine_sum": ep.combine_sum,
}  # fmt: skip


_LINKED_SPILL_BYTES = 16
"""NVSHMEM's own code is inlined and spills a little around its calls (measured: put 4, signal 12);
our kernels spill nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What one compiled kernel needs: registers of a thread, bytes spilled, of shared memory."""

    name: str
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    cubin_bytes: int


def build(name: str, arch: int, extern_libs: Mapping[str, str]) -> Built:
    """Compile one kernel for sm_`arch`."""
    kernel = KERNELS[name]
    signature, constants = _signature(kernel)
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {
        "num_warps": 8 if "BLOCK_H" in kernel.arg_names else 4,
        "extern_libs": dict(extern_libs),
    }
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, _WARP_THREADS), options=options
    )
    registers, spills = _resources(name, compiled.asm["ptx"], arch)
    return Built(
        name=name,
        num_registers=registers,
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        cubin_bytes=len(compiled.asm["cubin"]),
    )


def _signature(kernel: Any) -> tuple[dict[str, str], dict[tuple[int, ...], int]]:
    """Return types by argument and the values of constants by place."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], int] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in _CONSTANTS:
            signature[name] = "constexpr"
            constants[(place,)] = _CONSTANTS[name]
        else:
            signature[name] = _POINTERS.get(name, "i64" if name in _I64 else "i32")
    return signature, constants


def _resources(name: str, ptx: str, arch: int) -> tuple[int, int]:
    """Return registers and spilled bytes of the kernel itself as ptxas reports them.

    What is linked of NVSHMEM stays functions of their own, and spills for itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        target = f"sm_{arch}a" if f"sm_{arch}a" in ptx else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", *_PTXAS_FLAGS, f"--gpu-name={target}", source]
        done = subprocess.run(
            [*command, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True, text=True, check=True, timeout=600,
        )  # fmt: skip
    return read_ptxas(name, done.stderr)


def read_ptxas(name: str, report: str) -> tuple[int, int]:
    """Return registers and spilled bytes of kernel `name` in what `ptxas -v` prints."""
    registers = re.search(r"Used (\d+) registers", report.split(f"entry function '{name}'")[-1])
    spills = re.search(
        rf"Function properties for {name}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        report,
    )
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas says nothing about {name}:\n{report[:2000]}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def main(arguments: list[str] | None = None) -> int:
    """Build, print a line per kernel, and return 1 if one spills."""
    parser = argparse.ArgumentParser(description="Compile the GPU kernels ahead of time.")
    parser.add_argument("--arch", type=int, default=90, help="90: Hopper")
    parser.add_argument("kernels", nargs="*", default=sorted(KERNELS))
    chosen = parser.parse_args(arguments)
    libraries = {LIBRARY: str(find_bitcode(chosen.arch))}
    print(f"{'kernel':16} {'registers':>9} {'spilled':>8} {'shared':>7} {'cubin bytes':>12}")
    is_good = True
    for name in chosen.kernels:
        built = build(name, chosen.arch, libraries if name in NVSHMEM_KERNELS else {})
        print(
            f"{name:16} {built.num_registers:9} {built.spill_bytes:8} {built.shared_bytes:7} "
            f"{built.cubin_bytes:12}"
        )
        allowed = _LINKED_SPILL_BYTES if name in NVSHMEM_KERNELS else 0
        is_good = is_good and built.spill_bytes <= allowed
    if not is_good:
        print("a kernel spills registers: use smaller blocks or more warps", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
