"""The meaning of int8 weights, in plain torch.

Weights and the rows that they multiply are rounded in blocks of 32 values along their last
dimension, each with a scale of its own, as llama.cpp's q8_0 does; sums are taken in f32.
Embeddings, norms, routers and sensitive projections keep their dtype. A row's scale makes its
largest absolute value 127. A weight's is kept in f16: of several, the one with the least squared
error is searched (`whalepod.kernels.cpu.int8_packing` says what that gains).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whalepod.kernels.int8_scales import INT8_DIVISORS, NUM_INT8_FITS
from whalepod.kernels.interface import Packed
from whalepod.kernels.reference import ReferenceKernels, sigmoid

INT8_BLOCK = 32
"""Values with one scale."""


class RoundedWeight(NamedTuple):
    """A weight whose rows of input are rounded, too."""

    values: Tensor
    """f32"""


class Int8ReferenceKernels(ReferenceKernels):
    """`ReferenceKernels` with rounded weights and rows."""

    name = "reference, int8"

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return what is kept of a weight `[..., in]`, in f32."""
        return round_weight(weight)

    def round_rows(self, x: Tensor) -> Tensor:
        """Return what is kept of rows, in f32."""
        return round_rows(x)

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> Packed:
        return weight_NK if is_sensitive else RoundedWeight(self.round_weight(weight_NK))

    def linear(self, x_TK: Tensor, weight: Packed) -> Tensor:
        return self.linear_f32(x_TK, weight).to(x_TK.dtype)

    def linear_f32(self, x_TK: Tensor, weight: Packed) -> Tensor:
        if isinstance(weight, RoundedWeight):
            return F.linear(self.round_rows(x_TK), weight.values)
        return super().linear_f32(x_TK, weight)

    def pack_batched_linear(self, weight_NAB: Tensor) -> Packed:
        return RoundedWeight(self.round_weight(weight_NAB.transpose(1, 2)).transpose(1, 2))

    def batched_linear(self, x_TNA: Tensor, weight: Packed) -> Tensor:
        return super().batched_linear(self.round_rows(x_TNA), weight.values).to(x_TNA.dtype)

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> Packed:
        return self.pack_experts(gate_up_JH, down_HI)

    def gated_mlp(self, x_TH: Tensor, packed: Packed, add_to_TH: Tensor | None = None) -> Tensor:
        y_TH = self.gated_rows(x_TH, *packed).to(x_TH.dtype)
        return y_TH if add_to_TH is None else add_to_TH + y_TH

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> Packed:
        return self.round_weight(gate_up_EJH), self.round_weight(down_EHI)

    def gated_rows(self, x_SH: Tensor, gate_up_JH: Tensor, down_HI: Tensor) -> Tensor:
        gate, up = F.linear(self.round_rows(x_SH), gate_up_JH).chunk(2, dim=-1)
        return F.linear(self.round_rows(gate * sigmoid(gate) * up), down_HI)


def round_rows(x: Tensor) -> Tensor:
    """Return what is kept of rows, in f32."""
    blocks = blocks_of(x)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    values = torch.where(scale > 0, blocks * (1.0 / scale), 0.0).round()
    return join_blocks(values * scale, x.shape[-1])


def round_weight(weight: Tensor) -> Tensor:
    """Return what is kept of a weight, in f32: each block with the best of the scales."""
    blocks = blocks_of(weight)
    furthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    best = -furthest / INT8_DIVISORS[0]

    def better(scale: Tensor) -> Tensor:
        return torch.where(_error(blocks, scale) < _error(blocks, best), scale, best)

    for divisor in INT8_DIVISORS[1:]:
        best = better(-furthest / divisor)
    for _ in range(NUM_INT8_FITS):
        values, _ = round_blocks(blocks, best)
        squares = values.square().sum(dim=-1, keepdim=True)
        fitted = (blocks * values).sum(dim=-1, keepdim=True) / squares
        best = better(torch.where(squares > 0, fitted, 0.0))
    return join_blocks(torch.mul(*round_blocks(blocks, best)), weight.shape[-1])


def blocks_of(x: Tensor) -> Tensor:
    """Return `[..., K]` as f32 blocks `[..., ceil(K / 32), 32]`, filled up with zeros."""
    padded = F.pad(x.float(), (0, -x.shape[-1] % INT8_BLOCK))
    return padded.reshape(*x.shape[:-1], -(-x.shape[-1] // INT8_BLOCK), INT8_BLOCK)


def join_blocks(blocks: Tensor, length: int) -> Tensor:
    """Undo `blocks_of`."""
    return blocks.flatten(-2)[..., :length]


def round_blocks(blocks: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers as f32, and the scale as f16 keeps it."""
    scale = scale.half().float()
    return torch.where(scale != 0, blocks / scale, 0.0).round().clamp(-128, 127), scale


def _error(blocks: Tensor, scale: Tensor) -> Tensor:
    values, scale = round_blocks(blocks, scale)
    return (blocks - values * scale).square().sum(dim=-1, keepdim=True)
