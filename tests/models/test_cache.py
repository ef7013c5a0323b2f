"""The latent cache's only action: copying the rows of a block."""

from __future__ import annotations

import torch

from whalepod.models.cache import LatentCache


def test_copying_rows_touches_nothing_else() -> None:
    cache = LatentCache(num_layers=2, num_blocks=3, row_width=5, dtype=torch.float32, device="cpu")
    cache.rows_LPBC.normal_(generator=torch.Generator().manual_seed(0))
    expected = cache.rows_LPBC.clone()
    expected[:, 2, :10] = expected[:, 0, :10]
    cache.copy_rows(0, 2, 10)
    assert torch.equal(cache.rows_LPBC, expected)
    assert torch.equal(cache.layer(1), expected[1])
