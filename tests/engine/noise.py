"""The Gumbel noise of `kernels/`, written a second time in numpy."""

from __future__ import annotations

import numpy as np


def gumbel(seed: int, position: int, num_tokens: int) -> np.ndarray:
    """Return the noise of one position, after the formula in `kernels/`."""
    token = np.arange(num_tokens, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        x = x + np.uint64(position) * np.uint64(0xC2B2AE3D27D4EB4F)
        x = x + token * np.uint64(0x165667B19E3779F9)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    u = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: np.ndarray = (-np.log(-np.log(u))).astype(np.float32)
    return noise
