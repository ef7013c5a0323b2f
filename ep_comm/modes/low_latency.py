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
from whalepod.ep_comm.group import CallStatus, Group, signal_value
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
    Received,
)
from whalepod.ep_comm.modes.low_latency_plain import COMBINE, DISPATCH, PlainPhases
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import RowKernels
from whalepod.ep_comm.rows import Outbox


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
        self._poison_unused = poison_unused
        self.outbox = Outbox(group, regions.staging)
        self._epoch = 0
        self._live: set[int] = set()
        self._half_sent: int | None = None
        """The call whose dispatch has raised, or may raise, before all ranks were sent to."""
        self._outputs = [LowLatencyOutput(config) for _ in range(NUM_SETS)]
        self._plain = PlainPhases(
            group, config, regions, self.outbox, self._outputs, row_kernels or CompiledRows()
        )
        mapped = group.transport.mapped
        self._mapped: MappedPhases | None = None
        """The quick way, as long as all ranks are there; the plain one finds out who is not."""
        if row_kernels is None and mapped is not None:
            self._mapped = MappedPhases(group, config, regions, mapped, self.outbox, self._outputs)

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
        if self._mapped is not None and not self.group.suspects:
            epoch = self._next_epoch()
            if not self._mapped.send_dispatch(epoch, x_TH, ids_TK, weights_TK):
                layout.check_choices(ids_TK, self.config.num_experts, self.config.num_choices)
            self._epoch = epoch
            self._live.add(epoch)
        else:
            is_in_TR = self._plain.destinations(ids_TK)
            epoch = self._epoch = self._half_sent = self._next_epoch()
            self._live.add(epoch)
            self._plain.send_dispatch(epoch, x_TH, ids_TK, weights_TK, is_in_TR)
            self._half_sent = None
        return DispatchInFlight(self, epoch, ids_TK, x_TH.dtype)

    def receive_dispatch(
        self, epoch: int, ids_TK: Tensor, dtype: torch.dtype, deadline_ms: float
    ) -> Dispatched:
        """Do the second half of a dispatch; called through `DispatchInFlight`."""
        output = self._outputs[epoch % NUM_SETS]
        if self._poison_unused:
            output.poison()
        rows: Received | None = None
        if self._mapped is not None and not self.group.suspects:
            rows = self._mapped.receive_dispatch(epoch, deadline_ms)
        status = CallStatus(operation=DISPATCH, epoch=epoch)
        if rows is None:
            rows, status = self._plain.receive_dispatch(epoch, deadline_ms)
        return Dispatched(
            rows=output.rows,
            scales=output.scales,
            count_E=rows.count_E,
            first_row_E=rows.first_row_E,
            source_info=output.source_info,
            expert_S=rows.expert_S,
            ranges_ER=rows.ranges_ER,
            status=status,
            handle=Handle(epoch=epoch, ids_TK=ids_TK, dtype=dtype, received=rows),
        )

    # -- combine -------------------------------------------------------------------------------

    def combine(
        self, y: Tensor, handle: Handle, weights_TK: Tensor, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Send and receive in one go; the time runs from the call."""
        deadline_ms = self.group.deadline(timeout_ms)
        mapped = self._mapped_for(handle)
        if mapped is None:
            self.send_combine(y, handle)
            return self._end_combine(None, handle, weights_TK, deadline_ms)
        self._check_live(handle)
        y_TH = mapped.combine(self._rows(y), handle, weights_TK, deadline_ms)
        return self._end_combine(y_TH, handle, weights_TK, deadline_ms)

    def send_combine(self, y: Tensor, handle: Handle) -> CombineInFlight:
        """Send the experts' rows (laid out as the dispatched ones) back to the tokens' ranks."""
        self._check_live(handle)
        way = self._mapped_for(handle) or self._plain
        way.send_combine(self._rows(y), handle)
        return CombineInFlight(self, handle)

    def receive_combine(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Do the second half of a combine; called through `CombineInFlight`."""
        mapped, y_TH = self._mapped_for(handle), None
        if mapped is not None:
            y_TH = mapped.receive_combine(handle, weights_TK, deadline_ms)
        return self._end_combine(y_TH, handle, weights_TK, deadline_ms)

    def _end_combine(
        self, y_TH: Tensor | None, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """y_TH: the sums, if they are there already."""
        status = CallStatus(operation=COMBINE, epoch=handle.epoch)
        if y_TH is None:
            y_TH, status = self._plain.receive_combine(handle, weights_TK, deadline_ms)
        self._live.discard(handle.epoch)
        return y_TH, status

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

    def _mapped_for(self, handle: Handle) -> MappedPhases | None:
        """Return them if they know what was dispatched, and all ranks are to be waited for."""
        is_known = isinstance(handle.received, MappedRows) and not self.group.suspects
        return self._mapped if is_known else None

    def _check_live(self, handle: Handle) -> None:
        if handle.epoch not in self._live:
            raise LiveResultError(f"the result of epoch {handle.epoch} was combined or given up")

    def _rows(self, y: Tensor) -> Tensor:
        return y.view(-1, self.config.hidden)

    def _next_epoch(self) -> int:
        epoch = self._epoch + 1
        blocking = epoch - NUM_SETS
        if blocking in self._live:
            raise LiveResultError(
                f"dispatch {epoch} would be a third live result: combine the one of "
                f"epoch {blocking} first (there are {NUM_SETS} sets of buffers)"
            )
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

    def _signal_abort(self, words: Region, epoch: int) -> None:
        word = words.word(epoch % NUM_SETS * self.config.num_ranks + self.group.rank)
        value = signal_value(epoch, self.group.abort_count())
        for rank in self.group.hearers():
            self.group.transport.signal_op(word, value, rank)
