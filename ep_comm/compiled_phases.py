"""The phases of an exchange by expert where compiled code reaches all heaps: one call for each.

A call that finds all ranks there does everything; one that does not changes nothing, and
`TransportPhases` finds out why, with the same signals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Handle
from whalepod.ep_comm.group import WATCH_MS, Group, signal_value
from whalepod.ep_comm.row_kernels import phases
from whalepod.ep_comm.row_kernels.interface import SpreadRows
from whalepod.ep_comm.row_kernels.memory import kind_of
from whalepod.ep_comm.row_kernels.records import PLAN, format_record, make_record, spread_record
from whalepod.ep_comm.slots import NUM_SETS, RecvSlots, SendBuffer, TransferId
from whalepod.ep_comm.transport.interface import MappedMemory


class CompiledPhases:
    """One rank's phases; `memory` holds all heaps, whose views the transport keeps."""

    def __init__(
        self,
        group: Group,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        memory: MappedMemory,
        send_buffer: SendBuffer,
        buffers: Sequence[SpreadRows],
    ) -> None:
        self._group = group
        self._config = config
        self._regions = regions
        self._can_wait = memory.can_wait
        formats = format_record(config.dispatch_format), format_record(config.combine_format)
        plan = make_record(
            PLAN,
            rank=group.rank,
            num_ranks=config.num_ranks,
            num_local=config.num_local,
            max_tokens=config.max_tokens,
            max_returned=config.max_returned,
            rows_per_expert=config.rows_per_expert,
            heaps_R=memory.heaps_R.ctypes.data,
            sent_bytes_R=send_buffer.sent_bytes_R.data_ptr(),
            waited_ms_R=group.wait_ms_R.data_ptr(),
            dispatch_format=formats[0].ctypes.data,
            dispatch_signals=regions.rows.signals.offset,
            dispatch_rows=regions.rows.data.offset,
            combine_format=formats[1].ctypes.data,
            combine_signals=regions.returned.signals.offset,
            combine_rows=regions.returned.data.offset,
        )
        spreads = [spread_record(out) for out in buffers]
        self._kept = (plan, formats, spreads, memory, buffers, send_buffer)
        """What the addresses below are of, and those in it."""
        self._plan: int = plan.ctypes.data
        self._spreads: list[int] = [record.ctypes.data for record in spreads]

    def send_dispatch(self, handle: Handle, x_TH: Tensor) -> bool:
        """Send; False: nothing was sent, an id is out of range or comes twice."""
        x_TH, ids_TK = x_TH.contiguous(), handle.ids_TK.contiguous()
        is_sent: bool = phases.send_dispatch(
            self._plan, handle.call, len(x_TH), x_TH.data_ptr(), kind_of(x_TH.dtype),
            ids_TK.data_ptr(),
        )  # fmt: skip
        return is_sent

    def receive_dispatch(self, handle: Handle, deadline_ms: float) -> bool:
        """Receive; False: not all ranks are there."""
        out = self._spreads[handle.call % NUM_SETS]

        def attempt(until_ns: int) -> int:
            found: int = phases.receive_dispatch(self._plan, out, handle.call, until_ns)
            return found

        return self._complete(attempt, self._regions.rows, handle, deadline_ms)

    def send_combine(self, y_SH: Tensor, handle: Handle) -> None:
        """Send the experts' rows back."""
        out = self._spreads[handle.call % NUM_SETS]
        phases.send_combine(self._plan, out, handle.call, *_rows(y_SH))

    def receive_combine(self, handle: Handle, deadline_ms: float) -> bool:
        """Add up what comes back; False: not all ranks are there."""
        return self._combine(None, handle, deadline_ms)

    def combine(self, y_SH: Tensor, handle: Handle, deadline_ms: float) -> bool:
        """Send and receive in one call; what was sent is sent, whatever comes back."""
        if self._can_wait:
            return self._combine(y_SH, handle, deadline_ms)
        self.send_combine(y_SH, handle)
        return self._combine(None, handle, deadline_ms)

    def _combine(self, y_SH: Tensor | None, handle: Handle, deadline_ms: float) -> bool:
        """y_SH: what is still to be sent."""
        call, dtype = handle.call, handle.dtype
        ids_TK, weights_TK = handle.ids_TK.contiguous(), handle.weights_TK.float().contiguous()
        sums_TH = torch.empty(len(ids_TK), self._config.hidden, dtype=dtype)
        sums = (
            ids_TK.data_ptr(), weights_TK.data_ptr(), len(ids_TK), sums_TH.data_ptr(),
            kind_of(dtype),
        )  # fmt: skip
        unsent = None if y_SH is None else (self._spreads[call % NUM_SETS], call, *_rows(y_SH))

        def attempt(until_ns: int) -> int:
            nonlocal unsent
            found: int
            if unsent is None:
                found = phases.receive_combine(self._plan, call, until_ns, *sums)
            else:
                found = phases.combine(self._plan, *unsent, until_ns, *sums)
                unsent = None
            return found

        is_here = self._complete(attempt, self._regions.returned, handle, deadline_ms)
        if is_here:
            handle.sums_TH = sums_TH
        return is_here

    def _complete(
        self,
        attempt: Callable[[int], int],
        slots: RecvSlots,
        handle: Handle,
        deadline_ms: float,
    ) -> bool:
        """Wait until an attempt finds all ranks there; False: one is late, gone or gave up."""
        group = self._group
        if not self._can_wait and not self._let_others_run(slots, handle.call, deadline_ms):
            return False
        while True:
            until_ms = min(deadline_ms, group.transport.now_ms() + WATCH_MS)
            found = attempt(int(1e6 * until_ms))
            if found <= phases.ALL_HERE:
                return found == phases.ALL_HERE
            if until_ms >= deadline_ms or group.is_gone(found - 1):
                return False

    def _let_others_run(self, slots: RecvSlots, call: int, deadline_ms: float) -> bool:
        """Wait by the transport, where compiled code cannot."""
        group, now_ms = self._group, self._group.transport.now_ms
        transfer = TransferId(call)
        for _, signal, rank in slots.expect_all(transfer):
            start_ms = now_ms()
            found = group.wait(signal, signal_value(call, 0), rank, deadline_ms)
            group.wait_ms_R[rank] += now_ms() - start_ms
            if not found.arrived:
                return False
        return True


def _rows(y_SH: Tensor) -> tuple[int, int, int]:
    """Return address, stride in bytes and kind of rows with contiguous elements."""
    assert y_SH.stride(-1) == 1 or not y_SH.numel(), y_SH.stride()
    return y_SH.data_ptr(), y_SH.stride(0) * y_SH.element_size(), kind_of(y_SH.dtype)
