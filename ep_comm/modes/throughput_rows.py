"""What a throughput dispatch gives to the experts, and the sums that its combine forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import CallStatus
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig
from whalepod.ep_comm.row_kernels.interface import ArrivedRows, RowKernels
from whalepod.ep_comm.rows import RowViews, raw


@dataclass(slots=True, kw_only=True)
class Routing:
    """What a dispatch found out; combine and a repeated dispatch follow it.

    received   per chunk: rows from each source rank
    forwarded  per chunk and source node: `[n, J]` bool, whom each passed-on row went to
    """

    ids_TK: Tensor
    weights_TK: Tensor
    is_token_in_rank_TR: Tensor
    count_RR: Tensor
    num_chunks: int
    received: list[Mapping[int, int]] = field(default_factory=list)
    forwarded: list[Mapping[int, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Rows for the experts of this rank, by source rank, then token; one per (token, rank).

    x_NH            [N, H] of the dispatch dtype
    scales_NG       [N, H / 128] f32, None without fp8
    ids_NK          [N, K] int64 local expert ids, -1 where the choice is another rank's
    weights_NK      [N, K] f32, 0 where the choice is another rank's
    source_rank_N, source_token_N  int64
    expert_counts   rows of each local expert, rounded up to the alignment
    rank_prefix_RR  rows sent (row: source, column: destination), summed over sources

    With `num_static_rows` rows from the N-th on are padding: ids -1, the rest undefined.
    """

    x_NH: Tensor
    scales_NG: Tensor | None
    ids_NK: Tensor
    weights_NK: Tensor
    source_rank_N: Tensor
    source_token_N: Tensor
    expert_counts: list[int]
    rank_prefix_RR: Tensor
    num_rows: int
    status: CallStatus
    routing: Routing


class RowsByArrival:
    """The output of a dispatch while its chunks arrive. Rows that never come select nothing."""

    def __init__(
        self, config: ThroughputConfig, rank: int, num_rows: int, row_kernels: RowKernels
    ) -> None:
        self._config = config
        self._format, choices = config.dispatch_format, config.num_choices
        self._first_expert = rank * config.num_local
        self._kernels = row_kernels
        self._rows = ArrivedRows(
            x_NH=torch.empty(num_rows, config.hidden, dtype=self._format.torch_dtype),
            scales_NG=torch.empty(num_rows, self._format.num_scales),
            ids_NK=torch.full((num_rows, choices), -1, dtype=torch.int64),
            weights_NK=torch.zeros(num_rows, choices),
            token_N=torch.full((num_rows,), -1, dtype=torch.int64),
            count_E=torch.zeros(config.num_local, dtype=torch.int64),
        )
        self._source_N = torch.full((num_rows,), -1, dtype=torch.int64)

    def store(self, first: int, source: int, records: Tensor) -> None:
        """Copy records of one source, uint8 `[n, record_bytes]`, to rows `first` and on."""
        self._kernels.unpack(self._format, records, self._first_expert, self._rows, first)
        self._source_N[first : first + len(records)] = source

    def finish(self, num_rows: int, routing: Routing, status: CallStatus) -> Received:
        """Return what has arrived."""
        rows = self._rows
        counts_E = layout.align_up(rows.count_E, self._config.expert_alignment)
        return Received(
            x_NH=rows.x_NH,
            scales_NG=rows.scales_NG if self._format.num_scales else None,
            ids_NK=rows.ids_NK,
            weights_NK=rows.weights_NK,
            source_rank_N=self._source_N,
            source_token_N=rows.token_N,
            expert_counts=counts_E.tolist(),
            rank_prefix_RR=layout.rank_prefix_matrix(routing.count_RR),
            num_rows=num_rows,
            status=status,
            routing=routing,
        )


@dataclass(frozen=True, slots=True)
class TokenSums:
    """f32 sums of the rows `[T, H]` and weights `[T, K]` that come back for tokens."""

    y_TH: Tensor
    weights_TK: Tensor

    @staticmethod
    def zeros(num_tokens: int, config: ThroughputConfig) -> TokenSums:
        return TokenSums(
            torch.zeros(num_tokens, config.hidden), torch.zeros(num_tokens, config.num_choices)
        )

    def of_tokens(self, start: int, count: int) -> TokenSums:
        """Return the sums of some tokens; what is added to them is added here."""
        tokens = slice(start, start + count)
        return TokenSums(self.y_TH[tokens], self.weights_TK[tokens])

    def add(self, is_member_T: Tensor, views: RowViews, row_kernels: RowKernels) -> None:
        """Add one record to each of the tokens `is_member_T`, bool `[T]`."""
        row_kernels.add_rows(
            views.values_H, views.weights_K, is_member_T, self.y_TH, self.weights_TK
        )

    def add_rounded(self, part: TokenSums, dtype: torch.dtype) -> None:
        """Add other sums of the same tokens, rounded as if they had been sent as `dtype`."""
        self.y_TH.add_(part.y_TH.to(dtype).float())
        self.weights_TK.add_(part.weights_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """Received rows once per local choice, grouped by expert; gaps between groups are zero.

    x_SH       [S, H] of the dispatch dtype
    weights_S  [S] f32
    count_E, first_row_E  [E_l] int64; groups begin at multiples of the alignment
    """

    x_SH: Tensor
    weights_S: Tensor
    count_E: Tensor
    first_row_E: Tensor
    row_of_NK: Tensor


def expand(received: Received, num_local: int, alignment: int = 1) -> Expanded:
    """Group the received rows by local expert for a grouped GEMM (DeepEP's `do_expand`)."""
    spread = layout.expert_rows(received.ids_NK, num_local, alignment=alignment)
    num_rows = int(layout.align_up(spread.count_E, alignment).sum())
    x_SH = torch.zeros(num_rows, received.x_NH.shape[1], dtype=received.x_NH.dtype)
    raw(x_SH)[spread.row_S] = raw(received.x_NH)[spread.source_S]
    weights_S = torch.zeros(num_rows)
    is_local_NK = spread.row_of_NK >= 0
    weights_S[spread.row_of_NK[is_local_NK]] = received.weights_NK[is_local_NK]
    return Expanded(
        x_SH=x_SH,
        weights_S=weights_S,
        count_E=spread.count_E,
        first_row_E=spread.first_row_E,
        row_of_NK=spread.row_of_NK,
    )
