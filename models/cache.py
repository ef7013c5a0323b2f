"""The paged latent cache: a row of R + rope values per token and layer, in blocks of 64."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS


class LatentCache:
    """Owns the cache tensor `[num_layers, num_blocks, 64, C]` and lends views of it.

    The last layers belong to the multi-token-prediction module when the model has one.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, row_width: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (num_layers, num_blocks, BLOCK_TOKENS, row_width)
        if device == "cpu":
            self.rows_LPBC = _untouched_zeros(shape, dtype)
        else:
            self.rows_LPBC = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> Tensor:
        """Return the view `[num_blocks, 64, C]` of one layer."""
        return self.rows_LPBC[index]

    def copy_rows(self, source_block: int, target_block: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` rows of a block, all layers (copy-on-write)."""
        self.rows_LPBC[:, target_block, :num_tokens] = self.rows_LPBC[:, source_block, :num_tokens]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on fresh pages, which take memory only once they are written.

    `torch.zeros` writes them all: a large pool would count as used before the first request.
    Large pages, where the system grants them, spare attention over a long text most of its misses
    in the address cache: its rows are read once and in no order that a prefetcher knows.
    """
    num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)
