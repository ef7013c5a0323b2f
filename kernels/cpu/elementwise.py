"""Embedding, norms, rotary embedding and the cache write, a row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from whalepod.kernels.cpu.abi import ParallelKernel, arguments, items, record
from whalepod.kernels.cpu.products import row_dot
from whalepod.kernels.cpu.rows import copy_row
from whalepod.kernels.cpu.simd import advance, load, store
from whalepod.kernels.cpu.workspace import Workspace

_ROWS_PER_ITEM = 8
"""Rows that a thread takes at once."""


@njit
def _rows(block, num_rows):
    """Yield the numbers of the rows that this thread computes."""
    for item in items(block, 0, -(-num_rows // _ROWS_PER_ITEM), is_last=True):
        first = item * _ROWS_PER_ITEM
        for row in range(first, min(first + _ROWS_PER_ITEM, num_rows)):  # noqa: UP028
            yield row


@njit
def _normalize(x, weight, length, eps, out):
    mean = row_dot(x, x, length) / np.float32(length)
    scale = np.float32(1.0) / np.sqrt(mean + eps)
    for i in range(length):
        store(out, i, load(x, i) * scale * load(weight, i))


@njit
def _rotate(x, angles, num_pairs, out):
    for i in range(num_pairs):
        even, odd = load(x, 2 * i), load(x, 2 * i + 1)
        cos, sin = load(angles, i), load(angles, num_pairs + i)
        store(out, 2 * i, even * cos - odd * sin)
        store(out, 2 * i + 1, odd * cos + even * sin)


_EmbedArguments = record(
    "num_tokens hidden ids:i64 table:values out:values",
)


def _embed_kernel(block):
    a = arguments(block, _EmbedArguments)
    for token in _rows(block, a.num_tokens):
        row = advance(a.table, load(a.ids, token) * a.hidden)
        copy_row(row, a.hidden, advance(a.out, token * a.hidden))


_RmsNormArguments = record(
    "num_rows length x:values row_stride weight:values out:values eps:float",
)


def _rms_norm_kernel(block):
    a = arguments(block, _RmsNormArguments)
    for row in _rows(block, a.num_rows):
        x, out = advance(a.x, row * a.row_stride), advance(a.out, row * a.length)
        _normalize(x, a.weight, a.length, a.eps, out)


_AddRmsNormArguments = record(
    "num_rows length x:values residual:values weight:values out:values total:values eps:float",
)


def _add_rms_norm_kernel(block):
    a = arguments(block, _AddRmsNormArguments)
    for row in _rows(block, a.num_rows):
        start = row * a.length
        total = advance(a.total, start)
        for i in range(a.length):
            store(total, i, load(a.x, start + i) + load(a.residual, start + i))
        _normalize(total, a.weight, a.length, a.eps, advance(a.out, start))


_RopeArguments = record(
    "num_tokens num_heads width x:values token_stride head_stride positions:i64 angles:f32",
    "out:values out_token_stride out_head_stride",
)


def _rope_kernel(block):
    a = arguments(block, _RopeArguments)
    for token in _rows(block, a.num_tokens):
        angles = advance(a.angles, load(a.positions, token) * a.width)
        for head in range(a.num_heads):
            source = advance(a.x, token * a.token_stride + head * a.head_stride)
            target = advance(a.out, token * a.out_token_stride + head * a.out_head_stride)
            _rotate(source, angles, a.width // 2, target)


_WriteLatentArguments = record(
    "num_tokens rank width kv:values row_stride weight:values positions:i64 angles:f32 slots:i64",
    "cache:values eps:float",
)


def _write_latent_kernel(block):
    a = arguments(block, _WriteLatentArguments)
    for token in _rows(block, a.num_tokens):
        source = advance(a.kv, token * a.row_stride)
        target = advance(a.cache, load(a.slots, token) * (a.rank + a.width))
        _normalize(source, a.weight, a.rank, a.eps, target)
        angles = advance(a.angles, load(a.positions, token) * a.width)
        _rotate(advance(source, a.rank), angles, a.width // 2, advance(target, a.rank))


EMBED = ParallelKernel(_embed_kernel, _EmbedArguments)
RMS_NORM = ParallelKernel(_rms_norm_kernel, _RmsNormArguments)
ADD_RMS_NORM = ParallelKernel(_add_rms_norm_kernel, _AddRmsNormArguments)
ROPE = ParallelKernel(_rope_kernel, _RopeArguments)
WRITE_LATENT = ParallelKernel(_write_latent_kernel, _WriteLatentArguments)
KERNELS = (EMBED, RMS_NORM, ADD_RMS_NORM, ROPE, WRITE_LATENT)


class ElementwiseOperations:
    """The part of `Kernels` where a row is computed from itself alone, without matrices."""

    def __init__(self, work: Workspace) -> None:
        self._work = work

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        num_tokens, hidden = token_ids_T.shape[0], embedding_VH.shape[1]
        out_TH = self._work.new((num_tokens, hidden), embedding_VH.dtype)
        embed = _EmbedArguments(
            num_tokens, hidden, token_ids_T.data_ptr(), embedding_VH.data_ptr(), out_TH.data_ptr()
        )
        self._run(EMBED, out_TH.dtype, embed)
        return out_TH

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        num_rows, length = x_TH.shape
        out_TH = self._work.new((num_rows, length), x_TH.dtype)
        norm = _RmsNormArguments(
            num_rows, length, x_TH.data_ptr(), x_TH.stride(0), weight_H.data_ptr(),
            out_TH.data_ptr(), eps,
        )  # fmt: skip
        self._run(RMS_NORM, x_TH.dtype, norm)
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, length = x_TH.shape
        out_TH, total_TH = (self._work.new(x_TH.shape, x_TH.dtype) for _ in range(2))
        norm = _AddRmsNormArguments(
            num_rows, length, x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(),
            out_TH.data_ptr(), total_TH.data_ptr(), eps,
        )  # fmt: skip
        self._run(ADD_RMS_NORM, x_TH.dtype, norm)
        return out_TH, total_TH

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        out_TND = self._work.new(x_TND.shape, x_TND.dtype)
        self.rope_into(self._work.with_dense_rows(x_TND), positions_T, cos_sin_SD, out_TND)
        return out_TND

    def rope_into(
        self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor, out_TND: Tensor
    ) -> None:
        """Write what `rope` returns to `out_TND`; rows of both are contiguous."""
        num_tokens, num_heads, width = x_TND.shape
        rope = _RopeArguments(
            num_tokens, num_heads, width, x_TND.data_ptr(), x_TND.stride(0), x_TND.stride(1),
            positions_T.data_ptr(), cos_sin_SD.data_ptr(), out_TND.data_ptr(), out_TND.stride(0),
            out_TND.stride(1),
        )  # fmt: skip
        self._run(ROPE, x_TND.dtype, rope)

    def write_latent(
        self,
        kv_TC: Tensor,
        norm_weight_R: Tensor,
        eps: float,
        positions_T: Tensor,
        cos_sin_SD: Tensor,
        slots_T: Tensor,
        cache_PBC: Tensor,
    ) -> None:
        num_tokens, rank = kv_TC.shape[0], norm_weight_R.shape[0]
        write = _WriteLatentArguments(
            num_tokens, rank, kv_TC.shape[1] - rank, kv_TC.data_ptr(), kv_TC.stride(0),
            norm_weight_R.data_ptr(), positions_T.data_ptr(), cos_sin_SD.data_ptr(),
            slots_T.data_ptr(), cache_PBC.data_ptr(), eps,
        )  # fmt: skip
        self._run(WRITE_LATENT, kv_TC.dtype, write)

    def _run(self, kernel: ParallelKernel, dtype: torch.dtype, arguments: tuple[Any, ...]) -> None:
        self._work.run(kernel, dtype, -(-arguments[0] // _ROWS_PER_ITEM), arguments)
