"""How many tokens each expert got on this rank in the last steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm.eplb.policy import Ints

NUM_BUCKETS = 8
"""A window is forgotten in this many parts, so it reaches 7/8 to all of its steps back."""


class LoadRecorder:
    """Counts per slot while steps run, and keeps them per expert: slots may change their content.

    slots_LS      the expert in each slot of this rank, `[L, S]`; the owner changes it after `fold`
    window_steps  how far back counts reach
    """

    def __init__(self, slots_LS: Ints, num_experts: int, window_steps: int) -> None:
        self._slots_LS = slots_LS
        self._counts_LS = torch.zeros(slots_LS.shape, dtype=torch.int64)
        self._buckets = np.zeros((NUM_BUCKETS, len(slots_LS), num_experts), np.int64)
        self._bucket_steps = max(window_steps // NUM_BUCKETS, 1)
        self._step = self._bucket = 0

    def count(self, layer: int, count_S: Tensor) -> None:
        """Add the tokens that each slot of a layer got in one call."""
        self._counts_LS[layer] += count_S

    def end_step(self) -> None:
        """Go on to the next step; what is older than the window is forgotten."""
        self._step += 1
        if self._step % self._bucket_steps == 0:
            self.fold(range(len(self._slots_LS)))
            self._bucket = (self._bucket + 1) % NUM_BUCKETS
            self._buckets[self._bucket] = 0

    def fold(self, layers: Sequence[int]) -> None:
        """Add what slots have counted to their experts, before their content changes."""
        bucket, counts_LS = self._buckets[self._bucket], self._counts_LS.numpy()
        for layer in layers:
            np.add.at(bucket[layer], self._slots_LS[layer], counts_LS[layer])
            counts_LS[layer] = 0

    def loads(self) -> Ints:
        """Return `[L, E]`: the tokens of each expert in the window, on this rank."""
        self.fold(range(len(self._slots_LS)))
        loads_LE: Ints = self._buckets.sum(axis=0)
        return loads_LE
