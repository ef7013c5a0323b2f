"""The latent cache's only action: copying the rows of a block."""

from __future__ import annotations

import resource
from pathlib import Path

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


def test_a_large_cache_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes()
    cache = LatentCache(
        num_layers=4, num_blocks=16384, row_width=160, dtype=torch.float32, device="cpu"
    )
    assert cache.rows_LPBC.nbytes == 4 * 16384 * 64 * 160 * 4
    assert not cache.rows_LPBC[0, 0].any()
    assert resident_bytes() - before < cache.rows_LPBC.nbytes / 100


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
