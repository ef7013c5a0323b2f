"""The rotary table of a model: cosines and sines of every position, YaRN included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whalepod.models.config import RopeConfig


def build_rope_table(config: RopeConfig, dim: int, max_positions: int) -> Tensor:
    """Return f32 `[max_positions, dim]`: dim/2 cosines, then dim/2 sines, times YaRN's factor."""
    frequencies = rope_frequencies(config, dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * config.table_factor


def rope_frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Return the angle per position of each pair, f32 `[dim / 2]` (YaRN paper, section 3.2).

    Fast pairs keep their frequency, slow ones are divided by `factor`; in between, a linear ramp.
    """
    plain = 1.0 / config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not config.is_yarn:
        return plain
    low, high = _ramp_borders(config, dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / config.factor * stretched + plain * (1.0 - stretched)


def _ramp_borders(config: RopeConfig, dim: int) -> tuple[float, float]:
    """Return the pairs that turn `beta_fast` and `beta_slow` times over the original context."""

    def pair_with_turns(turns: float) -> float:
        wavelengths = config.original_max_positions / (turns * 2.0 * math.pi)
        return dim * math.log(wavelengths) / (2.0 * math.log(config.theta))

    low, high = pair_with_turns(config.beta_fast), pair_with_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    return low, high if high != low else high + 0.001


def interleave_rope_rows(weight: Tensor, rope_dim: int) -> Tensor:
    """Reorder the last `rope_dim` rows of each head from (x[i], x[i + D/2]) to adjacent pairs.

    Scores stay the same, since queries and keys are reordered alike. Takes and returns
    `[N, D, inputs]`.
    """
    head_dim = weight.shape[1]
    pairs = torch.arange(rope_dim).view(2, rope_dim // 2).T.flatten()
    order = torch.cat([torch.arange(head_dim - rope_dim), head_dim - rope_dim + pairs])
    return weight[:, order.to(weight.device)]
