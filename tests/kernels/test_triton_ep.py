"""The GPU kernels of dispatch and combine: under the interpreter, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    """Run a program of its own: Triton decides at import whether it interprets."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / '.src'}",
        "TRITON_INTERPRET": "1" if interpret else "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=400, env=environment, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ["triton", "python"],
        pytest.param(["triton", "triton", "python", "triton"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_kernels_and_python_ranks_speak_one_protocol(kinds: Sequence[str]) -> None:
    done = run("tests.kernels.ep_interpreted", *kinds, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_a_kernel_that_does_not_complete_its_puts_is_noticed() -> None:
    done = run("tests.kernels.ep_interpreted", "triton_without_quiet", "triton", interpret=True)
    assert done.returncode == 1
    assert "AssertionError" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.gpu
def test_every_kernel_compiles_for_hopper_with_the_bitcode_and_spills_nothing_itself() -> None:
    pytest.importorskip("nvshmem", reason="gpu: needs the wheels of whalepod[cuda]")
    done = run("whalepod.kernels.triton.aot", "--arch", "90", interpret=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}
    assert set(lines) == {
        "dispatch_pack", "put", "signal", "wait", "count_rows", "spread", "combine_pack",
        "combine_sum",
    }  # fmt: skip
    for name, (registers, spilled, _, cubin_bytes) in lines.items():
        assert 0 < int(registers) <= 128, name
        linked = int(cubin_bytes) > 100_000
        assert int(spilled) <= (16 if linked else 0), name
        assert linked == (name in {"put", "signal", "wait"}), name
