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
from whalepod.ep_comm.modes.low_latency_mapped import MappedPhases, MappedRows
from whalepod.ep_comm.modes.low_latency_output import (
    Dispatched,
    Handle,
    LowLatencyOutput,
    ReceivedRows,
)
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import Experts, RowKernels, TokenRows
from whalepod.ep_comm.rows import Outbox, RecordBlocks, exponent_bytes

_DISPATCH, _COMBINE = "low-latency dispatch", "low-latency combine"


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

    row_kernels    how rows are copied and summed; default: compiled for the CPU, and each phase is
                   one compiled call where the transport's heaps are mapped
    poison_unused  fill outputs with NaN first, so that a reader of garbage shows (for tests)
    """

    def __init__(
        self,
        group: Group,
        config: LowLatencyConfig,
        regions: LowLatencyRegions,
        *,
        row_kernels: RowKernels | None = None,
        poison_unused: bool = False,
    ) -> None:
        assert group.num_ranks == config.num_ranks, (group.num_ranks, config.num_ranks)
        self.group = group
        self.config = config
        self._regions = regions
        self._kernels = row_kernels or CompiledRows()
        self._poison_unused = poison_unused
        self.outbox = Outbox(group, regions.staging)
        self._epoch = 0
        self._live: set[int] = set()
        self._half_sent: int | None = None
        """The call whose dispatch has raised, or may raise, before all ranks were sent to."""
        heap, ranks = group.transport.heap, config.num_ranks
        self._dispatch_format, self._combine_format = config.dispatch_format, config.combine_format
        self._received = regions.dispatch_rows.view(heap).view(
            NUM_SETS, ranks, config.max_tokens, self._dispatch_format.num_bytes
        )
        returned = regions.combine_rows.view(heap).view(
            NUM_SETS, ranks, config.combine_rows, self._combine_format.num_bytes
        )
        self._returned_values = self._combine_format.views(returned).values_H
        self._there = RecordBlocks(
            self.outbox, group.transport, self._dispatch_format, config.max_tokens
        )
        self._back = RecordBlocks(
            self.outbox, group.transport, self._combine_format, config.combine_rows
        )
        self._dispatch_bytes = self._dispatch_format.num_bytes
        self._combine_bytes = self._combine_format.num_bytes
        self._outputs = [LowLatencyOutput(config) for _ in range(NUM_SETS)]
        mapped = group.transport.mapped
        self._phases: MappedPhases | None = None
        if row_kernels is None and mapped is not None:
            self._phases = MappedPhases(group, config, regions, mapped, self.outbox, self._outputs)
        self._experts = Experts(
            first=group.rank * config.num_local,
            num_local=config.num_local,
            num_ranks=ranks,
            rows_per_expert=config.rows_per_expert,
        )

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
        config = self.config
        if self._phases is not None and not self.group.suspects:
            return self._send_mapped(self._phases, x_TH, ids_TK, weights_TK)
        is_in_TR = self._kernels.destinations(ids_TK, config.num_experts, config.num_ranks)
        epoch = self._half_sent = self._begin_epoch()
        self._live.add(epoch)
        self.outbox.begin()
        offset, blocks = self._open_dispatch(epoch)
        tokens = self._encode(x_TH, ids_TK, weights_TK)
        counts = self._kernels.pack(self._dispatch_format, tokens, is_in_TR, blocks)
        word = self._regions.dispatch_words.word(self._place(epoch, self.group.rank))
        for rank, (block, count) in enumerate(zip(blocks, counts, strict=True)):
            if block is not None:
                num_bytes = count * self._dispatch_bytes
                self.outbox.send(rank, offset, block, num_bytes, word, epoch, count)
        self._half_sent = None
        return DispatchInFlight(self, epoch, ids_TK, x_TH.dtype)

    def _send_mapped(
        self, phases: MappedPhases, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None
    ) -> DispatchInFlight:
        epoch = self._begin_epoch()
        if not phases.send_dispatch(epoch, x_TH, ids_TK, weights_TK):
            self._epoch -= 1
            layout.check_choices(ids_TK, self.config.num_experts, self.config.num_choices)
        self._live.add(epoch)
        return DispatchInFlight(self, epoch, ids_TK, x_TH.dtype)

    def receive_dispatch(
        self, epoch: int, ids_TK: Tensor, dtype: torch.dtype, deadline_ms: float
    ) -> Dispatched:
        """Do the second half of a dispatch; called through `DispatchInFlight`."""
        output = self._outputs[epoch % NUM_SETS]
        if self._poison_unused:
            output.poison()
        if self._phases is not None and not self.group.suspects:
            rows = self._phases.receive_dispatch(epoch, deadline_ms)
            if rows is not None:
                return self._dispatched(epoch, ids_TK, dtype, rows)
        arrivals = Arrivals(self.group, _DISPATCH, epoch)
        counts = arrivals.wait(self._expected(self._regions.dispatch_words, epoch), deadline_ms)
        spread = self._kernels.spread(
            self._dispatch_format,
            self._received[epoch % NUM_SETS],
            counts,
            self._experts,
            output.places,
        )
        arrivals.check_unchanged()
        return Dispatched(
            rows=output.rows,
            scales=output.scales,
            count_E=spread.count_E.to(torch.int32),
            first_row_E=spread.first_row_E,
            source_info=output.source_info,
            expert_S=self._expert_of_rows(spread.count_E),
            ranges_ER=spread.ranges_ER,
            status=arrivals.status(),
            handle=Handle(
                epoch=epoch,
                ids_TK=ids_TK,
                dtype=dtype,
                received=ReceivedRows(
                    counts=counts, row_of_NK=spread.row_of_NK, weights_NK=spread.weights_NK
                ),
            ),
        )

    def _dispatched(
        self, epoch: int, ids_TK: Tensor, dtype: torch.dtype, rows: MappedRows
    ) -> Dispatched:
        output = self._outputs[epoch % NUM_SETS]
        return Dispatched(
            rows=output.rows,
            scales=output.scales,
            count_E=rows.count_E,
            first_row_E=rows.first_row_E,
            source_info=output.source_info,
            expert_S=rows.expert_S,
            ranges_ER=rows.ranges_ER,
            status=CallStatus(operation=_DISPATCH, epoch=epoch),
            handle=Handle(epoch=epoch, ids_TK=ids_TK, dtype=dtype, received=rows),
        )

    def _expert_of_rows(self, count_E: Tensor) -> Tensor | None:
        if self.config.output != "packed":
            return None
        return torch.arange(len(count_E)).repeat_interleave(count_E)

    # -- combine -------------------------------------------------------------------------------

    def combine(
        self, y: Tensor, handle: Handle, weights_TK: Tensor, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Send and receive in one go; the time runs from the call."""
        deadline_ms = self.group.deadline(timeout_ms)
        phases = self._phases_for(handle)
        if phases is None:
            self.send_combine(y, handle)
            return self._receive_plain(handle, weights_TK, deadline_ms)
        self._check_live(handle)
        y_TH = phases.combine(self._rows(y), handle, weights_TK, deadline_ms)
        return self._end_combine(y_TH, handle, weights_TK, deadline_ms)

    def send_combine(self, y: Tensor, handle: Handle) -> CombineInFlight:
        """Send the experts' rows (laid out as the dispatched ones) back to the tokens' ranks."""
        self._check_live(handle)
        phases = self._phases_for(handle)
        if phases is not None:
            phases.send_combine(self._rows(y), handle)
            return CombineInFlight(self, handle)
        self.outbox.begin()
        y_SH, counts = self._rows(y), handle.received.counts
        first = 0
        for source in self.group.live():
            count = counts.get(source, 0)  # 0 also if its dispatch failed here
            self._send_back(source, handle, slice(first, first + count), y_SH)
            first += count
        return CombineInFlight(self, handle)

    def receive_combine(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Do the second half of a combine; called through `CombineInFlight`."""
        phases = self._phases_for(handle)
        y_TH = None
        if phases is not None:
            y_TH = phases.receive_combine(handle, weights_TK, deadline_ms)
        return self._end_combine(y_TH, handle, weights_TK, deadline_ms)

    def _end_combine(
        self, y_TH: Tensor | None, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """y_TH: the sums, if all rows were there."""
        if y_TH is None:
            return self._receive_plain(handle, weights_TK, deadline_ms)
        self._live.discard(handle.epoch)
        return y_TH, CallStatus(operation=_COMBINE, epoch=handle.epoch)

    def _receive_plain(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        config, epoch = self.config, handle.epoch
        arrivals = Arrivals(self.group, _COMBINE, epoch)
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
        self._live.discard(epoch)
        return y_TH, arrivals.status()

    def _phases_for(self, handle: Handle) -> MappedPhases | None:
        """Return them if they are here, know what was dispatched, and may wait for all ranks."""
        is_known = isinstance(handle.received, MappedRows) and not self.group.suspects
        return self._phases if is_known else None

    def _check_live(self, handle: Handle) -> None:
        if handle.epoch not in self._live:
            raise LiveResultError(f"the result of epoch {handle.epoch} was combined or given up")

    def _rows(self, y: Tensor) -> Tensor:
        return y.view(-1, self.config.hidden)

    # -- giving up -----------------------------------------------------------------------------

    def abandon(self, handle: Handle) -> None:
        """Give a dispatched result up without its combine: peers are told, and its set is free."""
        self._live.discard(handle.epoch)
        self._signal_abort(self._regions.combine_words, handle.epoch)

    def abort(self) -> None:
        """Take part in the next call only by giving it up, and all live results too.

        Keeps this rank in step with the others after its own step raised.
        """
        self._epoch += 1
        if self._half_sent is not None:
            self._signal_abort(self._regions.dispatch_words, self._half_sent)
        self._signal_abort(self._regions.dispatch_words, self._epoch)
        for epoch in (*sorted(self._live), self._epoch):
            self._signal_abort(self._regions.combine_words, epoch)
        self._half_sent = None
        self._live.clear()

    def resume(self, call: int) -> None:
        """Number the next dispatch `call`, on all ranks, after they synchronised.

        `call` must be above all numbers used so far; brings ranks that failed at different places
        of a step together again. Live results are forgotten.
        """
        if call <= self._epoch:
            raise ValueError(f"call {call} must be above {self._epoch}, which was used")
        self._live.clear()
        self._half_sent = None
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
        layout.check_choice_shape(ids_TK, config.num_choices)

    def _encode(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> TokenRows:
        values_TH, scales_TG = x_TH, None
        if self.config.dispatch_dtype == "float8":
            values_TH, scales_TG = self._kernels.quantize(x_TH, round_scale=self.config.round_scale)
            if self.config.ue8m0:
                scales_TG = exponent_bytes(scales_TG)
        return TokenRows(
            values_TH=values_TH, scales_TG=scales_TG, ids_TK=ids_TK, weights_TK=weights_TK
        )

    def _place(self, epoch: int, rank: int) -> int:
        """Return the index of a rank's part in the set of a call."""
        return (epoch % NUM_SETS) * self.config.num_ranks + rank

    def _open_dispatch(self, epoch: int) -> tuple[int, list[Tensor | None]]:
        """Return where this rank's records go: their offset, and a block for each live rank."""
        offset = self._regions.dispatch_rows.offset
        offset += self._place(epoch, self.group.rank) * self._there.block_bytes
        blocks: list[Tensor | None] = [None] * self.config.num_ranks
        for rank in self.group.live():
            blocks[rank], _ = self._there.open(rank, offset)
        return offset, blocks

    def _send_back(self, source: int, handle: Handle, records: slice, y_SH: Tensor) -> None:
        """Send what the experts made of the records of the rank `source`."""
        place = self._place(handle.epoch, self.group.rank)
        offset = self._regions.combine_rows.offset + place * self._back.block_bytes
        block, out_SH = self._back.open(source, offset)
        row_of_nK = handle.received.row_of_NK[records]
        if self.config.pre_reduce:
            count = len(row_of_nK)
            weights_nK = handle.received.weights_NK[records]
            self._kernels.weighted_sums(y_SH, row_of_nK, weights_nK, out_SH[:count])
        else:
            count = self._kernels.collect(y_SH, row_of_nK, out_SH)
        word = self._regions.combine_words.word(place)
        num_bytes = count * self._combine_bytes
        self.outbox.send(source, offset, block, num_bytes, word, handle.epoch, count)

    def _expected(self, words: Region, epoch: int) -> list[Expected]:
        return [
            Expected(rank, words.word(self._place(epoch, rank)), rank)
            for rank in range(self.config.num_ranks)
        ]

    def _signal_abort(self, words: Region, epoch: int) -> None:
        word = words.word(self._place(epoch, self.group.rank))
        value = signal_value(epoch, self.group.abort_count())
        for rank in self.group.hearers():
            self.group.transport.signal_op(word, value, rank)
