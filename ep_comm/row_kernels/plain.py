"""`RowKernels` in torch operations: what every other way is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.row_kernels.interface import Experts, SendRows, SpreadRows, UnpackedRows
from whalepod.ep_comm.rows import RowFormat, gather_rows, quantize_rows, raw, weighted_sum


class PlainRows:
    """See `whalepod.ep_comm.row_kernels.interface` for every contract."""

    name = "plain"

    def destinations(self, ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
        layout.check_choices(ids_TK, num_experts, ids_TK.shape[-1])
        return layout.dispatch_layout(ids_TK, num_experts, num_ranks).is_token_in_rank_TR

    def quantize(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x_TH)

    def pack(
        self,
        row_format: RowFormat,
        rows: SendRows,
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
            views.ids_K.copy_(rows.ids_TK[chosen])
            gather_rows(rows.values_TH, chosen, views.values_H)
            if rows.scales_TG is not None:
                views.scales_G.copy_(rows.scales_TG[chosen])
            if rows.weights_TK is not None:
                views.weights_K.copy_(rows.weights_TK[chosen])
            counts[d] = len(chosen)
        return counts

    def spread(
        self,
        row_format: RowFormat,
        records: Tensor,
        counts: Mapping[int, int],
        experts: Experts,
        out: SpreadRows,
    ) -> None:
        source_N, record_N = _places(counts, records.shape[1])
        views = row_format.views(records.flatten(0, 1))
        ids_NK = views.ids_K.index_select(0, record_N).long()
        local_NK = layout.local_ids(ids_NK, experts.first, experts.num_local)
        placed = layout.expert_rows(local_NK, experts.num_local, experts.rows_per_expert)
        record_S = record_N[placed.source_S]
        for first, start, count in _runs(placed):
            chosen = record_S[start : start + count]
            gather_rows(views.values_H, chosen, out.rows_SH[first : first + count])
        out.info_S[placed.row_S] = views.token.index_select(0, record_S)
        out.scales_SG[placed.row_S] = views.scales_G.index_select(0, record_S)
        begin_ER, count_ER = layout.source_ranges(
            local_NK, source_N, experts.num_local, experts.num_ranks
        )
        out.row_of_NK[: len(record_N)] = placed.row_of_NK
        out.count_E.copy_(placed.count_E)
        out.first_row_E.copy_(placed.first_row_E)
        out.ranges_ER.copy_(layout.pack_ranges(begin_ER, count_ER))
        out.count_R.zero_()
        out.count_R[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.int64)
        out.num_rows.fill_(len(placed.row_S))
        if out.expert_S is not None:
            expert_S = torch.arange(experts.num_local).repeat_interleave(placed.count_E)
            out.expert_S[: len(expert_S)] = expert_S

    def unpack(
        self,
        row_format: RowFormat,
        records: Tensor,
        first_expert: int,
        out: UnpackedRows,
        first_row: int,
    ) -> None:
        views, num_local = row_format.views(records), len(out.count_E)
        rows = slice(first_row, first_row + len(records))
        local_nK = layout.local_ids(views.ids_K.long(), first_expert, num_local)
        raw(out.x_NH)[rows] = raw(views.values_H)
        out.scales_NG[rows] = views.scales_G
        out.ids_NK[rows] = local_nK
        out.weights_NK[rows] = views.weights_K.masked_fill(local_nK < 0, 0.0)
        out.info_N[rows] = views.token
        out.count_E.add_(torch.bincount(local_nK[local_nK >= 0], minlength=num_local))

    def collect(self, rows_SH: Tensor, row_of_nK: Tensor, out_SH: Tensor) -> int:
        chosen = row_of_nK[row_of_nK >= 0]
        gather_rows(rows_SH, chosen, out_SH[: len(chosen)])
        return len(chosen)

    def combine(
        self,
        returned_RSH: Tensor,
        has_answered_R: Tensor,
        ids_TK: Tensor,
        num_local: int,
        weights_TK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        num_ranks, rows_per_owner, _ = returned_RSH.shape
        owners_TK = layout.owner_of(ids_TK, num_local * num_ranks, num_ranks)
        place_TK = layout.selection_slots(owners_TK, num_ranks)
        is_here_TK = (owners_TK >= 0) & has_answered_R[owners_TK.clamp(min=0)]
        row_TK = torch.where(is_here_TK, owners_TK * rows_per_owner + place_TK, -1)
        return weighted_sum(returned_RSH.flatten(0, 1), row_TK, weights_TK).to(dtype)

    def add_rows(self, rows_nH: Tensor, is_for_T: Tensor, sums_TH: Tensor) -> None:
        tokens = is_for_T.nonzero().squeeze(1)
        assert len(tokens) == len(rows_nH), (len(tokens), len(rows_nH))
        sums_TH[tokens] += rows_nH.float()


def _runs(rows: layout.ExpertRows) -> list[tuple[int, int, int]]:
    """Return (first row, first selection, count) of each expert that has rows."""
    starts_E = rows.count_E.cumsum(0) - rows.count_E
    found = zip(rows.first_row_E.tolist(), starts_E.tolist(), rows.count_E.tolist(), strict=True)
    return [run for run in found if run[2]]


def _places(counts: Mapping[int, int], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the source rank and the place of all received records, by source, `[N]` each."""
    assert max(counts.values(), default=0) <= max_tokens, (counts, max_tokens)
    ranks = torch.tensor(list(counts), dtype=torch.int64)
    count_R = torch.tensor(list(counts.values()), dtype=torch.int64)
    source_N = ranks.repeat_interleave(count_R)
    first_R = count_R.cumsum(0) - count_R
    slot_N = torch.arange(len(source_N)) - first_R.repeat_interleave(count_R)
    return source_N, source_N * max_tokens + slot_N
