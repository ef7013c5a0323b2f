"""`measure decode` and `measure prefill`: the model without an engine, beside the machine's limits.

Forward passes and logits of random tokens, as other engines' benchmarks count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from whalepod.kernels.interface import Kernels
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.server.build_model import load_model, read_checkpoint, startup_errors
from whalepod.server.config import EngineConfig
from whalepod.tools.flags import require_positive
from whalepod.tools.measure.limits import Roof, format_roofs, measure_roof


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePassesConfig:
    """What is measured."""

    batch_sizes: Annotated[tuple[int, ...], "requests at once, one run for each"] = (1, 16)
    context: Annotated[int, "tokens of each request before the one that is computed"] = 64
    rounds: Annotated[int, "turns of 20 steps; the rate is the median of all steps"] = 3
    json: Annotated[bool, "print one JSON object instead of tables"] = False

    def __post_init__(self) -> None:
        require_positive(self, "batch_sizes", "rounds")
        _check_context(self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPassesConfig:
    """What is measured."""

    lengths: Annotated[tuple[int, ...], "tokens of a prompt, one run for each"] = (256, 2048)
    context: Annotated[int, "tokens of each prompt that the cache already holds"] = 0
    rounds: Annotated[int, "runs of each length; the rate is their median"] = 5
    json: Annotated[bool, "print one JSON object instead of tables"] = False

    def __post_init__(self) -> None:
        require_positive(self, "lengths", "rounds")
        _check_context(self.context)


def _check_context(context: int) -> None:
    if context < 0:
        raise ValueError(f"context must be at least 0, got {context}")


def measure_decode(engine: EngineConfig, config: DecodePassesConfig) -> int:
    """Measure steps of one token per request, against the limits of this machine.

    MODEL is a checkpoint folder, a preset or a Hugging Face id.
    """
    model, kernels = load_for_passes(engine, config.context + 1)
    roofs = [
        measure_roof(model, kernels, batch_size, 1, config.context, rounds=20 * config.rounds)
        for batch_size in config.batch_sizes
    ]
    _show(engine, model, kernels, roofs, as_json=config.json)
    return 0


def measure_prefill(engine: EngineConfig, config: PrefillPassesConfig) -> int:
    """Measure how fast prompts are computed, against the limits of this machine.

    MODEL is a checkpoint folder, a preset or a Hugging Face id.
    """
    model, kernels = load_for_passes(engine, config.context + max(config.lengths))
    roofs = [
        measure_roof(model, kernels, 1, length, config.context, rounds=config.rounds)
        for length in config.lengths
    ]
    _show(engine, model, kernels, roofs, as_json=config.json)
    return 0


def load_for_passes(engine: EngineConfig, num_positions: int) -> tuple[DeepseekV3, Kernels]:
    """Load a model without an engine around it, for texts of up to `num_positions` tokens.

    Raises StartupError, one sentence, for what a user can fix.
    """
    limits = replace(engine.scheduler, max_model_len=num_positions)
    off = replace(engine.speculation, speculation="off")
    with startup_errors():
        checkpoint = read_checkpoint(replace(engine, scheduler=limits, speculation=off))
        return load_model(checkpoint).model, checkpoint.kernels


def _show(
    engine: EngineConfig,
    model: DeepseekV3,
    kernels: Kernels,
    roofs: Sequence[Roof],
    *,
    as_json: bool,
) -> None:
    name = engine.source.model
    if as_json:
        results = [roof.as_json() for roof in roofs]
        print(json.dumps({"model": name, "kernels": kernels.name, "results": results}))
    else:
        print(f"{name}: {model.dtype}, {kernels.name} kernels\n\n{format_roofs(roofs)}")
