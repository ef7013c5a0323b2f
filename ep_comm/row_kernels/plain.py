"""`RowKernels` in torch operations: what every other way is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.row_kernels.interface import (
    ArrivedRows,
    ExpertOutput,
    Experts,
    Spread,
    TokenRows,
)
from whalepod.ep_comm.rows import (
    RowFormat,
    RowViews,
    gather_rows,
    quantize_rows,
    raw,
    weighted_sum,
)


class PlainRows:
    """See `whalepod.ep_comm.row_kernels.interface` for every contract."""

    name = "plain"

    def destinations(self, ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
        layout.check_choices(ids_TK, num_experts, ids_TK.shape[-1])
        return layout.dispatch_layout(ids_TK, num_experts, num_ranks).is_token_in_rank_TR

    def quantize(self, x_TH: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
        return quantize_rows(x_TH, round_scale=round_scale)

    def pack(
        self,
        row_format: RowFormat,
        tokens: TokenRows,
        is_for_TD: Tensor,
        blocks: Sequence[Tensor | None],
        first_token: int = 0,
    ) -> list[int]:
        counts = [0] * len(blocks)
        for d, block in enumerate(blocks):
            if block is None:
                continue
            chosen = is_for_TD[:, d].nonzero().squeeze(1) + first_token
            views = row_format.views(block[: len(chosen)])
            views.token.copy_(chosen)
            views.ids_K.copy_(tokens.ids_TK[chosen])
            gather_rows(tokens.values_TH, chosen, views.values_H)
            if tokens.scales_TG is not None:
                views.scales_G.copy_(tokens.scales_TG[chosen])
            if tokens.weights_TK is not None:
                views.weights_K.copy_(tokens.weights_TK[chosen])
            counts[d] = len(chosen)
        return counts

    def spread(
        self,
        row_format: RowFormat,
        records: Tensor,
        counts: Mapping[int, int],
        experts: Experts,
        output: ExpertOutput,
    ) -> Spread:
        source_N, record_N = _places(counts, records.shape[1])
        views = row_format.views(records.flatten(0, 1))
        ids_NK = views.ids_K.index_select(0, record_N).long()
        local_NK = layout.local_ids(ids_NK, experts.first, experts.num_local)
        rows = layout.expert_rows(
            local_NK, experts.num_local, rows_per_expert=experts.rows_per_expert
        )
        _fill(output, rows, views, record_N[rows.source_S])
        begin_ER, count_ER = layout.source_ranges(
            local_NK, source_N, experts.num_local, experts.num_ranks
        )
        return Spread(
            row_of_NK=rows.row_of_NK,
            weights_NK=views.weights_K.index_select(0, record_N),
            count_E=rows.count_E,
            first_row_E=rows.first_row_E,
            ranges_ER=layout.pack_ranges(begin_ER, count_ER),
        )

    def unpack(
        self,
        row_format: RowFormat,
        records: Tensor,
        first_expert: int,
        arrived: ArrivedRows,
        first_row: int,
    ) -> None:
        views, num_local = row_format.views(records), len(arrived.count_E)
        rows = slice(first_row, first_row + len(records))
        local_nK = layout.local_ids(views.ids_K.long(), first_expert, num_local)
        raw(arrived.x_NH)[rows] = raw(views.values_H)
        arrived.scales_NG[rows] = views.scales_G
        arrived.ids_NK[rows] = local_nK
        arrived.weights_NK[rows] = views.weights_K.masked_fill(local_nK < 0, 0.0)
        arrived.token_N[rows] = views.token.long()
        arrived.count_E.add_(torch.bincount(local_nK[local_nK >= 0], minlength=num_local))

    def collect(self, rows_SH: Tensor, row_of_nK: Tensor, out_SH: Tensor) -> int:
        chosen = row_of_nK[row_of_nK >= 0]
        gather_rows(rows_SH, chosen, out_SH[: len(chosen)])
        return len(chosen)

    def weighted_sums(
        self, rows_SH: Tensor, row_of_nK: Tensor, weights_nK: Tensor, out_nH: Tensor
    ) -> None:
        out_nH.copy_(weighted_sum(rows_SH, row_of_nK, weights_nK))

    def combine(
        self,
        returned_RSH: Tensor,
        owners_has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        weights_TK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        num_ranks, rows_per_owner, _ = returned_RSH.shape
        owners_TK = layout.owner_of(ids_TK, num_local * num_ranks, num_ranks)
        place_TK = layout.selection_slots(owners_TK, num_ranks)
        is_here_TK = (owners_TK >= 0) & owners_has_answered_R[owners_TK.clamp(min=0)]
        row_TK = torch.where(is_here_TK, owners_TK * rows_per_owner + place_TK, -1)
        return weighted_sum(returned_RSH.flatten(0, 1), row_TK, weights_TK).to(dtype)

    def combine_sums(
        self,
        returned_RTH: Tensor,
        owners_has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        dtype: torch.dtype,
    ) -> Tensor:
        num_ranks = len(returned_RTH)
        owners_TK = layout.owner_of(ids_TK, num_local * num_ranks, num_ranks)
        y_TH = torch.zeros(len(owners_TK), returned_RTH.shape[2])
        for rank in owners_has_answered_R.nonzero().squeeze(1).tolist():
            tokens = (owners_TK == rank).any(dim=1).nonzero().squeeze(1)
            y_TH[tokens] += returned_RTH[rank, : len(tokens)].float()
        return y_TH.to(dtype)

    def add_rows(
        self,
        rows_nH: Tensor,
        weights_nK: Tensor,
        is_for_T: Tensor,
        sums_TH: Tensor,
        weights_TK: Tensor,
    ) -> None:
        tokens = is_for_T.nonzero().squeeze(1)
        assert len(tokens) == len(rows_nH), (len(tokens), len(rows_nH))
        sums_TH[tokens] += rows_nH.float()
        weights_TK[tokens] += weights_nK


def _fill(output: ExpertOutput, rows: layout.ExpertRows, views: RowViews, record_S: Tensor) -> None:
    """Copy the records `record_S` (by expert) of `views` to the rows that `rows` names."""
    for first, start, count in _runs(rows):
        chosen = record_S[start : start + count]
        gather_rows(views.values_H, chosen, output.rows_SH[first : first + count])
    output.info_S[rows.row_S] = views.token.index_select(0, record_S)
    if not views.scales_G.shape[-1]:
        return
    scales = views.scales_G.index_select(0, record_S).contiguous()
    rows_per_block = output.scales_BSG.shape[1]
    block_S = rows.row_S.div(rows_per_block, rounding_mode="floor")
    output.scales_BSG[block_S, rows.row_S % rows_per_block] = scales.view(output.scales_BSG.dtype)


def _runs(rows: layout.ExpertRows) -> list[tuple[int, int, int]]:
    """Return (first row, first selection, count) of each expert that has rows."""
    starts_E = rows.count_E.cumsum(0) - rows.count_E
    found = zip(rows.first_row_E.tolist(), starts_E.tolist(), rows.count_E.tolist(), strict=True)
    return [run for run in found if run[2]]


def _places(counts: Mapping[int, int], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the source rank and the place of all received records, by source, `[N]` each."""
    assert max(counts.values(), default=0) <= max_tokens, (counts, max_tokens)
    ranks = torch.tensor(list(counts), dtype=torch.int64)
    count_C = torch.tensor(list(counts.values()), dtype=torch.int64)
    source_N = ranks.repeat_interleave(count_C)
    first_C = count_C.cumsum(0) - count_C
    slot_N = torch.arange(len(source_N)) - first_C.repeat_interleave(count_C)
    return source_N, source_N * max_tokens + slot_N
