"""What a throughput dispatch gives to the experts, and the sums that its combine forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import CallStatus
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig
from whalepod.ep_comm.row_kernels.interface import RowKernels
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

    def __init__(self, config: ThroughputConfig, num_rows: int) -> None:
        row_format, choices = config.dispatch_format, config.num_choices
        self._x_NH = torch.empty(num_rows, config.hidden, dtype=row_format.torch_dtype)
        self._scales_NG = torch.empty(num_rows, row_format.num_scales)
        self._ids_NK = torch.full((num_rows, choices), -1, dtype=torch.int64)
        self._weights_NK = torch.zeros(num_rows, choices)
        self._source_N = torch.full((num_rows,), -1, dtype=torch.int64)
        self._token_N = torch.full((num_rows,), -1, dtype=torch.int64)

    def store(self, first: int, source: int, views: RowViews) -> None:
        """Copy records of one source to rows `first` and on."""
        rows = slice(first, first + len(views.token))
        raw(self._x_NH)[rows] = raw(views.values_H)
        self._scales_NG[rows] = views.scales_G
        self._ids_NK[rows] = views.ids_K.long()
        self._weights_NK[rows] = views.weights_K
        self._source_N[rows] = source
        self._token_N[rows] = views.token.long()

    def finish(
        self,
        config: ThroughputConfig,
        rank: int,
        num_rows: int,
        routing: Routing,
        status: CallStatus,
    ) -> Received:
        """Renumber the choices for this rank and count them."""
        local_NK = layout.local_ids(self._ids_NK, rank * config.num_local, config.num_local)
        count_E = torch.bincount(local_NK[local_NK >= 0], minlength=config.num_local)
        return Received(
            x_NH=self._x_NH,
            scales_NG=self._scales_NG if config.dispatch_format.num_scales else None,
            ids_NK=local_NK,
            weights_NK=self._weights_NK.masked_fill(local_NK < 0, 0.0),
            source_rank_N=self._source_N,
            source_token_N=self._token_N,
            expert_counts=layout.align_up(count_E, config.expert_alignment).tolist(),
            rank_prefix_RR=layout.rank_prefix_matrix(routing.count_RR),
            num_rows=num_rows,
            status=status,
            routing=routing,
        )


class TokenSums:
    """f32 sums of the rows `[T, H]` and weights `[T, K]` that come back for tokens."""

    def __init__(self, num_tokens: int, config: ThroughputConfig) -> None:
        self.y_TH = torch.zeros(num_tokens, config.hidden)
        self.weights_TK = torch.zeros(num_tokens, config.num_choices)
        self._wire_dtype = config.combine_format.torch_dtype

    def add(self, is_member_T: Tensor, views: RowViews, row_kernels: RowKernels) -> None:
        """Add one record to each of the tokens `is_member_T`, bool `[T]`."""
        row_kernels.add_rows(views.values_H, is_member_T, self.y_TH)
        self.weights_TK[is_member_T] += views.weights_K

    def add_part(self, start: int, part: TokenSums, *, is_rounded: bool) -> None:
        """Add another sum to the tokens from `start` on, rounded as if it had been sent."""
        y_tH = part.y_TH.to(self._wire_dtype).float() if is_rounded else part.y_TH
        tokens = slice(start, start + len(y_tH))
        self.y_TH[tokens] += y_tH
        self.weights_TK[tokens] += part.weights_TK


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
