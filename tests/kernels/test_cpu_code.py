"""What the CPU kernels are compiled to, here and on a lesser CPU, and what stays bit-equal."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from whalepod.kernels.cpu import CpuKernels, simd
from whalepod.kernels.interface import GateConfig

GATE = GateConfig(num_experts=300, num_experts_per_token=6)
KERNELS = CpuKernels(num_threads=2)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


EMITTED_CODE = """
import torch
from whalepod.kernels.cpu import attention, experts, linear, thread_pool
from whalepod.kernels.cpu.abi import with_operands
from whalepod.kernels.cpu.amx import attention as _, int8, tiles
from whalepod.kernels.cpu.simd import BF16_POINTER, TILE_BF16_POINTER, TILE_U8_POINTER
for kernel in (
    with_operands(linear.LINEAR, TILE_BF16_POINTER),
    with_operands(experts.EXPERTS, TILE_BF16_POINTER),
    with_operands(attention.ATTENTION, BF16_POINTER),
    with_operands(attention.ATTENTION, TILE_BF16_POINTER),
    with_operands(linear.LINEAR, TILE_U8_POINTER),
):
    function = thread_pool.new_function(kernel, torch.bfloat16)
    function.compile()
    code = function.assembly()
    print(*(code.count(name) for name in ("vdpbf16ps", "tdpbf16ps", "vpdpbusd", "tdpbsud")))
"""


def test_products_use_the_instructions_of_their_kind(tmp_path: Path) -> None:
    """Compiled for a CPU that has them, on any CPU of its family; the code is not called."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return  # LLVM would compile for another family of processors
    features = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512bf16 avx512vnni "
    features += "amx-tile amx-bf16 amx-int8"
    run = _run_python(
        ["-c", EMITTED_CODE],
        tmp_path,
        NUMBA_CPU_NAME="sapphirerapids",
        NUMBA_CPU_FEATURES=",".join(f"+{name}" for name in features.split()),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    linear, experts, attention, tile_attention, int8 = (
        [int(n) for n in line.split()] for line in run.stdout.splitlines()
    )
    for vectors, *_ in (linear, experts, attention):
        assert vectors >= 16
    for _, tiles, *_ in (linear, experts, tile_attention):
        assert tiles >= 4
    assert int8[2] >= 16
    assert int8[3] >= 4


PARITY_ON_AN_OLDER_CPU = """
import sys, pytest
from whalepod.kernels.cpu import simd
assert simd.num_lanes() == 8 and not simd.target_has("avx512bf16")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:], "-k", sys.argv[1]]))
"""


@pytest.mark.slow
def test_parity_holds_for_a_cpu_without_avx512() -> None:
    if not simd.target_has("avx512f"):
        return  # the tests of parity hold here as they stand
    chosen = (
        "test_linear or test_batched_linear or test_gated_mlp or test_experts or test_route "
        "or test_gumbel or (test_mla_attention and 9-72 and bfloat16)"
    )
    folder = Path(__file__).parent
    files = [str(folder / name) for name in ("test_cpu_parity.py", "test_int8.py")]
    run = _run_python(
        ["-c", PARITY_ON_AN_OLDER_CPU, chosen, *files],
        Path(os.environ["NUMBA_CACHE_DIR"]),  # its code is kept for the next run, beside ours
        NUMBA_CPU_NAME="haswell",
        NUMBA_CPU_FEATURES="",  # else those of this machine stay
        ONEDNN_MAX_CPU_ISA="AVX2",
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def _run_python(
    arguments: list[str], cache: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, num_threads: int) -> None:
    kernels = CpuKernels(num_threads=num_threads, is_invariant=True)
    x = random(40, 300, dtype=dtype, seed=1)
    linear = kernels.pack_linear(random(70, 300, dtype=dtype))
    heads = [
        kernels.pack_batched_linear(random(3, 100, 60, dtype=dtype)),
        kernels.pack_batched_linear(random(3, 60, 100, dtype=dtype).transpose(1, 2)),
    ]
    experts = kernels.pack_experts(
        random(5, 2 * 40, 300, dtype=dtype), random(5, 300, 40, dtype=dtype)
    )
    ids = random(40, 5, dtype=dtype, seed=2).argsort(dim=-1)[:, :2].contiguous()
    weights = random(40, 2, dtype=torch.float32, seed=3)

    def compute(rows: slice) -> list[torch.Tensor]:
        part = x[rows]
        return [
            kernels.linear(part, linear),
            kernels.linear_f32(part, linear),
            *(kernels.batched_linear(part.view(-1, 3, 100), weight) for weight in heads),
            kernels.experts(part, ids[rows], weights[rows], experts),
            kernels.rms_norm(part, x[0], 1e-6),
            kernels.gate(part.float(), None, GATE)[1],
        ]

    together = compute(slice(0, 40))
    for first, last in ((0, 1), (1, 3), (5, 8), (7, 11), (0, 5), (30, 37), (3, 40)):
        for alone, expected in zip(compute(slice(first, last)), together, strict=True):
            assert torch.equal(alone, expected[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "rank"), [(48, 32), (96, 64)])
def test_attention_has_the_same_bits_split_or_not(
    dtype: torch.dtype, width: int, rank: int
) -> None:
    num_tokens, num_keys = 12, 1200
    cache = random(20, 64, width, dtype=dtype)
    tables = torch.arange(20, dtype=torch.int32).repeat(num_tokens, 1)
    q = random(num_tokens, 5, width, dtype=dtype, seed=1)
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    lens = torch.full((num_tokens,), num_keys, dtype=torch.int32)
    walked = KERNELS.mla_attention(q, cache, starts, lens, tables, 0.2, rank)
    apart = KERNELS.mla_attention(q[:1], cache, starts[:2], lens[:1], tables[:1], 0.2, rank)
    assert torch.equal(apart[0], walked[0][:1])
    assert torch.equal(apart[1], walked[1][:1])


def test_two_threads_give_the_bits_of_one() -> None:
    one = CpuKernels(num_threads=1)
    gate_up, down = (random(9, *s, dtype=torch.bfloat16) for s in ((96, 64), (64, 48)))
    packed = one.pack_experts(gate_up, down)
    x = random(7, 64, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(9)[:4] for _ in range(7)])
    weights = torch.rand(7, 4)
    expected = one.experts(x, ids, weights, packed)
    for _ in range(20):
        assert torch.equal(KERNELS.experts(x, ids, weights, packed), expected)


def test_warm_up_tells_its_progress_and_leaves_nothing_to_compile() -> None:
    kernels = CpuKernels(num_threads=1)
    seen: list[tuple[int, int]] = []
    kernels.warm_up(torch.bfloat16, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(seen[-1][1] + 1))
    assert all(total == seen[-1][1] for _, total in seen)
