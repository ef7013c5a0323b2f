"""`measure drafts`: how much speculation speeds up decoding.

One engine answers the same prompts with 0, 1, ... drafts and with the adaptive depth, in turns, so
that all settings see the same minutes of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.depth import AdaptiveDepth, FixedDepth
from whalepod.server.config import EngineConfig
from whalepod.server.engine.core import EngineCore
from whalepod.tools.bench.engine import (
    DecodeConfig,
    Turn,
    decode_figures,
    play,
    read_prompts,
    show,
    start_engine,
)


def measure_drafts(engine: EngineConfig, config: DecodeConfig) -> int:
    """Measure in this process what speculation brings: rates, tokens per forward, acceptance.

    MODEL answers the same prompts with 0 to 4 drafts and with the adaptive depth, in turns.
    """
    core = start_engine(
        engine,
        config.batch_sizes,
        speculation="adaptive",
        num_speculative_tokens=MAX_DRAFT_TOKENS,
    )
    prompts = read_prompts(engine, config.prompts, core.info.vocab_size)
    results = [
        result
        for batch_size in config.batch_sizes
        for result in compare_depths(core, config, prompts, batch_size)
    ]
    show(core, engine, results, as_json=config.json)
    core.close()
    return 0


def compare_depths(
    core: EngineCore, config: DecodeConfig, prompts: Sequence[Sequence[int]], batch_size: int
) -> list[dict[str, Any]]:
    """Run all depths in turns at one batch size."""
    depths: dict[str, FixedDepth | AdaptiveDepth] = {
        str(k): FixedDepth(k) for k in range(MAX_DRAFT_TOKENS + 1)
    }
    depths["adaptive"] = AdaptiveDepth(MAX_DRAFT_TOKENS)
    turns: dict[str, list[Turn]] = {name: [] for name in depths}
    for number in range(-1, config.rounds):  # the first turn warms up
        for name, depth in depths.items():
            core.depth = depth
            turn = play(core, config, prompts, batch_size)
            if number >= 0:
                turns[name].append(turn)
    figures = {name: decode_figures(found) for name, found in turns.items()}
    return [
        {
            "batch_size": batch_size,
            "depth": name,
            "speedup": found["tokens_per_s"] / figures["0"]["tokens_per_s"],
            "cpu_speedup": found["tokens_per_cpu_s"] / figures["0"]["tokens_per_cpu_s"],
            **found,
        }
        for name, found in figures.items()
    ]
