"""Dispatch and combine: tokens travel to the ranks of their experts, and results come back.

The contract is DeepEP's, of both its modes; `ExchangeConfig.layout` says which rows the experts get
and where sums are made. What differs: signals carry the call's number instead of being zeroed, one
signal per pair of ranks instead of one per expert, a token travels once per destination rank, and
the order of rows is fixed (source rank, token, k).

Places in the heap come in two sets, used in turn. A result is live from its dispatch until its
combine has received, and no rank may have more live results than there are sets of places: so it
sends call n + 2 only after its combine of call n has heard from all others. A call of more tokens
than there are places for goes in chunks: a rank sends chunk c + 2 only when it has chunk c + 1 of
all ranks, which each of them sent after it had read chunk c.

Suffix letters as in `whalepod.ep_comm.layout`, M most tokens of a rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.all_gather import AllGather, GatherRegions
from whalepod.ep_comm.by_expert import ByExpert
from whalepod.ep_comm.compiled_phases import CompiledPhases
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Dispatched, Handle
from whalepod.ep_comm.group import CallStatus, Group, merge
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import RowKernels, SendRows
from whalepod.ep_comm.slots import NUM_SETS, SendBuffer, TransferId
from whalepod.ep_comm.transport_phases import COMBINE, DISPATCH, TransportPhases

_FORWARD_GRACE = 0.25
"""With several nodes, the last wait of a chunk is this part of the timeout longer."""


class LiveResultError(RuntimeError):
    """A dispatch came while its places still hold a result that was not combined."""


@dataclass(frozen=True, slots=True)
class DispatchInFlight:
    """Rows are on their way; `receive` is DeepEP's receive hook."""

    _exchange: ExpertExchange
    _handle: Handle

    def receive(self, timeout_ms: float) -> Dispatched:
        """Wait for all ranks' rows and lay them out; each further chunk has `timeout_ms`, too."""
        return self._exchange.receive_dispatch(self._handle, timeout_ms)


@dataclass(frozen=True, slots=True)
class CombineInFlight:
    """The experts' results are on their way back."""

    _exchange: ExpertExchange
    _handle: Handle
    _y: Tensor

    def receive(self, timeout_ms: float) -> tuple[Tensor, CallStatus]:
        """Wait for all results and add up: `[T, H]`, in the dtype of the dispatched tokens.

        By expert y[t] = sum_k weights[t, k] * row, in k order; per token the ranks' sums in order.
        Sums run in f32.
        """
        return self._exchange.receive_combine(self._y, self._handle, timeout_ms)


