"""Dispatch and combine for decode: static shapes, counts on the device, two phases per call.

The contract is that of DeepEP's low-latency mode. What differs: signals carry the call's number
instead of being zeroed, one signal per pair of ranks instead of one per expert, a token travels
once per destination rank, and the order of rows is fixed (source rank, token, k).

Buffers come in two sets, used in turn. A result is live from its dispatch until its combine has
received; a third live result is refused. That is also why no rank overwrites what another one has
not read: it sends call n + 2 only after its combine of call n has heard from all of them.

Suffix letters as in `whalepod.ep_comm.layout`, M most tokens of a rank, H hidden, G fp8 scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import Arrivals, CallStatus, Expected, Group, signal_value
from whalepod.ep_comm.heap import Region
from whalepod.ep_comm.modes.low_latency_config import (
    NUM_SETS,
    LowLatencyConfig,
    LowLatencyRegions,
)
from whalepod.ep_comm.modes.low_latency_output import Dispatched, Handle, LowLatencyOutput
from whalepod.ep_comm.rows import Outbox, exponent_bytes, gather_rows, quantize_rows, weighted_sum


class LiveResultError(RuntimeError):
    """A dispatch came while its buffers still hold a result that was not combined."""


@dataclass(frozen=True, slots=True)
class DispatchInFlight:
    """Rows are on their way; `receive` is DeepEP's receive hook."""

    _mode: LowLatency
    _epoch: int
    _ids_TK: Tensor
    _dtype: torch.dtype

    def receive(self, timeout_ms: float) -> Dispatched:
        """Wait for all ranks' rows and lay them out."""
        deadline_ms = self._mode.group.deadline(timeout_ms)
        return self._mode.receive_dispatch(self._epoch, self._ids_TK, self._dtype, deadline_ms)


@dataclass(frozen=True, slots=True)
class CombineInFlight:
    """The experts' rows are on their way back."""

    _mode: LowLatency
    _handle: Handle

    def receive(self, weights_TK: Tensor, timeout_ms: float) -> tuple[Tensor, CallStatus]:
        """Wait for all owners and add up: y[t] = sum_k weights[t, k] * row, `[T, H]`.

        The sum runs in k order in f32 and is rounded once to the dtype of the dispatched rows.
        (With `pre_reduce`: in rank order over the ranks' own sums.)
        """
        deadline_ms = self._mode.group.deadline(timeout_ms)
        return self._mode.receive_combine(self._handle, weights_TK, deadline_ms)


