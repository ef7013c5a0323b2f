"""Where the time of a forward pass goes, and how far it is from what the machine can do.

The limits, reading memory and multiplying matrices, are measured in the same minutes. Stages are
timed one operation at a time: their sum is a little more than a step that runs recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from whalepod.tools.table import format_table

if TYPE_CHECKING:
    from whalepod.kernels.interface import Kernels
    from whalepod.models.batch import ForwardBatch
    from whalepod.models.deepseek_v3 import DeepseekV3

_STREAM_BYTES = 256 << 20
_GEMM_SIZE = 1024
_OPERATIONS = (
    "embed", "rms_norm", "add_rms_norm", "linear", "linear_f32", "absorb_queries", "rope",
    "write_latent", "mla_attention", "mla_prefill", "batched_linear", "route", "experts",
    "gated_mlp",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Stage:
    """One kind of operation in one forward pass."""

    name: str
    ms: float = 0.0
    weight_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Roof:
    """Forward passes of one shape against the machine's limits."""

    num_requests: int
    num_tokens: int
    """Tokens of a request in the step."""
    context_tokens: int
    step_ms: float
    tokens_per_s: float
    bytes_per_token: int
    """Weights and cache rows read, by the tokens of the step."""
    read_gb_per_s: float
    read_limit_gb_per_s: float
    gflops: float
    gemm_limit_gflops: float
    stages: list[Stage] = field(default_factory=list)

    @property
    def share_of_read_limit(self) -> float:
        return self.read_gb_per_s / self.read_limit_gb_per_s

    @property
    def share_of_gemm_limit(self) -> float:
        return self.gflops / self.gemm_limit_gflops

    def as_json(self) -> dict[str, Any]:
        shares = {"share_of_read_limit": self.share_of_read_limit}
        return asdict(self) | shares | {"share_of_gemm_limit": self.share_of_gemm_limit}