class ExpertExchange:
    """One rank's end.

    row_kernels    how rows are copied and summed; default: compiled for the CPU, and by expert each
                   phase is one compiled call where the transport's heaps are mapped
    poison_unused  fill outputs with NaN first, so that a reader of garbage shows (for tests)
    """

    def __init__(
        self,
        group: Group,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        *,
        row_kernels: RowKernels | None = None,
        poison_unused: bool = False,
    ) -> None:
        assert group.num_ranks == config.num_ranks, (group.num_ranks, config.num_ranks)
        self.group = group
        self.config = config
        self.send_buffer = SendBuffer(group, regions.staging)
        self.last_call = 0
        """Calls are numbered from 1, alike on all ranks."""
        self._live: dict[int, Handle] = {}
        self._in_dispatch: TransferId | None = None
        """The chunk whose rows are not all sent, or not all forwarded."""
        self._max_live = NUM_SETS if config.max_chunks == 1 else 1
        self._chunk_bits = config.max_chunks.bit_length() if config.max_chunks > 1 else 0
        self._kernels = row_kernels or CompiledRows()
        self._counts: AllGather | None = None
        if regions.counts is not None:
            gather = GatherRegions(slots=regions.counts, staging=regions.staging)
            self._counts = AllGather(group, gather, "dispatch, counts")
        self._phases = TransportPhases(
            group, config, regions, self.send_buffer, self._kernels, poison_unused=poison_unused
        )
        self._compiled: CompiledPhases | None = None
        """The quick way, as long as all ranks are there; the other one finds out who is not."""
        mapped, store = group.transport.mapped, self._phases.store
        if row_kernels is None and mapped is not None and isinstance(store, ByExpert):
            self._compiled = CompiledPhases(
                group, config, regions, mapped, self.send_buffer, store.buffers
            )

    # -- dispatch ------------------------------------------------------------------------------

    def dispatch(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, timeout_ms: float
    ) -> Dispatched:
        """Send and receive in one go. The time runs from the call, so that of two ranks which
        wait for each other the first to be late is the first to say so."""
        deadline_ms = self.group.deadline(timeout_ms)
        flight = self.send_dispatch(x_TH, ids_TK, weights_TK)
        return flight.receive(deadline_ms - self.group.transport.now_ms())

    def send_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> DispatchInFlight:
        """Send each token once to every rank (or other node) that owns one of its experts.

        x_TH        [T, H] f32 or bf16, T <= M, also 0
        ids_TK      [T, K] int64 global expert ids, -1: none
        weights_TK  [T, K] f32

        Raises ValueError for bad input (nothing is sent then; call `abort` if the step ends), and
        LiveResultError for one live result too many.
        """
        self._check_input(x_TH, ids_TK, weights_TK)
        call = self._next_call()
        first = TransferId(call, 0, self._chunk_bits)
        handle = Handle(
            call=call, in_combine=first, ids_TK=ids_TK, weights_TK=weights_TK, dtype=x_TH.dtype
        )
        if self._compiled is not None and not self.group.suspects:
            if not self._compiled.send_dispatch(handle, x_TH):
                layout.check_choices(ids_TK, self.config.num_experts, self.config.top_k)
            self._begin(handle)
            return DispatchInFlight(self, handle)
        config = self.config
        handle.is_in_TR = self._kernels.destinations(ids_TK, config.num_experts, config.num_ranks)
        self._begin(handle)
        self._in_dispatch = first
        handle.rows = self._encode(x_TH, ids_TK, weights_TK)
        if self._counts is not None:
            num_tokens = torch.tensor([len(ids_TK)])
            self._counts.post(torch.cat([num_tokens, handle.is_in_TR.sum(dim=0)]))
        self._phases.send(first, handle)
        if self.config.max_chunks == 1 and not self._phases.forwards:
            self._in_dispatch = None
        return DispatchInFlight(self, handle)

    def receive_dispatch(self, handle: Handle, timeout_ms: float) -> Dispatched:
        """Do the second half of a dispatch; called through `DispatchInFlight`."""
        deadline_ms, transfer = self.group.deadline(timeout_ms), handle.in_combine
        store, status = self._phases.store, self._nothing_wrong(DISPATCH, transfer)
        store.begin(handle)
        if self._compiled is not None and not self.group.suspects:
            handle.is_compiled = self._compiled.receive_dispatch(handle, deadline_ms)
            if handle.is_compiled:
                handle.num_received = 1
                return store.finish(handle, status)
        if self._counts is not None:
            status = self._collect_counts(self._counts, handle, deadline_ms)
            deadline_ms = self.group.deadline(timeout_ms)
        grace_ms = _FORWARD_GRACE * timeout_ms
        while transfer.chunk < handle.num_chunks and not status.must_stop:
            if transfer.chunk:
                deadline_ms, self._in_dispatch = self.group.deadline(timeout_ms), transfer
                self._phases.send(transfer, handle)
            arrived = self._phases.receive(transfer, handle, deadline_ms, grace_ms)
            status, transfer = merge(status, arrived), transfer.next()
        handle.rows = self._in_dispatch = None
        return store.finish(handle, status)

    # -- combine -------------------------------------------------------------------------------

    def combine(self, y: Tensor, handle: Handle, timeout_ms: float) -> tuple[Tensor, CallStatus]:
        """Send and receive in one go; the time runs from the call."""
        deadline_ms = self.group.deadline(timeout_ms)
        compiled = self._compiled_for(handle)
        if compiled is None:
            flight = self.send_combine(y, handle)
            return flight.receive(deadline_ms - self.group.transport.now_ms())
        self._check_live(handle)
        if compiled.combine(self._rows(y), handle, deadline_ms):
            return self._end(handle, self._nothing_wrong(COMBINE, handle.in_combine))
        return self._receive_chunks(y, handle, deadline_ms, timeout_ms)

    def send_combine(self, y: Tensor, handle: Handle) -> CombineInFlight:
        """Send what the experts made of their rows (laid out as the dispatched ones) back.

        y  f32 or bf16; per token it is the weighted sum over this rank's experts
        """
        self._check_live(handle)
        compiled, y = self._compiled_for(handle), self._rows(y)
        if compiled is not None:
            compiled.send_combine(y, handle)
        else:
            self._phases.send_back(handle.in_combine, handle, y)
        return CombineInFlight(self, handle, y)

    def receive_combine(
        self, y: Tensor, handle: Handle, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Do the second half of a combine; called through `CombineInFlight`."""
        deadline_ms, compiled = self.group.deadline(timeout_ms), self._compiled_for(handle)
        if compiled is not None and compiled.receive_combine(handle, deadline_ms):
            return self._end(handle, self._nothing_wrong(COMBINE, handle.in_combine))
        return self._receive_chunks(y, handle, deadline_ms, timeout_ms)

    def _receive_chunks(
        self, y: Tensor, handle: Handle, deadline_ms: float, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        transfer, grace_ms = handle.in_combine, _FORWARD_GRACE * timeout_ms
        status = self._nothing_wrong(COMBINE, transfer)
        while transfer.chunk < handle.num_chunks and not status.must_stop:
            if transfer.chunk:
                deadline_ms, handle.in_combine = self.group.deadline(timeout_ms), transfer
                self._phases.send_back(transfer, handle, y)
            arrived = self._phases.collect(transfer, handle, deadline_ms, grace_ms)
            status, transfer = merge(status, arrived), transfer.next()
        return self._end(handle, status)

    def _end(self, handle: Handle, status: CallStatus) -> tuple[Tensor, CallStatus]:
        assert handle.sums_TH is not None
        self._live.pop(handle.call, None)
        return handle.sums_TH.to(handle.dtype), status

    # -- giving up -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Take part in the next call only by giving it up, and so with all live results and a
        dispatch that has begun: others that wait for this rank's chunk, or the one after, hear of
        it at once.

        Call `resume` on all ranks before the next dispatch.
        """
        self.last_call += 1
        following = TransferId(self.last_call, 0, self._chunk_bits)
        if self._counts is not None:
            self._counts.abort()
        if self._in_dispatch is not None:
            self._phases.give_up_dispatch(self._in_dispatch)
            self._phases.give_up_dispatch(self._in_dispatch.next())
        self._phases.give_up_dispatch(following)
        for handle in self._live.values():
            self._phases.give_up_combine(handle.in_combine)
            self._phases.give_up_combine(handle.in_combine.next())
        self._phases.give_up_combine(following)
        self._forget()

    def resume(self, call: int) -> None:
        """Number the next dispatch `call`, on all ranks, after they synchronised.

        `call` must be above all numbers used so far; brings ranks that failed at different places
        of a step together again. Live results are forgotten.
        """
        if call <= self.last_call:
            raise ValueError(f"call {call} must be above {self.last_call}, which was used")
        if self._counts is not None:
            self._counts.resume(call)
        self._forget()
        self.last_call = call - 1
        self.group.culprit = None

    # -- inside --------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._live.clear()
        self._in_dispatch = None

    def _nothing_wrong(self, operation: str, transfer: TransferId) -> CallStatus:
        return CallStatus(operation=operation, epoch=transfer.epoch)

    def _compiled_for(self, handle: Handle) -> CompiledPhases | None:
        """Return the compiled phases if they made this result and no rank is suspect."""
        return self._compiled if handle.is_compiled and not self.group.suspects else None

    def _check_live(self, handle: Handle) -> None:
        if handle.call not in self._live:
            raise LiveResultError(f"the result of call {handle.call} was combined or given up")
        if handle.num_received < handle.num_chunks:
            raise ValueError("the dispatch of this result did not end well: abort the step")

    def _rows(self, y: Tensor) -> Tensor:
        return y.view(-1, self.config.hidden)

    def _next_call(self) -> int:
        call = self.last_call + 1
        blocking = call - self._max_live
        if blocking in self._live:
            raise LiveResultError(
                f"dispatch {call} would be live result {self._max_live + 1}: combine that of "
                f"call {blocking} first (there are places for {self._max_live})"
            )
        return call

    def _begin(self, handle: Handle) -> None:
        self.last_call = handle.call
        self._live[handle.call] = handle

    def _collect_counts(self, gather: AllGather, handle: Handle, deadline_ms: float) -> CallStatus:
        """Find out how many rows come from each rank, and in how many chunks."""
        records, status = gather.collect(torch.int64, deadline_ms)
        ranks, rank = range(self.config.num_ranks), self.group.rank
        handle.count_R = [int(records[r][1 + rank]) if r in records else 0 for r in ranks]
        most_tokens = max((int(found[0]) for found in records.values()), default=0)
        # an odd number, so that sets alternate from call to call
        handle.num_chunks = -(-most_tokens // self.config.max_records) | 1
        return status

    def _encode(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> SendRows:
        values_TH, scales_TG = x_TH, None
        if self.config.dispatch_dtype == "float8":
            values_TH, scales_TG = self._kernels.quantize(x_TH)
        weights = None if self.config.is_by_expert else weights_TK
        return SendRows(values_TH=values_TH, scales_TG=scales_TG, ids_TK=ids_TK, weights_TK=weights)

    def _check_input(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        config = self.config
        layout.check_choice_shape(ids_TK, config.top_k)
        num_tokens = len(ids_TK)
        if x_TH.shape != (num_tokens, config.hidden) or weights_TK.shape != ids_TK.shape:
            raise ValueError(
                f"rows must be [T, {config.hidden}] and weights [T, {config.top_k}] with "
                f"T = {num_tokens}, the tokens of the expert ids; got {list(x_TH.shape)} and "
                f"{list(weights_TK.shape)}"
            )
        if num_tokens > config.max_tokens:
            raise ValueError(
                f"{num_tokens} tokens in one dispatch, at most {config.max_tokens} fit: raise "
                f"max_tokens to the most of any rank (decode batch x (1 + drafts)) on all ranks, "
                f"or dispatch fewer tokens in a step"
            )