class LowLatency:
    """One rank's end of the mode.

    poison_unused  fill outputs with NaN first, so that a reader of garbage shows (for tests)
    """

    def __init__(
        self,
        group: Group,
        config: LowLatencyConfig,
        regions: LowLatencyRegions,
        *,
        poison_unused: bool = False,
    ) -> None:
        assert group.num_ranks == config.num_ranks, (group.num_ranks, config.num_ranks)
        self.group = group
        self.config = config
        self._regions = regions
        self._poison_unused = poison_unused
        self.outbox = Outbox(group, regions.staging)
        self._epoch = 0
        self._live: set[int] = set()
        heap, ranks = group.transport.heap, config.num_ranks
        self._dispatch_format, self._combine_format = config.dispatch_format, config.combine_format
        self._received = regions.dispatch_rows.view(heap).view(
            NUM_SETS, ranks * config.max_tokens, self._dispatch_format.num_bytes
        )
        self._returned = regions.combine_rows.view(heap).view(
            NUM_SETS, ranks * config.combine_rows, self._combine_format.num_bytes
        )
        self._outputs = [LowLatencyOutput(config) for _ in range(NUM_SETS)]
        self._owners_R = torch.arange(ranks)

    # -- dispatch ------------------------------------------------------------------------------

    def dispatch(
        self,
        x_TH: Tensor,
        ids_TK: Tensor,
        timeout_ms: float,
        weights_TK: Tensor | None = None,
    ) -> Dispatched:
        """Send and receive in one go. The time runs from the call, so that of two ranks which
        wait for each other the first to be late is the first to say so."""
        deadline_ms = self.group.deadline(timeout_ms)
        flight = self.send_dispatch(x_TH, ids_TK, weights_TK)
        return flight.receive(deadline_ms - self.group.transport.now_ms())

    def send_dispatch(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None = None
    ) -> DispatchInFlight:
        """Send each token once to every rank that owns one of its experts.

        x_TH        [T, H] f32 or bf16, T <= M, also 0
        ids_TK      [T, K] int64 global expert ids, -1: none
        weights_TK  [T, K] f32, with `pre_reduce` only

        Raises ValueError for bad input (nothing is sent then; call `abort` if the step ends), and
        LiveResultError for a third live result.
        """
        self._check_input(x_TH, ids_TK, weights_TK)
        epoch = self._begin_epoch()
        self._live.add(epoch)
        self.outbox.begin()
        values_TH, scales_TG = self._encode(x_TH)
        is_in_TR = layout.dispatch_layout(
            ids_TK, self.config.num_experts, self.config.num_ranks
        ).is_token_in_rank_TR
        for rank in self.group.live():
            tokens = is_in_TR[:, rank].nonzero().squeeze(1)
            block, offset = self._open_dispatch(rank, epoch, len(tokens))
            views = self._dispatch_format.views(block)
            views.token.copy_(tokens)
            views.ids_K.copy_(ids_TK[tokens])
            gather_rows(values_TH, tokens, views.values_H)
            if scales_TG is not None:
                views.scales_G.copy_(scales_TG[tokens])
            if weights_TK is not None:
                views.weights_K.copy_(weights_TK[tokens])
            word = self._regions.dispatch_words.word(self._place(epoch, self.group.rank))
            self.outbox.send(rank, offset, block.view(-1), word, epoch, len(tokens))
        return DispatchInFlight(self, epoch, ids_TK, x_TH.dtype)

    def receive_dispatch(
        self, epoch: int, ids_TK: Tensor, dtype: torch.dtype, deadline_ms: float
    ) -> Dispatched:
        """Do the second half of a dispatch; called through `DispatchInFlight`."""
        config = self.config
        arrivals = Arrivals(self.group, "low-latency dispatch", epoch)
        counts = arrivals.wait(self._expected(self._regions.dispatch_words, epoch), deadline_ms)
        source_N, record_N = _places(counts, config.max_tokens)
        views = self._dispatch_format.views(self._received[epoch % NUM_SETS])
        first_expert = self.group.rank * config.num_local
        ids_NK = views.ids_K.index_select(0, record_N).long()
        local_NK = layout.local_ids(ids_NK, first_expert, config.num_local)
        spread = layout.expert_rows(
            local_NK, config.num_local, rows_per_expert=config.rows_per_expert
        )
        if not config.rows_per_expert:
            assert len(spread.row_S) <= config.num_output_rows, (len(spread.row_S), config)
        output = self._outputs[epoch % NUM_SETS]
        if self._poison_unused:
            output.poison()
        output.fill(spread, views, record_N[spread.source_S])
        weights_NK = views.weights_K.index_select(0, record_N)
        arrivals.check_unchanged()
        begin_ER, count_ER = layout.source_ranges(
            local_NK, source_N, config.num_local, config.num_ranks
        )
        return Dispatched(
            rows=output.rows,
            scales=output.scales,
            count_E=spread.count_E.to(torch.int32),
            first_row_E=spread.first_row_E,
            source_info=output.source_info,
            ranges_ER=layout.pack_ranges(begin_ER, count_ER),
            status=arrivals.status(),
            handle=Handle(
                epoch=epoch,
                ids_TK=ids_TK,
                dtype=dtype,
                counts=counts,
                spread=spread,
                weights_NK=weights_NK,
            ),
        )

    # -- combine -------------------------------------------------------------------------------

    def combine(
        self, y: Tensor, handle: Handle, weights_TK: Tensor, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Send and receive in one go; the time runs from the call."""
        deadline_ms = self.group.deadline(timeout_ms)
        flight = self.send_combine(y, handle)
        return flight.receive(weights_TK, deadline_ms - self.group.transport.now_ms())

    def send_combine(self, y: Tensor, handle: Handle) -> CombineInFlight:
        """Send the experts' rows (laid out as the dispatched ones) back to the tokens' ranks."""
        if handle.epoch not in self._live:
            raise LiveResultError(f"the result of epoch {handle.epoch} was combined or given up")
        self.outbox.begin()
        y_SH = y.view(-1, self.config.hidden)
        rows_of_source = _split_by_source(handle)
        for source in self.group.live():
            if source not in rows_of_source:  # nothing came from it: its dispatch failed here
                self._send_back(source, handle.epoch, y_SH, torch.arange(0))
                continue
            rows_nK, weights_nK = rows_of_source[source]
            if self.config.pre_reduce:
                sums_nH = weighted_sum(y_SH, rows_nK, weights_nK)
                self._send_back(source, handle.epoch, sums_nH, torch.arange(len(sums_nH)))
            else:
                self._send_back(source, handle.epoch, y_SH, rows_nK[rows_nK >= 0])
        return CombineInFlight(self, handle)

    def receive_combine(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Do the second half of a combine; called through `CombineInFlight`."""
        config, epoch = self.config, handle.epoch
        arrivals = Arrivals(self.group, "low-latency combine", epoch)
        counts = arrivals.wait(self._expected(self._regions.combine_words, epoch), deadline_ms)
        rows_SH = self._combine_format.views(self._returned[epoch % NUM_SETS]).values_H
        owners_TK = layout.owner_of(handle.ids_TK, config.num_experts, config.num_ranks)
        has_answered_R = torch.isin(self._owners_R, torch.tensor(list(counts), dtype=torch.int64))
        if config.pre_reduce:
            y_TH = self._sum_over_ranks(rows_SH, owners_TK, has_answered_R)
        else:
            place_TK = layout.selection_slots(owners_TK, config.num_ranks)
            row_TK = owners_TK * config.combine_rows + place_TK
            is_here_TK = (owners_TK >= 0) & has_answered_R[owners_TK.clamp(min=0)]
            y_TH = weighted_sum(rows_SH, torch.where(is_here_TK, row_TK, -1), weights_TK)
        arrivals.check_unchanged()
        self._live.discard(epoch)
        return y_TH.to(handle.dtype), arrivals.status()

    # -- giving up -----------------------------------------------------------------------------

    def abandon(self, handle: Handle) -> None:
        """Give a dispatched result up without its combine: peers are told, and its set is free."""
        self._live.discard(handle.epoch)
        self._signal_abort(self._regions.combine_words, handle.epoch)

    def abort(self) -> None:
        """Take part in the next call only by giving it up, and all live results too.

        Keeps this rank in step with the others after its own step raised.
        """
        for epoch in sorted(self._live):
            self._signal_abort(self._regions.combine_words, epoch)
        self._live.clear()
        self._epoch += 1
        for words in (self._regions.dispatch_words, self._regions.combine_words):
            self._signal_abort(words, self._epoch)

    def resume(self, call: int) -> None:
        """Number the next dispatch `call`, on all ranks, after they synchronised.

        `call` must be above all numbers used so far; brings ranks that failed at different places
        of a step together again. Live results are forgotten.
        """
        if call <= self._epoch:
            raise ValueError(f"call {call} must be above {self._epoch}, which was used")
        self._live.clear()
        self._epoch = call - 1
        self.group.culprit = None

    # -- inside --------------------------------------------------------------------------------

    def _begin_epoch(self) -> int:
        epoch = self._epoch + 1
        blocking = epoch - NUM_SETS
        if blocking in self._live:
            raise LiveResultError(
                f"dispatch {epoch} would be a third live result: combine the one of "
                f"epoch {blocking} first (there are {NUM_SETS} sets of buffers)"
            )
        self._epoch = epoch
        return epoch

    def _check_input(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> None:
        config = self.config
        if x_TH.ndim != 2 or x_TH.shape[1] != config.hidden or len(x_TH) != len(ids_TK):
            raise ValueError(
                f"rows must be [T, {config.hidden}] with T = {len(ids_TK)}, the tokens of the "
                f"expert ids; got {list(x_TH.shape)}"
            )
        if len(x_TH) > config.max_tokens:
            raise ValueError(
                f"{len(x_TH)} tokens in one low-latency dispatch, at most {config.max_tokens} fit: "
                f"raise max_tokens to the largest decode batch x (1 + drafts) on all ranks, or use "
                f"the throughput mode for this step"
            )
        if (weights_TK is not None) != config.pre_reduce:
            raise ValueError(
                f"weights go with the dispatch if and only if pre_reduce ({config.pre_reduce})"
            )
        layout.check_choices(ids_TK, config.num_experts, config.num_choices)

    def _encode(self, x_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.config.dispatch_dtype != "float8":
            return x_TH, None
        values_TH, scales_TG = quantize_rows(x_TH, round_scale=self.config.round_scale)
        return values_TH, exponent_bytes(scales_TG) if self.config.ue8m0 else scales_TG

    def _place(self, epoch: int, rank: int) -> int:
        """Return the index of a rank's part in the set of a call."""
        return (epoch % NUM_SETS) * self.config.num_ranks + rank

    def _open_dispatch(self, rank: int, epoch: int, count: int) -> tuple[Tensor, int]:
        record_bytes = self._dispatch_format.num_bytes
        block_bytes = self.config.max_tokens * record_bytes
        offset = self._regions.dispatch_rows.offset
        offset += self._place(epoch, self.group.rank) * block_bytes
        block = self.outbox.open(rank, offset, count * record_bytes)
        return block.view(count, record_bytes), offset

    def _send_back(self, source: int, epoch: int, values_SH: Tensor, rows_s: Tensor) -> None:
        """Send rows `rows_s` of `values_SH` to the rank `source`."""
        record_bytes = self._combine_format.num_bytes
        place = self._place(epoch, self.group.rank)
        offset = self._regions.combine_rows.offset
        offset += place * self.config.combine_rows * record_bytes
        block = self.outbox.open(source, offset, len(rows_s) * record_bytes)
        records = block.view(len(rows_s), record_bytes)
        gather_rows(values_SH, rows_s, self._combine_format.views(records).values_H)
        word = self._regions.combine_words.word(place)
        self.outbox.send(source, offset, block, word, epoch, len(rows_s))

    def _expected(self, words: Region, epoch: int) -> list[Expected]:
        return [
            Expected(rank, words.word(self._place(epoch, rank)), rank)
            for rank in range(self.config.num_ranks)
        ]

    def _signal_abort(self, words: Region, epoch: int) -> None:
        word = words.word(self._place(epoch, self.group.rank))
        value = signal_value(epoch, self.group.abort_count())
        for rank in self.group.live():
            self.group.transport.signal_op(word, value, rank)

    def _sum_over_ranks(self, rows_SH: Tensor, owners_TK: Tensor, has_answered_R: Tensor) -> Tensor:
        """Add the ranks' own sums in rank order, f32 `[T, H]`."""
        y_TH = torch.zeros(len(owners_TK), self.config.hidden)
        for rank in has_answered_R.nonzero().squeeze(1).tolist():
            tokens = (owners_TK == rank).any(dim=1).nonzero().squeeze(1)
            first = rank * self.config.combine_rows
            y_TH[tokens] += rows_SH[first : first + len(tokens)].float()
        return y_TH


def _places(counts: Mapping[int, int], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the source rank and the place of all received records, by source, `[N]` each."""
    assert max(counts.values(), default=0) <= max_tokens, (counts, max_tokens)
    ranks = torch.tensor(list(counts), dtype=torch.int64)
    count_C = torch.tensor(list(counts.values()), dtype=torch.int64)
    source_N = ranks.repeat_interleave(count_C)
    first_C = count_C.cumsum(0) - count_C
    slot_N = torch.arange(len(source_N)) - first_C.repeat_interleave(count_C)
    return source_N, source_N * max_tokens + slot_N


def _split_by_source(handle: Handle) -> dict[int, tuple[Tensor, Tensor]]:
    """Return each source's output rows `[n, K]` and weights `[n, K or 0]`."""
    sizes = list(handle.counts.values())
    rows = torch.split(handle.spread.row_of_NK, sizes)
    weights = torch.split(handle.weights_NK, sizes)
    return dict(zip(handle.counts, zip(rows, weights, strict=True), strict=True))