def measure_roof(
    model: DeepseekV3,
    kernels: Kernels,
    num_requests: int,
    num_tokens: int,
    context_tokens: int,
    *,
    rounds: int,
) -> Roof:
    """Run steps of `num_tokens` random tokens after `context_tokens` for each request."""
    import torch

    from whalepod.models.cache import LatentCache

    num_blocks = num_requests * -(-(context_tokens + num_tokens) // 64)
    cache = LatentCache(
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        row_width=model.config.cache_row_width,
        dtype=model.dtype,
        device="cpu",
    )
    batch = random_batch(num_requests, num_tokens, context_tokens, model.config.vocab_size)

    def step() -> None:
        hidden_TH = model.forward(batch, cache)
        model.logits(hidden_TH[num_tokens - 1 :: num_tokens])

    with torch.inference_mode():
        read_limit, gemm_limit = _read_limit(), _gemm_limit(model.dtype)
        times = [_seconds(step) for _ in range(rounds + 2)][2:]
        with _recorded(kernels) as found:
            step()
    step_s, tokens = median(times), num_requests * num_tokens
    row_bytes = model.config.cache_row_width * model.dtype.itemsize
    cache_bytes = model.config.num_layers * row_bytes * num_requests * context_tokens
    num_bytes = cache_bytes + sum(stage.weight_bytes for stage in found.stages.values())
    return Roof(
        num_requests=num_requests,
        num_tokens=num_tokens,
        context_tokens=context_tokens,
        step_ms=1e3 * step_s,
        tokens_per_s=tokens / step_s,
        bytes_per_token=num_bytes // tokens,
        read_gb_per_s=num_bytes / step_s / 1e9,
        read_limit_gb_per_s=read_limit,
        gflops=found.num_operations / step_s / 1e9,
        gemm_limit_gflops=gemm_limit,
        stages=sorted(found.stages.values(), key=lambda stage: -stage.ms),
    )


def format_roofs(roofs: Sequence[Roof]) -> str:
    """Return a table of the shapes and one of the stages of each."""
    rows = [["requests x tokens, context", "tok/s", "step ms", "MB/token", "GB/s", "of read limit",
             "GFLOPS", "of GEMM limit"]]  # fmt: skip
    for r in roofs:
        rows.append([
            f"{r.num_requests} x {r.num_tokens}, {r.context_tokens}", f"{r.tokens_per_s:.1f}",
            f"{r.step_ms:.2f}", f"{r.bytes_per_token / 1e6:.1f}", f"{r.read_gb_per_s:.1f}",
            f"{r.share_of_read_limit:.0%} of {r.read_limit_gb_per_s:.1f}", f"{r.gflops:.0f}",
            f"{r.share_of_gemm_limit:.0%} of {r.gemm_limit_gflops:.0f}",
        ])  # fmt: skip
    parts = [format_table(rows, numeric=True)]
    for r in roofs:
        stages = [["stage", "ms", "MB of weights", "GB/s"]]
        for stage in r.stages:
            rate = stage.weight_bytes / stage.ms / 1e6 if stage.ms else 0.0
            stages.append([
                stage.name, f"{stage.ms:.2f}", f"{stage.weight_bytes / 1e6:.1f}", f"{rate:.1f}",
            ])  # fmt: skip
        head = f"{r.num_requests} x {r.num_tokens} tokens, context {r.context_tokens}:"
        parts.append(f"{head}\n{format_table(stages, numeric=True)}")
    return "\n\n".join(parts)


# -- the limits ---------------------------------------------------------------------------------


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _read_limit() -> float:
    """Return GB/s of summing memory that no cache holds, with all threads."""
    import torch

    memory = torch.zeros(_STREAM_BYTES // 8, dtype=torch.int64)
    return _STREAM_BYTES / min(_seconds(memory.sum) for _ in range(5)) / 1e9


def _gemm_limit(dtype: Any) -> float:
    """Return GFLOPS of a square product in the caches, with all threads."""
    import torch

    a, b = (torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype) for _ in range(2))
    return 2 * _GEMM_SIZE**3 / min(_seconds(lambda: torch.mm(a, b)) for _ in range(10)) / 1e9


# -- the stages ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    stages: dict[str, Stage] = field(default_factory=dict)
    num_operations: int = 0
    """Floating point operations of the products with weights."""


@contextmanager
def _recorded(kernels: Kernels) -> Iterator[_Found]:
    """Time every operation of a backend, and count the weights that it reads."""
    found = _Found()

    def wrap(name: str) -> Callable[..., Any]:
        operation = getattr(kernels, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            result = operation(*arguments, **keywords)
            elapsed = time.perf_counter() - started
            stage = found.stages.setdefault(name, Stage(name=name))
            stage.ms += 1e3 * elapsed
            num_bytes, num_operations = _count(kernels, name, arguments)
            stage.weight_bytes += num_bytes
            found.num_operations += num_operations
            return result

        return timed

    replaced: dict[str, Callable[..., Any]] = {name: wrap(name) for name in _OPERATIONS}
    replaced["replay"] = lambda key, dtype, compute: compute()
    own = {name: vars(kernels)[name] for name in replaced if name in vars(kernels)}
    for name, function in replaced.items():
        setattr(kernels, name, function)
    try:
        yield found
    finally:
        for name in replaced:
            delattr(kernels, name)  # a method of the class is there again
        for name, function in own.items():
            setattr(kernels, name, function)


def _count(kernels: Kernels, name: str, arguments: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of weights that an operation reads, and its floating point operations."""
    places = {
        "linear": 1, "linear_f32": 1, "batched_linear": 1, "absorb_queries": 1, "gated_mlp": 1,
        "route": 1, "experts": 3,
    }  # fmt: skip
    if name not in places:
        return 0, 0
    tensors, sizes = kernels.packed_parts(arguments[places[name]])
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    num_values = sum(columns * length for columns, length in sizes)
    num_rows = len(arguments[0])
    if name == "experts":
        ids_TK = arguments[1]
        chosen = ids_TK[ids_TK >= 0]
        num_experts = len(tensors[0])
        return num_bytes * len(chosen.unique()) // num_experts, 2 * num_values * len(chosen)
    num_matrices = len(tensors[0]) if name in ("batched_linear", "absorb_queries") else 1
    return num_bytes, 2 * num_values * num_matrices * num_rows


def random_batch(
    num_requests: int, num_tokens: int, context_tokens: int, vocab_size: int
) -> ForwardBatch:
    """Make a step of random tokens, `num_tokens` after `context_tokens` for each request."""
    import torch

    from whalepod.models.batch import ForwardBatch

    end = context_tokens + num_tokens
    tables_BM = torch.arange(num_requests * -(-end // 64), dtype=torch.int32).view(num_requests, -1)
    positions_T = torch.arange(context_tokens, end)
    slots_BT = tables_BM.long()[:, positions_T // 64] * 64 + positions_T % 64
    generator = torch.Generator().manual_seed(0)
    shape = (num_requests * num_tokens,)
    return ForwardBatch(
        token_ids_T=torch.randint(3, vocab_size, shape, generator=generator),
        positions_T=positions_T.repeat(num_requests),
        slots_T=slots_BT.flatten(),
        query_start_B1=torch.arange(0, shape[0] + 1, num_tokens, dtype=torch.int32),
        context_lens_B=torch.full((num_requests,), end, dtype=torch.int32),
        block_tables_BM=tables_BM,
        max_query_tokens=num_tokens,
    )
