"""`whalepod synth SHAPE OUT`: writes a random checkpoint that loads everywhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthConfig:
    """Which checkpoint to write, and where."""

    shape: Annotated[str, "v3-nano, v2-nano, v3-mini, v3-layer or v2-lite"]
    out: Annotated[Path, "folder to write; it must be empty or absent"]
    dtype: Annotated[
        Literal["fp32", "bf16", "fp8"], "fp8: e4m3 with a scale per 128 x 128 block"
    ] = "bf16"
    seed: Annotated[int, "the same seed gives the same weights"] = 0
    layers: Annotated[int | None, "cut to this many layers; the last stays a mixture"] = None
    experts: Annotated[int | None, "cut to this many routed experts"] = None
    shard_mib: Annotated[int, "most MiB of one file, and about the memory needed"] = 2048


def synth(config: SynthConfig) -> int:
    """Write a checkpoint with random weights, to test and to measure with."""
    # imported here because it loads torch
    from safetensors import SafetensorError

    from whalepod.models.presets import smaller
    from whalepod.models.synthetic import synthesize

    try:
        synthesize(
            config.shape,
            config.out,
            dtype=config.dtype,
            seed=config.seed,
            overrides=smaller(config.shape, num_layers=config.layers, num_experts=config.experts),
            shard_bytes=config.shard_mib << 20,
            progress=_report,
        )
    except (ValueError, OSError, SafetensorError) as error:
        print(f"whalepod synth: {error}", file=sys.stderr)
        return 1
    print(config.out)
    return 0


def _report(written_bytes: int, total_bytes: int) -> None:
    print(f"{written_bytes >> 20} of {total_bytes >> 20} MiB written", file=sys.stderr)
