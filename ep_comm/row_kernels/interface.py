"""What an exchange does to rows between two transfers: one call each, and two ways to do it.

`plain` is the meaning, in torch, on any device; `compiled` gives the same bits on a CPU.

Suffix letters as in `whalepod.ep_comm.layout`, and H hidden, G fp8 scales of a row, D destinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whalepod.ep_comm.rows import RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRows:
    """What goes into the records of a rank's tokens.

    values_TH   [T, H] of the record's dtype
    scales_TG   [T, G], None without fp8
    ids_TK      [T, K] int64 global expert ids, -1: none
    weights_TK  [T, K] f32, None where records have none
    """

    values_TH: Tensor
    scales_TG: Tensor | None
    ids_TK: Tensor
    weights_TK: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRows:
    """Where received records are spread to, a row per (record, expert of this rank).

    rows_SH, info_S  [S, H] of the record's dtype, [S] int32 token on the source; S: most rows
    scales_SG        [S, G] f32
    row_of_NK        [most N, K] int64 row of each selection, -1 where it is another rank's
    expert_S         [S] int64 local expert of each row, where experts follow one another; else None
    count_E          [E_l] int32 rows of each expert
    first_row_E      [E_l] int64 an expert's first row
    ranges_ER        [E_l, R] int64 (begin << 32) | count of each source's rows of an expert
    count_R          [R] int64 records of each source
    num_rows         [1] int64 rows of all experts
    """

    rows_SH: Tensor
    info_S: Tensor
    scales_SG: Tensor
    row_of_NK: Tensor
    expert_S: Tensor | None
    count_E: Tensor
    first_row_E: Tensor
    ranges_ER: Tensor
    count_R: Tensor
    num_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedRows:
    """Where received records are unpacked to, a row each; contiguous.

    x_NH        [N, H] of the record's dtype
    scales_NG   [N, G] f32
    ids_NK      [N, K] int64 local expert ids, -1 where the choice is another rank's
    weights_NK  [N, K] f32, 0 where the choice is another rank's
    info_N      [N] int32 token on the source
    count_E     [E_l] int64 choices of each local expert, added up over calls
    """

    x_NH: Tensor
    scales_NG: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    info_N: Tensor
    count_E: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Which experts rows are for.

    rows_per_expert  rows between two experts in the output, 0: they follow one another
    """

    first: int
    num_local: int
    num_ranks: int
    rows_per_expert: int


class RowKernels(Protocol):
    """Every copy, conversion and sum of rows."""

    name: str

    def destinations(self, ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
        """Return `[T, R]` bool: the token has an expert on that rank.

        Raises ValueError unless `ids_TK` is int64 `[T, K]` of distinct ids in -1 .. E - 1.
        """
        ...

    def quantize(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Round f32 or bf16 rows to e4m3: values `[T, H]`, f32 scales `[T, H / 128]`."""
        ...

    def pack(
        self,
        row_format: RowFormat,
        rows: SendRows,
        is_for_TD: Tensor,
        blocks: Sequence[Tensor | None],
        first_token: int = 0,
    ) -> list[int]:
        """Write the records of tokens `first_token` and on, once per destination, in order.

        is_for_TD  [T', D] bool, about T' tokens from the first one
        blocks     per destination uint8 `[enough, record_bytes]`, None: it gets nothing
        returns    the number of records per destination
        """
        ...

    def spread(
        self,
        row_format: RowFormat,
        records: Tensor,
        counts: Mapping[int, int],
        experts: Experts,
        out: SpreadRows,
    ) -> None:
        """Write each received record once per expert of this rank that it selects.

        records  uint8 `[R, M, record_bytes]`
        counts   source rank -> records at its place; ranks that are not there have none
        Rows are grouped by expert, then by source, then as they were sent.
        """
        ...

    def unpack(
        self,
        row_format: RowFormat,
        records: Tensor,
        first_expert: int,
        out: UnpackedRows,
        first_row: int,
    ) -> None:
        """Write records, uint8 `[n, record_bytes]`, to the rows `first_row` and on.

        Local experts are those from `first_expert` on. Records have weights.
        """
        ...

    def collect(self, rows_SH: Tensor, row_of_nK: Tensor, out_SH: Tensor) -> int:
        """Write rows `row_of_nK` (-1: none), one after the other, to `out_SH`; return how many.

        Both are f32 or bf16; `out_SH` may be a view of records.
        """
        ...

    def combine(
        self,
        returned_RSH: Tensor,
        has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        weights_TK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return sum_k weights[t, k] * the row that the owner of ids[t, k] sent, `[T, H]` `dtype`.

        returned_RSH  [R, rows, H] f32 or bf16, a view of records; each owner's rows in the order of
                      (token, k) of this rank's selections of its experts
        In f32 and k order, the operations and their order of `Kernels.experts`; rounded once.
        Owners that have not answered are skipped.
        """
        ...

    def add_rows(self, rows_nH: Tensor, is_for_T: Tensor, sums_TH: Tensor) -> None:
        """Add row i (f32 or bf16, may be a view of records) to the i-th of the tokens `is_for_T`.

        Sums are f32 and contiguous.
        """
        ...
