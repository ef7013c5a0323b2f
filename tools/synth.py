"""`whalepod synth SHAPE OUT`: writes a random checkpoint that loads everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from safetensors import SafetensorError

from whalepod.models.synthetic import DtypeName, synthesize

__all__ = ["main", "synthesize"]


def main(
    shape: Annotated[str, "v3-nano, v2-nano, v3-mini, v3-layer or v2-lite"],
    out: Annotated[Path, "folder to write; it must be empty or absent"],
    *,
    dtype: Annotated[DtypeName, "fp8: e4m3 with a scale per 128 x 128 block"] = "bf16",
    seed: Annotated[int, "the same seed gives the same weights"] = 0,
    layers: Annotated[int | None, "cut to this many layers; the last stays a mixture"] = None,
    experts: Annotated[int | None, "cut to this many routed experts"] = None,
    shard_mib: Annotated[int, "most MiB of one file, and about the memory needed"] = 2048,
) -> int:
    """Write a random checkpoint with config, tokenizer and weights. Returns the exit code."""
    try:
        synthesize(
            shape,
            out,
            dtype=dtype,
            seed=seed,
            num_layers=layers,
            num_experts=experts,
            shard_bytes=shard_mib << 20,
            progress=_report,
        )
    except (ValueError, OSError, SafetensorError) as error:
        print(f"whalepod synth: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


def _report(written_bytes: int, total_bytes: int) -> None:
    print(f"{written_bytes >> 20} of {total_bytes >> 20} MiB written", file=sys.stderr)


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
