"""The tensors that a low-latency dispatch fills for the experts of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.ep_comm.modes.low_latency_config import LowLatencyConfig
from whalepod.ep_comm.rows import RowViews, raw

_BYTES_PER_WORD = 4
"""Exponent bytes in one int32 of UE8M0 scales."""


class LowLatencyOutput:
    """One set of outputs, allocated once: rows, their source tokens, their scales."""

    def __init__(self, config: LowLatencyConfig) -> None:
        num_rows, row_format = config.num_output_rows, config.dispatch_format
        num_blocks = config.num_local if config.output == "per_expert" else 1
        self._rows_per_block = num_rows // num_blocks
        self._rows_SH = torch.empty(num_rows, config.hidden, dtype=row_format.torch_dtype)
        self._info_S = torch.empty(num_rows, dtype=torch.int32)
        self._scales_BSG = _empty_scales(config, num_blocks, self._rows_per_block)
        shape = (num_blocks, -1) if config.output == "per_expert" else (-1,)
        self.rows = self._rows_SH.view(*shape, config.hidden)
        self.source_info = self._info_S.view(shape)
        self.scales: Tensor | None = None
        if row_format.num_scales:
            is_split = config.output == "per_expert"
            self.scales = self._scales_BSG if is_split else self._scales_BSG[0]

    def poison(self) -> None:
        """Fill everything with 0xFF: NaN in every float type, and no valid index."""
        self._rows_SH.view(torch.uint8).fill_(0xFF)
        self._info_S.fill_(-1)
        self._scales_BSG.view(torch.int32).fill_(-1)

    def fill(self, row_S: Tensor, views: RowViews, source_S: Tensor, slot_S: Tensor) -> None:
        """Write row `row_S[i]` from the record `(source_S[i], slot_S[i])` of `views`."""
        raw(self._rows_SH)[row_S] = raw(views.values_H)[source_S, slot_S]
        self._info_S[row_S] = views.token[source_S, slot_S]
        if self.scales is None:
            return
        scales = views.scales_G[source_S, slot_S]
        if scales.dtype is torch.uint8:
            scales = scales.contiguous().view(torch.int32)
        block_S = row_S.div(self._rows_per_block, rounding_mode="floor")
        self._scales_BSG[block_S, row_S % self._rows_per_block] = scales


def _empty_scales(config: LowLatencyConfig, num_blocks: int, num_rows: int) -> Tensor:
    """Return `[blocks, rows, columns]`, its storage along rows if `column_major`."""
    num_columns = config.dispatch_format.num_scales
    dtype = torch.float32
    if config.ue8m0:
        num_columns, dtype = num_columns // _BYTES_PER_WORD, torch.int32
    if config.column_major:
        return torch.empty(num_blocks, num_columns, num_rows, dtype=dtype).transpose(1, 2)
    return torch.empty(num_blocks, num_rows, num_columns, dtype=dtype)
