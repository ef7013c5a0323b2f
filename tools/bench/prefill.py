"""`whalepod bench prefill`: how fast prompts are computed, and what the machine would allow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from whalepod.server.config import EngineConfig
from whalepod.tools.flags import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """What is measured."""

    lengths: Annotated[tuple[int, ...], "tokens of a prompt, one run for each"] = (256, 2048)
    context: Annotated[int, "tokens of each prompt that the cache already holds"] = 0
    rounds: Annotated[int, "runs of each length; the rate is their median"] = 5
    json: Annotated[bool, "print one JSON object instead of tables"] = False

    def __post_init__(self) -> None:
        require_positive(self, "lengths", "rounds")
        if self.context < 0:
            raise ValueError(f"context must be at least 0, got {self.context}")


def bench_prefill(engine: EngineConfig, config: PrefillConfig) -> int:
    """Measure how fast prompts are computed, against the limits of this machine.

    MODEL is a checkpoint folder, a preset or a Hugging Face id. No server is needed.
    """
    from whalepod.server.build_model import load_model_for_bench
    from whalepod.tools.bench.roofline import format_roofs, measure_roof

    model, kernels = load_model_for_bench(engine, config.context + max(config.lengths))
    roofs = [
        measure_roof(model, kernels, 1, n, config.context, rounds=config.rounds)
        for n in config.lengths
    ]
    if config.json:
        print(json.dumps({
            "model": engine.source.model, "kernels": kernels.name,
            "results": [roof.as_json() for roof in roofs],
        }))  # fmt: skip
    else:
        print(f"{engine.source.model}: {model.dtype}, {kernels.name} kernels\n")
        print(format_roofs(roofs))
    return 0
