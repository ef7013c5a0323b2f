"""The records that carry one token each.

A record is a header (token, choices, weights), the hidden values, and their fp8 scales; each part
begins at a multiple of 16 bytes, so that every part of many records is a strided typed view.

Suffix letters as in `whalepod.ep_comm.layout`, and H hidden, G groups of 128 channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from whalepod.ep_comm.heap import align

RowDtype = Literal["float32", "bfloat16", "float8"]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
_PART_BYTES = 16

SCALE_GROUP = 128
"""Channels that share one fp8 scale."""
E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
"""Floor under a group's largest magnitude, so that a group of zeros has a scale (DeepEP)."""


@dataclass(frozen=True, slots=True)
class RowViews:
    """The parts of records as typed views, each with the records' leading axes."""

    token: Tensor
    ids_K: Tensor
    weights_K: Tensor
    values_H: Tensor
    scales_G: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """The layout of a record.

    num_ids, num_weights  K or 0: int32 global expert ids, f32 weights
    """

    hidden: int
    dtype: RowDtype
    num_ids: int = 0
    num_weights: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"row dtype {self.dtype!r} is none of {sorted(_DTYPES)}")
        if self.dtype == "float8" and self.hidden % SCALE_GROUP:
            raise ValueError(
                f"hidden ({self.hidden}) must be a multiple of {SCALE_GROUP} for fp8 rows: send "
                f"bfloat16 rows"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def num_scales(self) -> int:
        return self.hidden // SCALE_GROUP if self.dtype == "float8" else 0

    @property
    def num_bytes(self) -> int:
        """Return the size of a record on the wire."""
        return self.offsets.end

    def views(self, records: Tensor) -> RowViews:
        """Return typed views of records, uint8 `[..., num_bytes]`."""
        at = self.offsets

        def part(offset: int, count: int, dtype: torch.dtype) -> Tensor:
            return records[..., offset : offset + count * dtype.itemsize].view(dtype)

        return RowViews(
            token=part(0, 1, torch.int32)[..., 0],
            ids_K=part(at.ids, self.num_ids, torch.int32),
            weights_K=part(at.weights, self.num_weights, torch.float32),
            values_H=part(at.values, self.hidden, self.torch_dtype),
            scales_G=part(at.scales, self.num_scales, torch.float32),
        )

    def values(self, records: Tensor) -> Tensor:
        """Return the hidden values of records, uint8 `[..., num_bytes]`, as a typed view."""
        start = self.offsets.values
        num_bytes = self.hidden * self.torch_dtype.itemsize
        return records[..., start : start + num_bytes].view(self.torch_dtype)

    @property
    def offsets(self) -> Offsets:
        return _offsets(self)


class Offsets(NamedTuple):
    """Where the parts of a record begin, and the record's end; the token is at 0."""

    ids: int
    weights: int
    values: int
    scales: int
    end: int


@cache
def _offsets(row_format: RowFormat) -> Offsets:
    ids = 4 if row_format.num_ids or row_format.num_weights else 0
    weights = ids + 4 * row_format.num_ids
    values = align(weights + 4 * row_format.num_weights, _PART_BYTES)
    scales = align(values + row_format.hidden * row_format.torch_dtype.itemsize, _PART_BYTES)
    end = scales + 4 * row_format.num_scales
    return Offsets(ids, weights, values, scales, align(end, _PART_BYTES))


def quantize_rows(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to e4m3: returns values `[T, H]` and the f32 scales `[T, H / 128]` to undo it.

    scale = max(|x|, 1e-4) / 448 over 128 channels. Source: DeepEP's dispatch.
    """
    groups_TGD = x_TH.float().view(len(x_TH), x_TH.shape[1] // SCALE_GROUP, SCALE_GROUP)
    amax_TG = groups_TGD.abs().amax(dim=-1).clamp(min=LEAST_AMAX)
    scales_TG = amax_TG / E4M3_MAX
    factor_TG = torch.full_like(amax_TG, E4M3_MAX) / amax_TG  # not torch's reciprocal * scalar
    values_TGD = groups_TGD * factor_TG[..., None]
    return values_TGD.flatten(1).to(torch.float8_e4m3fn), scales_TG


def dequantize_rows(values_NH: Tensor, scales_NG: Tensor) -> Tensor:
    """Return the f32 rows `[..., H]` of e4m3 values and f32 scales `[..., H / 128]`."""
    groups = values_NH.float().view(*scales_NG.shape, SCALE_GROUP)
    return (groups * scales_NG[..., None]).flatten(-2)


def raw(values: Tensor) -> Tensor:
    """Return e4m3 as bytes, for the indexing that torch lacks; other dtypes as they are."""
    return values.view(torch.uint8) if values.dtype is torch.float8_e4m3fn else values


def gather_rows(rows_SH: Tensor, index_N: Tensor, out_NH: Tensor) -> None:
    """Copy rows `index_N` of `rows_SH` to `out_NH`, converting the dtype if they differ.

    Both may be strided views with contiguous rows: then each row is one memory copy.
    """
    source, target = raw(rows_SH), raw(out_NH)
    if source.dtype == target.dtype:
        torch.index_select(source, 0, index_N, out=target)
    else:
        target.copy_(source.index_select(0, index_N))


def weighted_sum(rows_SH: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return sum_k weights[t, k] * rows[row[t, k]], f32 `[T, H]`, added in k order; -1 is skipped.

    The same operations in the same order as `Kernels.experts` sums, so the bits are the same too.
    """
    sum_TH = torch.zeros(len(row_TK), rows_SH.shape[1])
    for k in range(row_TK.shape[1]):
        row_T = row_TK[:, k]
        is_absent_T = row_T < 0
        if bool(is_absent_T.all()):
            continue
        y_TH = rows_SH.index_select(0, row_T.clamp(min=0)).float()
        y_TH.mul_(weights_TK[:, k, None])
        if bool(is_absent_T.any()):
            y_TH.masked_fill_(is_absent_T[:, None], 0.0)
        sum_TH.add_(y_TH)
    return sum_TH
