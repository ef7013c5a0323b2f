"""Rows per token: one for each (token, rank), as many as come; sums at the experts' rank.

With several nodes the results of a node are added up there first. Sums run in f32 over ranks in
order, inside each node first; a node's sum is rounded to the combine dtype if there are several.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Dispatched, Handle
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.routes import Routes
from whalepod.ep_comm.row_kernels.interface import RowKernels, UnpackedRows
from whalepod.ep_comm.slots import RecvSlots, TransferId


class ByToken:
    """How an exchange stores rows per token and adds up what comes back."""

    def __init__(
        self,
        group: Group,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        kernels: RowKernels,
        routes: Routes,
    ) -> None:
        self._heap = group.transport.heap
        self._rank = group.rank
        self._config = config
        self._regions = regions
        self._kernels = kernels
        self._routes = routes

    def begin(self, handle: Handle) -> None:
        """Do nothing: there is room for rows when it is known how many come."""

    def store(self, handle: Handle, transfer: TransferId, counts: Mapping[int, int]) -> None:
        """Copy the records that came after those that each source sent before."""
        ranks = range(self._config.num_ranks)
        count_R = handle.count_R or [counts.get(rank, 0) for rank in ranks]
        if handle.unpacked is None:
            handle.unpacked = self._new_rows(sum(count_R))
        stored = {}
        for source, count in counts.items():
            first = sum(count_R[:source]) + self._stored(handle, source)
            records = self._regions.rows.received(self._heap, transfer, source, count)
            self._kernels.unpack(
                self._config.dispatch_format, records, self._rank * self._config.num_local,
                handle.unpacked, first,
            )  # fmt: skip
            stored[source] = (first, count)
        handle.received.append(stored)

    def finish(self, handle: Handle, status: CallStatus) -> Dispatched:
        """Return what has come; rows that have not select nothing."""
        rows = handle.unpacked or self._new_rows(0)
        return Dispatched(
            rows=rows.x_NH,
            scales=rows.scales_NG if rows.scales_NG.shape[1] else None,
            info=rows.info_N,
            count_E=rows.count_E,
            ids_NK=rows.ids_NK,
            weights_NK=rows.weights_NK,
            status=status,
            handle=handle,
        )

    def write_back(
        self, handle: Handle, chunk: int, source: int, y_NH: Tensor, out_NH: Tensor
    ) -> int:
        """Write the sums for the rows of a source in a chunk to `out_NH`; return how many."""
        first, count = handle.received[chunk].get(source, (0, 0))
        out_NH[:count].copy_(y_NH[first : first + count])
        return count

    def add_up(self, handle: Handle, transfer: TransferId, counts: Mapping[int, int]) -> None:
        """Add a chunk's results to its tokens: with several nodes node by node."""
        assert handle.is_in_TR is not None
        if handle.sums_TH is None:
            handle.sums_TH = torch.zeros(len(handle.ids_TK), self._config.hidden)
        first = transfer.chunk * self._config.max_records
        tokens = slice(first, first + self._config.max_records)
        is_in_TR, sums_TH = handle.is_in_TR[tokens], handle.sums_TH[tokens]
        returned, num_nodes = self._regions.returned, self._config.topology.num_nodes
        if num_nodes == 1:
            for rank, count in counts.items():
                self._add(returned, transfer, (rank, count), is_in_TR[:, rank], sums_TH)
            return
        is_on_TV = layout.nodes_hit(is_in_TR, num_nodes)
        for v in range(num_nodes):
            part_TH = torch.zeros_like(sums_TH)
            for rank in self._routes.senders_of(v):
                if rank in counts:
                    is_for_T = is_in_TR[:, rank] if v == self._routes.node else is_on_TV[:, v]
                    self._add(returned, transfer, (rank, counts[rank]), is_for_T, part_TH)
            sums_TH.add_(part_TH.to(self._config.combine_format.torch_dtype).float())

    def reduce(
        self, transfer: TransferId, node: int, counts: Mapping[int, int], hits_nJ: Tensor
    ) -> Tensor:
        """Return the neighbours' results added up for the partner of a node, f32 `[n, H]`."""
        part_nH = torch.zeros(len(hits_nJ), self._config.hidden)
        for j, rank in enumerate(self._routes.neighbours):
            if rank in counts:
                target = self._routes.result_of(node, j)
                arrived = target.place, counts[rank]
                self._add(target.slots, transfer, arrived, hits_nJ[:, j], part_nH)
        return part_nH

    # -- inside --------------------------------------------------------------------------------

    def _add(
        self,
        slots: RecvSlots,
        transfer: TransferId,
        arrived: tuple[int, int],
        is_for_T: Tensor,
        sums_TH: Tensor,
    ) -> None:
        """arrived: place, count."""
        records = slots.received(self._heap, transfer, *arrived)
        self._kernels.add_rows(self._config.combine_format.values(records), is_for_T, sums_TH)

    @staticmethod
    def _stored(handle: Handle, source: int) -> int:
        """Return how many rows of a source are stored."""
        return sum(chunk[source][1] for chunk in handle.received if source in chunk)

    def _new_rows(self, num_rows: int) -> UnpackedRows:
        config, row_format = self._config, self._config.dispatch_format
        return UnpackedRows(
            x_NH=torch.empty(num_rows, config.hidden, dtype=row_format.torch_dtype),
            scales_NG=torch.empty(num_rows, row_format.num_scales),
            ids_NK=torch.full((num_rows, config.top_k), -1, dtype=torch.int64),
            weights_NK=torch.zeros(num_rows, config.top_k),
            info_N=torch.full((num_rows,), -1, dtype=torch.int32),
            count_E=torch.zeros(config.num_local, dtype=torch.int64),
        )
