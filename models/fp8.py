"""Weights in e4m3 with one f32 scale per block, as DeepSeek ships them (`weight_scale_inv`)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.models.config import Fp8Config

E4M3_MAX = 448.0


def scale_shape(shape_NK: tuple[int, ...], blocks: Fp8Config) -> tuple[int, int]:
    """Return `[ceil(N / block_rows), ceil(K / block_columns)]`, the shape of a weight's scales."""
    rows, columns = shape_NK
    return -(-rows // blocks.block_rows), -(-columns // blocks.block_columns)


def dequantize(
    weight_NK: Tensor, scale_RC: Tensor, blocks: Fp8Config, dtype: torch.dtype
) -> Tensor:
    """Multiply an e4m3 weight `[N, K]` by its f32 scales `[ceil(N/128), ceil(K/128)]`.

    Each product is formed in f32 and rounded once to `dtype`. Works on one row of blocks at a time:
    the f32 values of one such row are all the memory it needs beside the result.
    """
    num_rows, num_columns = weight_NK.shape
    values = torch.empty(num_rows, num_columns, dtype=dtype)
    for row_block, first in enumerate(range(0, num_rows, blocks.block_rows)):
        rows = slice(first, first + blocks.block_rows)
        scale_K = scale_RC[row_block].repeat_interleave(blocks.block_columns)[:num_columns]
        values[rows] = _decode(weight_NK[rows]) * scale_K
    return values


def quantize(weight_NK: Tensor, blocks: Fp8Config) -> tuple[Tensor, Tensor]:
    """Round `[N, K]` to e4m3 with scale amax / 448 per block: returns (weight, f32 scales)."""
    num_rows, num_columns = weight_NK.shape
    scale_RC = torch.empty(scale_shape(weight_NK.shape, blocks))
    quantized = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    for row_block, first in enumerate(range(0, num_rows, blocks.block_rows)):
        rows = slice(first, first + blocks.block_rows)
        amax_K = weight_NK[rows].float().abs().amax(dim=0)
        amax_C = torch.stack([part.max() for part in torch.split(amax_K, blocks.block_columns)])
        scale_RC[row_block] = torch.where(amax_C > 0, amax_C / E4M3_MAX, 1.0)
        scale_K = scale_RC[row_block].repeat_interleave(blocks.block_columns)[:num_columns]
        quantized[rows] = (weight_NK[rows].float() / scale_K).to(torch.float8_e4m3fn)
    return quantized, scale_RC


def _decode(weight: Tensor) -> Tensor:
    """Turn e4m3 into f32 by a table of all 256 codes; torch's own conversion is far slower."""
    codes = weight.view(torch.uint8).to(torch.int32)
    return _E4M3_VALUES.index_select(0, codes.flatten()).view(weight.shape)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
