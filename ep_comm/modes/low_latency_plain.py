"""The phases of the low-latency mode over a transport: what they mean, on every transport.

Ranks that are missing, and calls that are given up, are found here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.ep_comm.group import Arrivals, CallStatus, Expected, Group
from whalepod.ep_comm.heap import Region
from whalepod.ep_comm.modes.low_latency_config import (
    NUM_SETS,
    LowLatencyConfig,
    LowLatencyRegions,
)
from whalepod.ep_comm.modes.low_latency_output import Handle, LowLatencyOutput, ReceivedRows
from whalepod.ep_comm.row_kernels.interface import Experts, RowKernels, TokenRows
from whalepod.ep_comm.rows import Outbox, RecordBlocks, exponent_bytes

DISPATCH, COMBINE = "low-latency dispatch", "low-latency combine"
"""What statuses call the two calls."""


class PlainPhases:
    """One rank's phases."""

    def __init__(
        self,
        group: Group,
        config: LowLatencyConfig,
        regions: LowLatencyRegions,
        outbox: Outbox,
        outputs: list[LowLatencyOutput],
        row_kernels: RowKernels,
    ) -> None:
        self._group = group
        self._config = config
        self._regions = regions
        self._outbox = outbox
        self._outputs = outputs
        self._kernels = row_kernels
        transport, ranks = group.transport, config.num_ranks
        self._there_format, self._back_format = config.dispatch_format, config.combine_format
        self._received = regions.dispatch_rows.view(transport.heap).view(
            NUM_SETS, ranks, config.max_tokens, self._there_format.num_bytes
        )
        returned = regions.combine_rows.view(transport.heap).view(
            NUM_SETS, ranks, config.combine_rows, self._back_format.num_bytes
        )
        self._returned_values = self._back_format.views(returned).values_H
        self._there = RecordBlocks(outbox, transport, self._there_format, config.max_tokens)
        self._back = RecordBlocks(outbox, transport, self._back_format, config.combine_rows)
        self._experts = Experts(
            first=group.rank * config.num_local,
            num_local=config.num_local,
            num_ranks=ranks,
            rows_per_expert=config.rows_per_expert,
        )

    def destinations(self, ids_TK: Tensor) -> Tensor:
        """Return `[T, R]` bool: the token goes there. ValueError for bad ids."""
        return self._kernels.destinations(ids_TK, self._config.num_experts, self._config.num_ranks)

    def send_dispatch(
        self,
        epoch: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor | None,
        is_in_TR: Tensor,
    ) -> None:
        self._outbox.begin()
        offset, blocks = self._open_dispatch(epoch)
        tokens = self._encode(x_TH, ids_TK, weights_TK)
        counts = self._kernels.pack(self._there_format, tokens, is_in_TR, blocks)
        word = self._regions.dispatch_words.word(self._place(epoch, self._group.rank))
        for rank, (block, count) in enumerate(zip(blocks, counts, strict=True)):
            if block is not None:
                num_bytes = count * self._there_format.num_bytes
                self._outbox.send(rank, offset, block, num_bytes, word, epoch, count)

    def receive_dispatch(self, epoch: int, deadline_ms: float) -> tuple[ReceivedRows, CallStatus]:
        arrivals = Arrivals(self._group, DISPATCH, epoch)
        counts = arrivals.wait(self._expected(self._regions.dispatch_words, epoch), deadline_ms)
        spread = self._kernels.spread(
            self._there_format,
            self._received[epoch % NUM_SETS],
            counts,
            self._experts,
            self._outputs[epoch % NUM_SETS].places,
        )
        arrivals.check_unchanged()
        expert_S = None
        if self._config.output == "packed":
            expert_S = torch.arange(len(spread.count_E)).repeat_interleave(spread.count_E)
        rows = ReceivedRows(
            counts=counts,
            row_of_NK=spread.row_of_NK,
            weights_NK=spread.weights_NK,
            count_E=spread.count_E.to(torch.int32),
            first_row_E=spread.first_row_E,
            expert_S=expert_S,
            ranges_ER=spread.ranges_ER,
        )
        return rows, arrivals.status()

    def send_combine(self, y_SH: Tensor, handle: Handle) -> None:
        self._outbox.begin()
        counts, first = handle.received.counts, 0
        for source in self._group.live():
            count = counts.get(source, 0)  # 0 also if its dispatch failed here
            self._send_back(source, handle, slice(first, first + count), y_SH)
            first += count

    def receive_combine(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        config, epoch = self._config, handle.epoch
        arrivals = Arrivals(self._group, COMBINE, epoch)
        counts = arrivals.wait(self._expected(self._regions.combine_words, epoch), deadline_ms)
        rows_RSH = self._returned_values[epoch % NUM_SETS]
        has_answered_R = torch.tensor([rank in counts for rank in range(config.num_ranks)])
        choices = (handle.ids_TK, config.num_local)
        if config.pre_reduce:
            y_TH = self._kernels.combine_sums(rows_RSH, has_answered_R, *choices, handle.dtype)
        else:
            y_TH = self._kernels.combine(
                rows_RSH, has_answered_R, *choices, weights_TK, handle.dtype
            )
        arrivals.check_unchanged()
        return y_TH, arrivals.status()

    # -- inside --------------------------------------------------------------------------------

    def _encode(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> TokenRows:
        values_TH, scales_TG = x_TH, None
        if self._config.dispatch_dtype == "float8":
            values_TH, scales_TG = self._kernels.quantize(
                x_TH, round_scale=self._config.round_scale
            )
            if self._config.ue8m0:
                scales_TG = exponent_bytes(scales_TG)
        return TokenRows(
            values_TH=values_TH, scales_TG=scales_TG, ids_TK=ids_TK, weights_TK=weights_TK
        )

    def _place(self, epoch: int, rank: int) -> int:
        """Return the index of a rank's part in the set of a call."""
        return (epoch % NUM_SETS) * self._config.num_ranks + rank

    def _open_dispatch(self, epoch: int) -> tuple[int, list[Tensor | None]]:
        """Return where this rank's records go: their offset, and a block for each live rank."""
        offset = self._regions.dispatch_rows.offset
        offset += self._place(epoch, self._group.rank) * self._there.block_bytes
        blocks: list[Tensor | None] = [None] * self._config.num_ranks
        for rank in self._group.live():
            blocks[rank], _ = self._there.open(rank, offset)
        return offset, blocks

    def _send_back(self, source: int, handle: Handle, records: slice, y_SH: Tensor) -> None:
        """Send what the experts made of the records of the rank `source`."""
        place = self._place(handle.epoch, self._group.rank)
        offset = self._regions.combine_rows.offset + place * self._back.block_bytes
        block, out_SH = self._back.open(source, offset)
        row_of_nK = handle.received.row_of_NK[records]
        if self._config.pre_reduce:
            count = len(row_of_nK)
            weights_nK = handle.received.weights_NK[records]
            self._kernels.weighted_sums(y_SH, row_of_nK, weights_nK, out_SH[:count])
        else:
            count = self._kernels.collect(y_SH, row_of_nK, out_SH)
        word = self._regions.combine_words.word(place)
        num_bytes = count * self._back_format.num_bytes
        self._outbox.send(source, offset, block, num_bytes, word, handle.epoch, count)

    def _expected(self, words: Region, epoch: int) -> list[Expected]:
        return [
            Expected(rank, words.word(self._place(epoch, rank)), rank)
            for rank in range(self._config.num_ranks)
        ]
