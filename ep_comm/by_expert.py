"""Rows by expert: one for each (token, expert), in buffers of a fixed size; sums at the token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Dispatched, ExpertRanges, Handle
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.row_kernels.interface import Experts, RowKernels, SpreadRows
from whalepod.ep_comm.slots import NUM_SETS, TransferId


class ByExpert:
    """How an exchange stores rows by expert and adds up what comes back.

    poison_unused  fill buffers with NaN first, so that a reader of garbage shows (for tests)
    """

    def __init__(
        self,
        group: Group,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        kernels: RowKernels,
        *,
        poison_unused: bool,
    ) -> None:
        self._heap = group.transport.heap
        self._config = config
        self._regions = regions
        self._kernels = kernels
        self._poison_unused = poison_unused
        self._experts = Experts(
            first=group.rank * config.num_local,
            num_local=config.num_local,
            num_ranks=config.num_ranks,
            rows_per_expert=config.rows_per_expert,
        )
        self.buffers = [_new_buffers(config) for _ in range(NUM_SETS)]
        self._views = [_views(config, buffers) for buffers in self.buffers]

    def begin(self, handle: Handle) -> None:
        """Choose where the rows of a call go."""
        handle.spread = self.buffers[TransferId(handle.call).set_index]
        if self._poison_unused:
            _poison(handle.spread)

    def store(self, handle: Handle, transfer: TransferId, counts: Mapping[int, int]) -> None:
        """Spread the records that came, source rank -> count."""
        assert handle.spread is not None
        records = self._regions.rows.of_set(self._heap, transfer)
        self._kernels.spread(
            self._config.dispatch_format, records, counts, self._experts, handle.spread
        )

    def finish(self, handle: Handle, status: CallStatus) -> Dispatched:
        """Return what has come."""
        out = handle.spread
        assert out is not None
        rows, scales, info = self._views[TransferId(handle.call).set_index]
        return Dispatched(
            rows=rows,
            scales=scales,
            info=info,
            count_E=out.count_E,
            ranges=ExpertRanges(
                first_row_E=out.first_row_E,
                ranges_ER=out.ranges_ER,
                expert_S=None if out.expert_S is None else out.expert_S[: int(out.num_rows)],
            ),
            status=status,
            handle=handle,
        )

    def write_back(
        self, handle: Handle, chunk: int, source: int, y_SH: Tensor, out_SH: Tensor
    ) -> int:
        """Write the experts' rows that go to a source to `out_SH`; return how many."""
        assert handle.spread is not None
        count_R: list[int] = handle.spread.count_R.tolist()
        first = sum(count_R[:source])
        row_of_nK = handle.spread.row_of_NK[first : first + count_R[source]]
        return self._kernels.collect(y_SH, row_of_nK, out_SH)

    def add_up(self, handle: Handle, transfer: TransferId, counts: Mapping[int, int]) -> None:
        """Add up the rows that came back, weighted, in order of a token's choices."""
        config = self._config
        returned = self._regions.returned.of_set(self._heap, transfer)
        has_answered_R = torch.tensor([rank in counts for rank in range(config.num_ranks)])
        handle.sums_TH = self._kernels.combine(
            config.combine_format.values(returned), has_answered_R, handle.ids_TK,
            config.num_local, handle.weights_TK, handle.dtype,
        )  # fmt: skip


def _new_buffers(config: ExchangeConfig) -> SpreadRows:
    """Return one set of buffers; how many rows there are is not known before they are used."""
    num_rows, row_format = config.num_output_rows, config.dispatch_format
    ranks, num_local = config.num_ranks, config.num_local
    is_packed = config.layout == "packed"
    return SpreadRows(
        rows_SH=torch.empty(num_rows, config.hidden, dtype=row_format.torch_dtype),
        info_S=torch.empty(num_rows, dtype=torch.int32),
        scales_SG=torch.empty(num_rows, row_format.num_scales),
        row_of_NK=torch.zeros(ranks * config.max_tokens, config.top_k, dtype=torch.int64),
        expert_S=torch.zeros(num_rows, dtype=torch.int64) if is_packed else None,
        count_E=torch.zeros(num_local, dtype=torch.int32),
        first_row_E=torch.zeros(num_local, dtype=torch.int64),
        ranges_ER=torch.zeros(num_local, ranks, dtype=torch.int64),
        count_R=torch.zeros(ranks, dtype=torch.int64),
        num_rows=torch.zeros(1, dtype=torch.int64),
    )


def _views(config: ExchangeConfig, out: SpreadRows) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return rows, scales and source tokens in the shape of the layout."""
    shape = (config.num_local, -1) if config.rows_per_expert else (-1,)
    num_scales = out.scales_SG.shape[1]
    scales = out.scales_SG.view(*shape, num_scales) if num_scales else None
    return out.rows_SH.view(*shape, config.hidden), scales, out.info_S.view(shape)


def _poison(buffers: SpreadRows) -> None:
    """Fill rows with 0xFF: NaN in every float type, and no valid index."""
    buffers.rows_SH.view(torch.uint8).fill_(0xFF)
    buffers.info_S.fill_(-1)
    buffers.scales_SG.view(torch.int32).fill_(-1)
