"""`RowKernels` on a CPU, one compiled call each, with the bits of the plain ones.

Compiled code runs without the interpreter's lock and takes addresses; the methods check what the
addresses stand for. Machine code is kept beside the source (numba's cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.row_kernels import loops
from whalepod.ep_comm.row_kernels.interface import (
    ArrivedRows,
    ExpertOutput,
    Experts,
    Spread,
    TokenRows,
)
from whalepod.ep_comm.row_kernels.memory import BF16, BYTES, F32
from whalepod.ep_comm.rows import SCALE_GROUP, RowFormat

_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float8_e4m3fn: BYTES}
_NOTHING = torch.empty(0)


class CompiledRows:
    """See `whalepod.ep_comm.row_kernels.interface` for every contract."""

    name = "compiled"

    def destinations(self, ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
        if ids_TK.dtype != torch.int64 or ids_TK.ndim != 2:
            layout.check_choices(ids_TK, num_experts, ids_TK.shape[-1])
        ids_TK = ids_TK.contiguous()
        num_tokens, num_choices = ids_TK.shape
        per_rank = layout.split_experts(num_experts, num_ranks)
        is_in_TR = torch.empty(num_tokens, num_ranks, dtype=torch.bool)
        is_valid = loops.destinations(
            ids_TK.data_ptr(), num_tokens, num_choices, per_rank, num_ranks, is_in_TR.data_ptr()
        )
        if not is_valid:
            layout.check_choices(ids_TK, num_experts, num_choices)
        return is_in_TR

    def quantize(self, x_TH: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
        x_TH = x_TH.contiguous()
        num_tokens, hidden = x_TH.shape
        values_TH = torch.empty(num_tokens, hidden, dtype=torch.float8_e4m3fn)
        scales_TG = torch.empty(num_tokens, hidden // SCALE_GROUP)
        loops.quantize(
            x_TH.data_ptr(),
            kind_of(x_TH.dtype),
            num_tokens,
            hidden,
            round_scale,
            values_TH.data_ptr(),
            scales_TG.data_ptr(),
        )
        return values_TH, scales_TG

    def pack(
        self,
        row_format: RowFormat,
        tokens: TokenRows,
        is_for_TD: Tensor,
        blocks: Sequence[Tensor | None],
        first_token: int = 0,
    ) -> list[int]:
        values_TH, ids_TK = _dense_rows(tokens.values_TH), tokens.ids_TK.contiguous()
        is_for_TD = is_for_TD.contiguous()
        weights_TK, scales_TG = _contiguous(tokens.weights_TK), _contiguous(tokens.scales_TG)
        assert len(blocks) == is_for_TD.shape[1], (len(blocks), is_for_TD.shape)
        targets_D = np.array([0 if b is None else b.data_ptr() for b in blocks], dtype=np.int64)
        counts_D = np.zeros(len(blocks), dtype=np.int64)
        at = row_format.offsets
        loops.pack(
            ids_TK.data_ptr(),
            row_format.num_ids,
            at.ids,
            weights_TK.data_ptr(),
            at.weights,
            row_format.num_weights,
            values_TH.data_ptr(),
            values_TH.stride(0) * values_TH.element_size(),
            kind_of(values_TH.dtype),
            at.values,
            kind_of(row_format.torch_dtype),
            row_format.hidden,
            scales_TG.data_ptr(),
            row_format.num_scales * row_format.scale_dtype.itemsize,
            at.scales,
            at.end,
            is_for_TD.data_ptr(),
            len(is_for_TD),
            first_token,
            targets_D,
            counts_D,
        )
        counts: list[int] = counts_D.tolist()
        return counts

    def spread(
        self,
        row_format: RowFormat,
        records: Tensor,
        counts: Mapping[int, int],
        experts: Experts,
        output: ExpertOutput,
    ) -> Spread:
        sources_C = np.array(list(counts), dtype=np.int64)
        counts_C = np.array(list(counts.values()), dtype=np.int64)
        num_rows, max_tokens = int(counts_C.sum()), records.shape[1]
        assert max(counts.values(), default=0) <= max_tokens, (counts, max_tokens)
        row_of_NK = np.empty((num_rows, row_format.num_ids), dtype=np.int64)
        weights_NK = np.empty((num_rows, row_format.num_weights), dtype=np.float32)
        count_E, first_row_E = np.empty((2, experts.num_local), dtype=np.int64)
        count_ER = np.empty((experts.num_local, experts.num_ranks), dtype=np.int64)
        rows_SH, scales_BSG = output.rows_SH, output.scales_BSG
        assert rows_SH.dtype == row_format.torch_dtype, (rows_SH.dtype, row_format)
        assert rows_SH.is_contiguous(), rows_SH.stride()
        at = row_format.offsets
        loops.spread(
            records.data_ptr(),
            row_format.num_bytes,
            max_tokens,
            at.ids,
            row_format.num_ids,
            at.weights,
            row_format.num_weights,
            at.values,
            rows_SH.shape[1] * rows_SH.element_size(),
            at.scales,
            scales_BSG.shape[2],
            sources_C,
            counts_C,
            experts.first,
            experts.rows_per_expert,
            rows_SH.data_ptr(),
            output.info_S.data_ptr(),
            scales_BSG.data_ptr(),
            tuple(4 * stride for stride in scales_BSG.stride()),
            scales_BSG.shape[1],
            row_of_NK,
            weights_NK,
            count_E,
            first_row_E,
            count_ER,
        )
        begin_ER = count_ER.cumsum(axis=1) - count_ER
        return Spread(
            row_of_NK=torch.from_numpy(row_of_NK),
            weights_NK=torch.from_numpy(weights_NK),
            count_E=torch.from_numpy(count_E),
            first_row_E=torch.from_numpy(first_row_E),
            ranges_ER=torch.from_numpy((begin_ER << 32) | count_ER),
        )

    def unpack(
        self,
        row_format: RowFormat,
        records: Tensor,
        first_expert: int,
        arrived: ArrivedRows,
        first_row: int,
    ) -> None:
        at, num_choices = row_format.offsets, row_format.num_ids
        assert row_format.num_weights == num_choices, row_format
        assert not row_format.ue8m0, row_format
        assert 0 <= first_row <= len(arrived.x_NH) - len(records), (first_row, len(records))
        assert arrived.x_NH.dtype == row_format.torch_dtype, (arrived.x_NH.dtype, row_format)
        assert records.is_contiguous(), records.stride()
        value_bytes = row_format.hidden * row_format.torch_dtype.itemsize
        scale_bytes = 4 * row_format.num_scales
        loops.unpack(
            records.data_ptr(), at.end, len(records), at.ids, num_choices, at.weights, at.values,
            value_bytes, at.scales, scale_bytes, first_expert, len(arrived.count_E),
            arrived.x_NH.data_ptr() + first_row * value_bytes,
            arrived.scales_NG.data_ptr() + first_row * scale_bytes,
            arrived.ids_NK.data_ptr() + 8 * first_row * num_choices,
            arrived.weights_NK.data_ptr() + 4 * first_row * num_choices,
            arrived.token_N.data_ptr() + 8 * first_row, arrived.count_E.data_ptr(),
        )  # fmt: skip

    def collect(self, rows_SH: Tensor, row_of_nK: Tensor, out_SH: Tensor) -> int:
        rows_SH, row_of_nK = _dense_rows(rows_SH), row_of_nK.contiguous()
        count: int = loops.collect(
            *_rows(rows_SH), rows_SH.shape[1], row_of_nK.data_ptr(), row_of_nK.numel(),
            *_rows(out_SH),
        )  # fmt: skip
        return count

    def weighted_sums(
        self, rows_SH: Tensor, row_of_nK: Tensor, weights_nK: Tensor, out_nH: Tensor
    ) -> None:
        rows_SH, row_of_nK = _dense_rows(rows_SH), row_of_nK.contiguous()
        weights_nK = _weights(weights_nK)
        loops.weighted_sums(
            *_rows(rows_SH), rows_SH.shape[1], row_of_nK.data_ptr(), weights_nK.data_ptr(),
            *row_of_nK.shape, *_rows(out_nH),
        )  # fmt: skip

    def combine(
        self,
        returned_RSH: Tensor,
        owners_has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        weights_TK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ids_TK, weights_TK = ids_TK.contiguous(), _weights(weights_TK)
        y_TH = torch.empty(len(ids_TK), returned_RSH.shape[2], dtype=dtype)
        loops.combine(
            *_rows_of_owners(returned_RSH), owners_has_answered_R.numpy(), ids_TK.data_ptr(),
            weights_TK.data_ptr(), *ids_TK.shape, num_local, y_TH.data_ptr(), kind_of(dtype),
        )  # fmt: skip
        return y_TH

    def combine_sums(
        self,
        returned_RTH: Tensor,
        owners_has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ids_TK = ids_TK.contiguous()
        y_TH = torch.empty(len(ids_TK), returned_RTH.shape[2], dtype=dtype)
        loops.combine_sums(
            *_rows_of_owners(returned_RTH), owners_has_answered_R.numpy(), ids_TK.data_ptr(),
            *ids_TK.shape, num_local, y_TH.data_ptr(), kind_of(dtype),
        )  # fmt: skip
        return y_TH

    def add_rows(
        self,
        rows_nH: Tensor,
        weights_nK: Tensor,
        is_for_T: Tensor,
        sums_TH: Tensor,
        weights_TK: Tensor,
    ) -> None:
        for sums in (sums_TH, weights_TK):
            assert sums.dtype == torch.float32, sums.dtype
            assert sums.is_contiguous(), sums.stride()
        is_for_T = is_for_T.contiguous()
        count = loops.add_rows(
            *_rows(rows_nH), len(rows_nH), weights_nK.data_ptr(), 4 * weights_nK.stride(0),
            is_for_T.data_ptr(), *sums_TH.shape, weights_TK.shape[1], sums_TH.data_ptr(),
            weights_TK.data_ptr(),
        )  # fmt: skip
        assert count == len(rows_nH), (count, len(rows_nH))


def kind_of(dtype: torch.dtype) -> int:
    """Return what compiled code calls rows of a dtype. ValueError for unknown ones."""
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"rows of {dtype}: convert them to float32 or bfloat16")
    return kind


def _rows(rows: Tensor) -> tuple[int, int, int]:
    """Return address, stride in bytes and kind of rows `[..., H]` with contiguous elements."""
    assert rows.stride(-1) == 1 or not rows.numel(), rows.stride()
    return rows.data_ptr(), rows.stride(-2) * rows.element_size(), kind_of(rows.dtype)


def _rows_of_owners(returned: Tensor) -> tuple[int, int, int, int, int]:
    """Return address, strides of owners and rows in bytes, kind, and H."""
    address, row_stride, kind = _rows(returned)
    owner_stride = returned.stride(0) * returned.element_size()
    return address, owner_stride, row_stride, kind, returned.shape[2]


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _weights(weights: Tensor) -> Tensor:
    return weights.to(torch.float32).contiguous()


def _contiguous(values: Tensor | None) -> Tensor:
    return _NOTHING if values is None else values.contiguous()
