"""Weights in e4m3 with one f32 scale per block, as DeepSeek ships them (`weight_scale_inv`)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.models.config import Fp8Config

E4M3_MAX = 448.0


def scale_shape(shape: tuple[int, ...], blocks: Fp8Config) -> tuple[int, int]:
    """Return the shape of a weight's scales: one for each block, the last ones may be smaller."""
    rows, columns = shape
    return -(-rows // blocks.block_rows), -(-columns // blocks.block_columns)


def dequantize(weight: Tensor, scales: Tensor, blocks: Fp8Config, dtype: torch.dtype) -> Tensor:
    """Multiply an e4m3 weight `[rows, columns]` by its f32 scales (`scale_shape`).

    Each product is formed in f32 and rounded once to `dtype`. Works on one row of blocks at a time:
    the f32 values of one such row are all the memory it needs beside the result.
    """
    num_rows, num_columns = weight.shape
    values = torch.empty(num_rows, num_columns, dtype=dtype)
    for row_block, first in enumerate(range(0, num_rows, blocks.block_rows)):
        rows = slice(first, first + blocks.block_rows)
        scale_of_column = scales[row_block].repeat_interleave(blocks.block_columns)[:num_columns]
        values[rows] = _decode(weight[rows]) * scale_of_column
    return values


def quantize(weight: Tensor, blocks: Fp8Config) -> tuple[Tensor, Tensor]:
    """Round `[rows, columns]` to e4m3 with scale amax / 448 per block: (weight, f32 scales)."""
    num_rows, num_columns = weight.shape
    scales = torch.empty(scale_shape(weight.shape, blocks))
    quantized = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    for row_block, first in enumerate(range(0, num_rows, blocks.block_rows)):
        rows = slice(first, first + blocks.block_rows)
        amax_of_column = weight[rows].float().abs().amax(dim=0)
        amax_of_block = torch.stack(
            [part.max() for part in torch.split(amax_of_column, blocks.block_columns)]
        )
        scales[row_block] = torch.where(amax_of_block > 0, amax_of_block / E4M3_MAX, 1.0)
        scale_of_column = scales[row_block].repeat_interleave(blocks.block_columns)[:num_columns]
        quantized[rows] = (weight[rows].float() / scale_of_column).to(torch.float8_e4m3fn)
    return quantized, scales


def _decode(weight: Tensor) -> Tensor:
    """Turn e4m3 into f32 by a table of all 256 codes; torch's own conversion is far slower."""
    codes = weight.view(torch.uint8).to(torch.int32)
    return _E4M3_VALUES.index_select(0, codes.flatten()).view(weight.shape)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
