"""What int8 changes in a model's predictions, beside llama.cpp's q8_0.

`python -m whalepod.tools.peers.quality MODEL`.

The figure is the mean KL divergence of the next token's distribution from the bf16 engine's, over
every position of the same random prompts. q8_0 (32 values share an f16 scale, max / 127) is spelled
out in plain torch, in f32, with the weights alone rounded and, as llama.cpp multiplies, with the
rows rounded too. Embeddings, norms and routers stay as they are, as in `--quantization int8`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from whalepod.kernels.interface import Packed
from whalepod.kernels.reference import ReferenceKernels
from whalepod.kernels.reference_int8 import Int8ReferenceKernels, blocks_of, join_blocks
from whalepod.models.cache import LatentCache
from whalepod.models.config import ConfigError, load_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.source import SourceError, resolve_model
from whalepod.models.weights import CheckpointWeights, DummyWeights, Weights, WeightsError
from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.tools.flags import require_positive
from whalepod.tools.measure.limits import random_batch
from whalepod.tools.measure.passes import load_for_passes
from whalepod.tools.peers.command import run_alone
from whalepod.tools.table import format_table

MAX_RATIO = 1.1
"""int8 may be this much further from bf16 than weights of q8_0 are."""
_ROWS_AT_ONCE = 64
WEIGHTS_ONLY, WEIGHTS_AND_ROWS = "q8_0 weights", "q8_0 weights and rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """What is compared."""

    num_prompts: Annotated[int, "prompts of random tokens"] = 16
    prompt_tokens: Annotated[int, "tokens of each; all positions count"] = 64
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_prompts", "prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far one way of computing is from the bf16 engine."""

    name: str
    mean_kl: float
    same_best: float
    """Share of positions where the likeliest token is the same."""
    ratio: float
    """Mean KL by that of q8_0 weights."""


def quality(engine: EngineConfig, config: QualityConfig) -> int:
    """Measure how far int8 moves predictions from bf16, beside llama.cpp's q8_0.

    MODEL is a checkpoint folder, a preset or a Hugging Face id; it is loaded five times.
    """
    bf16_TV = _engine_logits(engine, config, "none")
    others = {"int8": _engine_logits(engine, config, "int8")}
    for name, kernels in (
        ("fp32", ReferenceKernels()),
        (WEIGHTS_ONLY, Q8Kernels(rounds_rows=False)),
        (WEIGHTS_AND_ROWS, Q8Kernels(rounds_rows=True)),
    ):
        others[name] = _plain_logits(engine, config, kernels)
    distances = measure_distances(bf16_TV, others)
    if config.json:
        found = {d.name: {"mean_kl": d.mean_kl, "same_best": d.same_best, "ratio": d.ratio}
                 for d in distances}  # fmt: skip
        print(json.dumps({"model": engine.source.model, "distances": found}))
    else:
        print(f"{engine.source.model}: {len(bf16_TV):,} positions, distance from bf16\n")
        print(_table(distances))
    return 0


def measure_distances(bf16_TV: Tensor, others: dict[str, Tensor]) -> list[Distance]:
    """Compare logits with the bf16 engine's; `WEIGHTS_ONLY` must be among the names."""
    kl = {name: mean_kl(bf16_TV, logits_TV) for name, logits_TV in others.items()}
    best_T = bf16_TV.argmax(dim=-1)
    return [
        Distance(
            name=name,
            mean_kl=kl[name],
            same_best=float((logits_TV.argmax(dim=-1) == best_T).double().mean()),
            ratio=kl[name] / kl[WEIGHTS_ONLY],
        )
        for name, logits_TV in others.items()
    ]


def mean_kl(exact_TV: Tensor, other_TV: Tensor) -> float:
    """Return the mean of KL(exact || other) over positions, in f64."""
    total = 0.0
    for exact, other in zip(
        torch.split(exact_TV, _ROWS_AT_ONCE), torch.split(other_TV, _ROWS_AT_ONCE), strict=True
    ):
        p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(exact_TV)


def round_to_q8_0(x: Tensor) -> Tensor:
    """Return what q8_0 keeps of `x` along its last dimension, in f32.

    Source: llama.cpp, `quantize_row_q8_0`.
    """
    blocks = blocks_of(x)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    values = torch.where(scale > 0, blocks / scale, 0.0).round()
    return join_blocks(values * scale.half().float(), x.shape[-1])


class Q8Kernels(Int8ReferenceKernels):
    """The twin of int8, with weights of q8_0 and, if asked for, rows of q8_0 in every product."""

    name = "reference, q8_0"

    def __init__(self, *, rounds_rows: bool) -> None:
        self._rounds_rows = rounds_rows

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> Packed:
        return super().pack_linear(weight_NK)

    def round_weight(self, weight: Tensor) -> Tensor:
        return round_to_q8_0(weight)

    def round_rows(self, x: Tensor) -> Tensor:
        return round_to_q8_0(x) if self._rounds_rows else x


def _engine_logits(
    engine: EngineConfig, config: QualityConfig, quantization: Literal["none", "int8"]
) -> Tensor:
    """Compute the prompts as `whalepod serve` does, in bf16 or int8."""
    source = replace(engine.source, dtype="bf16", quantization=quantization)
    model, _ = load_for_passes(replace(engine, source=source), config.prompt_tokens)
    return _logits(model, config)


def _plain_logits(engine: EngineConfig, config: QualityConfig, kernels: ReferenceKernels) -> Tensor:
    """Compute the prompts in f32 with kernels of the reference."""
    source, is_dummy = engine.source, engine.source.load_format == "dummy"
    try:
        folder = resolve_model(source.model, source.revision, with_weights=not is_dummy)
        model_config = load_config(folder)
        weights: Weights
        if is_dummy:
            weights = DummyWeights(model_config, dtype=torch.float32, seed=source.seed)
        else:
            weights = CheckpointWeights(folder, model_config, dtype=torch.float32)
        model = DeepseekV3(
            model_config,
            weights,
            kernels,
            max_positions=config.prompt_tokens,
            absorbed_max_query_tokens=engine.device.absorbed_max_query_tokens,
        )
    except (ConfigError, SourceError, WeightsError) as error:
        raise StartupError(str(error)) from error
    return _logits(model, config)


def _logits(model: DeepseekV3, config: QualityConfig) -> Tensor:
    """Return the logits of every position of every prompt, `[T, V]` f32."""
    num_blocks = config.num_prompts * -(-config.prompt_tokens // 64)
    cache = LatentCache(
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        row_width=model.config.cache_row_width,
        dtype=model.dtype,
        device="cpu",
    )
    batch = random_batch(config.num_prompts, config.prompt_tokens, 0, model.config.vocab_size)
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache))


def _table(distances: list[Distance]) -> str:
    rows = [["computed as", "mean KL", "same best token", f"by {WEIGHTS_ONLY}"]]
    for d in distances:
        bar = ""
        if d.name == "int8":
            bar = f" (<= {MAX_RATIO:g}{'' if d.ratio <= MAX_RATIO else ', missed'})"
        rows.append([d.name, f"{d.mean_kl:.3e}", f"{d.same_best:.1%}", f"{d.ratio:.2f}{bar}"])
    return format_table(rows, numeric=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_alone(
        "whalepod.tools.peers.quality", quality, EngineConfig, QualityConfig, arguments=arguments
    )


if __name__ == "__main__":
    sys.exit(main())
