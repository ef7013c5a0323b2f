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
from whalepod.ep_comm.row_kernels.interface import Experts, SendRows, SpreadRows, UnpackedRows
from whalepod.ep_comm.row_kernels.memory import kind_of
from whalepod.ep_comm.row_kernels.records import Record, format_record, spread_record
from whalepod.ep_comm.rows import SCALE_GROUP, RowFormat

_NOTHING = torch.empty(0)


class CompiledRows:
    """See `whalepod.ep_comm.row_kernels.interface` for every contract."""

    name = "compiled"

    def destinations(self, ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
        if ids_TK.dtype != torch.int64 or ids_TK.ndim != 2:
            layout.check_choices(ids_TK, num_experts, ids_TK.shape[-1])
        ids_TK = ids_TK.contiguous()
        num_tokens, top_k = ids_TK.shape
        per_rank = layout.split_experts(num_experts, num_ranks)
        is_in_TR = torch.empty(num_tokens, num_ranks, dtype=torch.bool)
        is_valid = loops.destinations(
            ids_TK.data_ptr(), num_tokens, top_k, per_rank, num_ranks, is_in_TR.data_ptr()
        )
        if not is_valid:
            layout.check_choices(ids_TK, num_experts, top_k)
        return is_in_TR

    def quantize(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = x_TH.contiguous()
        num_tokens, hidden = x_TH.shape
        values_TH = torch.empty(num_tokens, hidden, dtype=torch.float8_e4m3fn)
        scales_TG = torch.empty(num_tokens, hidden // SCALE_GROUP)
        loops.quantize(
            x_TH.data_ptr(), kind_of(x_TH.dtype), num_tokens, hidden, values_TH.data_ptr(),
            scales_TG.data_ptr(),
        )  # fmt: skip
        return values_TH, scales_TG

    def pack(
        self,
        row_format: RowFormat,
        rows: SendRows,
        is_for_TD: Tensor,
        blocks: Sequence[Tensor | None],
        first_token: int = 0,
    ) -> list[int]:
        values_TH, ids_TK = _dense_rows(rows.values_TH), rows.ids_TK.contiguous()
        weights_TK, scales_TG = _contiguous(rows.weights_TK), _contiguous(rows.scales_TG)
        is_for_TD = is_for_TD.contiguous()
        assert len(blocks) == is_for_TD.shape[1], (len(blocks), is_for_TD.shape)
        targets_D = np.array([0 if b is None else b.data_ptr() for b in blocks], dtype=np.int64)
        counts_D = np.zeros(len(blocks), dtype=np.int64)
        loops.pack(
            _at(format_record(row_format)), *_rows(values_TH), scales_TG.data_ptr(),
            ids_TK.data_ptr(), weights_TK.data_ptr(), is_for_TD.data_ptr(), len(is_for_TD),
            first_token, targets_D, counts_D,
        )  # fmt: skip
        counts: list[int] = counts_D.tolist()
        return counts

    def spread(
        self,
        row_format: RowFormat,
        records: Tensor,
        counts: Mapping[int, int],
        experts: Experts,
        out: SpreadRows,
    ) -> None:
        max_tokens = records.shape[1]
        assert max(counts.values(), default=0) <= max_tokens, (counts, max_tokens)
        assert out.rows_SH.dtype == row_format.torch_dtype, (out.rows_SH.dtype, row_format)
        assert out.rows_SH.is_contiguous(), out.rows_SH.stride()
        out.count_R.copy_(torch.tensor([counts.get(r, 0) for r in range(experts.num_ranks)]))
        written = spread_record(out)
        loops.spread(
            _at(format_record(row_format)), records.data_ptr(), max_tokens, experts.num_ranks,
            experts.first, experts.num_local, experts.rows_per_expert, _at(written),
        )  # fmt: skip

    def unpack(
        self,
        row_format: RowFormat,
        records: Tensor,
        first_expert: int,
        out: UnpackedRows,
        first_row: int,
    ) -> None:
        top_k, end = row_format.num_ids, first_row + len(records)
        assert row_format.num_weights == top_k, row_format
        assert 0 <= first_row <= end <= len(out.x_NH), (first_row, len(records))
        assert out.x_NH.dtype == row_format.torch_dtype, (out.x_NH.dtype, row_format)
        assert records.is_contiguous(), records.stride()
        rows = slice(first_row, end)
        loops.unpack(
            _at(format_record(row_format)), records.data_ptr(), len(records), first_expert,
            len(out.count_E), out.x_NH[rows].data_ptr(), out.scales_NG[rows].data_ptr(),
            out.ids_NK[rows].data_ptr(), out.weights_NK[rows].data_ptr(),
            out.info_N[rows].data_ptr(), out.count_E.data_ptr(),
        )  # fmt: skip

    def collect(self, rows_SH: Tensor, row_of_nK: Tensor, out_SH: Tensor) -> int:
        rows_SH, row_of_nK = _dense_rows(rows_SH), row_of_nK.contiguous()
        count: int = loops.collect(
            *_rows(rows_SH), rows_SH.shape[1], row_of_nK.data_ptr(), row_of_nK.numel(),
            *_rows(out_SH),
        )  # fmt: skip
        return count

    def combine(
        self,
        returned_RSH: Tensor,
        has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        weights_TK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()
        hidden = returned_RSH.shape[2]
        y_TH = torch.empty(len(ids_TK), hidden, dtype=dtype)
        owner_stride = returned_RSH.stride(0) * returned_RSH.element_size()
        loops.combine(
            *_rows(returned_RSH), owner_stride, hidden, has_answered_R.numpy(), ids_TK.data_ptr(),
            weights_TK.data_ptr(), *ids_TK.shape, num_local, (y_TH.data_ptr(), kind_of(dtype)),
        )  # fmt: skip
        return y_TH

    def add_rows(self, rows_nH: Tensor, is_for_T: Tensor, sums_TH: Tensor) -> None:
        assert sums_TH.dtype == torch.float32, sums_TH.dtype
        assert sums_TH.is_contiguous(), sums_TH.stride()
        is_for_T = is_for_T.contiguous()
        count = loops.add_rows(
            *_rows(rows_nH), len(rows_nH), is_for_T.data_ptr(), *sums_TH.shape, sums_TH.data_ptr()
        )
        assert count == len(rows_nH), (count, len(rows_nH))


def _at(record: Record) -> int:
    return record.ctypes.data


def _rows(rows: Tensor) -> tuple[int, int, int]:
    """Return address, stride in bytes and kind of rows `[..., H]` with contiguous elements."""
    assert rows.stride(-1) == 1 or not rows.numel(), rows.stride()
    return rows.data_ptr(), rows.stride(-2) * rows.element_size(), kind_of(rows.dtype)


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _contiguous(values: Tensor | None) -> Tensor:
    return _NOTHING if values is None else values.contiguous()
