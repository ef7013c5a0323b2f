"""A model small enough to reason about: its logits are a hash of the text read from the cache."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache

VOCAB_SIZE = 50
GARBAGE_BLOCK = 2**30


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


class NoiseKernels:
    """The one kernel that the sampler uses, one row at a time."""

    name = "noise"

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        rows = zip(seeds_B.tolist(), positions_B.tolist(), strict=True)
        return torch.from_numpy(np.stack([gumbel(s, p, num_tokens) for s, p in rows]))


def text_hash(token_ids: list[int]) -> int:
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value


def logits_of_hash(value: int, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    return np.random.default_rng(value).normal(size=vocab_size).astype(np.float32) * 3


def logits_after(token_ids: list[int]) -> np.ndarray:
    """Return what the fake model predicts after a text: the oracle of the tests."""
    return logits_of_hash(text_hash(token_ids))


class FakeModel:
    """Writes (token, position) rows, reads the whole text back through the block table.

    A wrong slot, table, length or copy gives it another text, or a NaN that it refuses.
    """

    num_cache_layers, cache_row_width = 1, 2

    def __init__(self, eos_after: int | None = None) -> None:
        self.num_forwards = 0
        self.batch_shapes: list[tuple[int, int]] = []
        self.fails_at: set[int] = set()

    def forward(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards in self.fails_at:
            raise RuntimeError(f"forward {self.num_forwards} was told to fail")
        rows_SC = cache.layer(0).view(-1, self.cache_row_width)
        rows_SC[batch.slots_T, 0] = batch.token_ids_T.float()
        rows_SC[batch.slots_T, 1] = batch.positions_T.float()
        starts = batch.query_start_B1.tolist()
        self.batch_shapes.append((len(starts) - 1, starts[-1]))
        hidden = []
        for b, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            text = self._read(batch, cache, b)
            num_before = len(text) - (end - begin)
            assert batch.positions_T[begin:end].tolist() == list(range(num_before, len(text)))
            hidden += [text_hash(text[: num_before + i + 1]) for i in range(end - begin)]
        assert batch.max_query_tokens == max(
            e - s for s, e in zip(starts, starts[1:], strict=False)
        )
        return torch.tensor(hidden, dtype=torch.float32)[:, None]

    def _read(self, batch: ForwardBatch, cache: LatentCache, b: int) -> list[int]:
        assert batch.block_tables_BM.is_contiguous()
        length = int(batch.context_lens_B[b])
        num_blocks = math.ceil(length / BLOCK_TOKENS)
        blocks = batch.block_tables_BM[b, :num_blocks].long()
        rows = cache.layer(0)[blocks].reshape(-1, self.cache_row_width)[:length]
        assert not rows.isnan().any(), f"row {b} reads cache rows that nobody wrote"
        assert rows[:, 1].tolist() == list(range(length)), f"row {b} reads rows of other positions"
        return [int(token_id) for token_id in rows[:, 0].tolist()]

    def logits(self, hidden_BH: Tensor) -> Tensor:
        rows = [logits_of_hash(int(value)) for value in hidden_BH[:, 0].tolist()]
        return torch.from_numpy(np.stack(rows))


def poisoned_cache(num_blocks: int) -> LatentCache:
    cache = LatentCache(
        num_layers=FakeModel.num_cache_layers,
        num_blocks=num_blocks,
        row_width=FakeModel.cache_row_width,
        dtype=torch.float32,
        device="cpu",
    )
    cache.rows_LPBC.fill_(torch.nan)
    return cache
