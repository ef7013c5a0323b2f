"""Which NVSHMEM bitcode is linked, and which modules are announced."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton import knobs

from whalepod.kernels.triton.aot import read_ptxas
from whalepod.kernels.triton.nvshmem import announce_modules, find_bitcode


def test_the_file_of_the_architecture_is_preferred_and_the_generic_one_will_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "libnvshmem_device.bc").touch()
    assert find_bitcode(90, [tmp_path]).name == "libnvshmem_device.bc"
    (tmp_path / "libnvshmem_device_sm_90.bc").touch()
    assert find_bitcode(90, [tmp_path]).name == "libnvshmem_device_sm_90.bc"


def test_missing_bitcode_is_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "libnvshmem_device_sm_80.bc").touch()
    with pytest.raises(FileNotFoundError, match=r"no NVSHMEM bitcode for sm_90 .*sm_80\.bc"):
        find_bitcode(90, [tmp_path])


def test_modules_of_kernels_that_call_nvshmem_are_announced_when_loaded() -> None:
    announced: list[int] = []
    hooks = knobs.runtime.kernel_load_end_hook.calls
    before = list(hooks)
    try:
        announce_modules(announced.append, ["put"])
        for module, name in ((7, "put"), (8, "combine_sum")):
            knobs.runtime.kernel_load_end_hook(module, None, name, {}, "hash")
    finally:
        hooks[:] = before
    assert announced == [7]


def test_registers_and_spills_are_those_of_the_kernel_itself() -> None:
    report = """ptxas info    : Function properties for nvshmemi_transfer
    176 bytes stack frame, 84 bytes spill stores, 84 bytes spill loads
ptxas info    : Compiling entry function 'wait' for 'sm_90a'
ptxas info    : Function properties for wait
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
"""
    assert read_ptxas("wait", report) == (48, 12)
    with pytest.raises(RuntimeError, match="ptxas says nothing about spread"):
        read_ptxas("spread", report)
