"""Which scales are tried for a weight of int8: the same for the reference and for every backend."""

from __future__ import annotations

import torch

INT8_DIVISORS = (127.0, *torch.linspace(128.4, 112.0, 32, dtype=torch.float64).float().tolist())
"""What the value furthest from 0 is divided by to get a scale; the first one is that of q8_0."""

NUM_INT8_FITS = 2
"""How often the best scale so far is fitted to its rounded values."""
