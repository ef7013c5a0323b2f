"""The low-latency mode where compiled code reaches all heaps: one call for each phase.

A call that finds all ranks there does everything; one that does not changes nothing, and the plain
way of `LowLatency` over the transport finds out why, with the same signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.ep_comm.group import WATCH_MS, Group, signal_value
from whalepod.ep_comm.heap import Region
from whalepod.ep_comm.modes.low_latency_config import (
    NUM_SETS,
    LowLatencyConfig,
    LowLatencyRegions,
)
from whalepod.ep_comm.modes.low_latency_output import Handle, LowLatencyOutput
from whalepod.ep_comm.row_kernels import phases
from whalepod.ep_comm.row_kernels.compiled import kind_of
from whalepod.ep_comm.rows import Outbox
from whalepod.ep_comm.transport.interface import MappedMemory


class MappedRows:
    """What a dispatch has received, in one set of buffers: overwritten by the next but one."""

    def __init__(self, config: LowLatencyConfig, output: LowLatencyOutput) -> None:
        most, num_local = config.num_ranks * config.max_tokens, config.num_local
        num_weights = config.dispatch_format.num_weights
        self._counts_R = np.zeros(config.num_ranks, dtype=np.int64)
        self._num_rows = np.zeros(1, dtype=np.int64)
        self.count_E = torch.zeros(num_local, dtype=torch.int32)
        self.first_row_E = torch.zeros(num_local, dtype=torch.int64)
        self.ranges_ER = torch.zeros(num_local, config.num_ranks, dtype=torch.int64)
        self._row_of_NK = torch.zeros(most, config.num_choices, dtype=torch.int64)
        self._weights_NW = torch.zeros(most, num_weights)
        self._expert_S: Tensor | None = None
        if config.output == "packed":
            self._expert_S = torch.zeros(config.num_output_rows, dtype=torch.int64)
        places = output.places
        block, row, column = (4 * stride for stride in places.scales_BSG.stride())
        self.part = record(
            phases.PART,
            counts_R=self._counts_R.ctypes.data,
            num_rows=self._num_rows.ctypes.data,
            row_of_NK=self._row_of_NK.data_ptr(),
            weights_NW=self._weights_NW.data_ptr(),
            count_E=self.count_E.data_ptr(),
            first_row_E=self.first_row_E.data_ptr(),
            ranges_ER=self.ranges_ER.data_ptr(),
            expert_S=0 if self._expert_S is None else self._expert_S.data_ptr(),
            rows=places.rows_SH.data_ptr(),
            info=places.info_S.data_ptr(),
            scales=places.scales_BSG.data_ptr(),
            scale_block_stride=block,
            scale_row_stride=row,
            scale_column_stride=column,
            num_scale_columns=places.scales_BSG.shape[2],
            rows_per_block=places.scales_BSG.shape[1],
        )

    @property
    def counts(self) -> Mapping[int, int]:
        return dict(enumerate(self._counts_R.tolist()))

    @property
    def row_of_NK(self) -> Tensor:
        return self._row_of_NK[: self._counts_R.sum()]

    @property
    def weights_NK(self) -> Tensor:
        return self._weights_NW[: self._counts_R.sum()]

    @property
    def expert_S(self) -> Tensor | None:
        if self._expert_S is None:
            return None
        return self._expert_S[: self._num_rows.item()]


class MappedPhases:
    """One rank's compiled phases. Its methods return False, or None, where the plain way is to go
    on: a rank is missing or gave the call up."""

    def __init__(
        self,
        group: Group,
        config: LowLatencyConfig,
        regions: LowLatencyRegions,
        memory: MappedMemory,
        outbox: Outbox,
        outputs: list[LowLatencyOutput],
    ) -> None:
        self._group = group
        self._config = config
        self._regions = regions
        self._can_wait = memory.can_wait
        self.sets = [MappedRows(config, output) for output in outputs]
        # addresses are only good while these live
        self._kept = (
            memory,
            outbox,
            [group.transport.peer_view(r) for r in range(config.num_ranks)],
        )
        there, back = config.dispatch_format, config.combine_format
        self._plan = record(
            phases.PLAN,
            rank=group.rank,
            num_ranks=config.num_ranks,
            num_local=config.num_local,
            num_choices=config.num_choices,
            hidden=config.hidden,
            max_tokens=config.max_tokens,
            max_rows=config.combine_rows,
            rows_per_expert=config.rows_per_expert,
            is_reduced=config.pre_reduce,
            heaps_R=memory.heaps_R.ctypes.data,
            sent_bytes_R=outbox.sent_bytes_R.data_ptr(),
            waited_ms_R=group.wait_ms_R.data_ptr(),
            there_words=regions.dispatch_words.offset,
            there_rows=regions.dispatch_rows.offset,
            there_kind=kind_of(there.torch_dtype),
            there_bytes=there.num_bytes,
            at_ids=there.offsets.ids,
            at_weights=there.offsets.weights,
            at_values=there.offsets.values,
            at_scales=there.offsets.scales,
            num_weights=there.num_weights,
            num_scales=there.num_scales,
            rounds_scale=config.round_scale,
            has_exponents=config.ue8m0,
            back_words=regions.combine_words.offset,
            back_rows=regions.combine_rows.offset,
            back_kind=kind_of(back.torch_dtype),
            back_bytes=back.num_bytes,
            at_back_values=back.offsets.values,
        )

    def send_dispatch(
        self, epoch: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor | None
    ) -> bool:
        """Send; False: nothing was sent, an id is out of range or comes twice."""
        x_TH, ids_TK = x_TH.contiguous(), ids_TK.contiguous()
        weights = 0
        if weights_TK is not None:
            weights_TK = weights_TK.to(torch.float32).contiguous()
            weights = weights_TK.data_ptr()
        is_sent: bool = phases.send_dispatch(
            self._plan, epoch, len(x_TH), x_TH.data_ptr(), kind_of(x_TH.dtype), ids_TK.data_ptr(),
            weights,
        )  # fmt: skip
        return is_sent

    def receive_dispatch(self, epoch: int, deadline_ms: float) -> MappedRows | None:
        rows = self.sets[epoch % NUM_SETS]

        def attempt(until_ns: int) -> int:
            found: int = phases.receive_dispatch(self._plan, rows.part, epoch, until_ns)
            return found

        is_here = self._complete(attempt, self._regions.dispatch_words, epoch, deadline_ms)
        return rows if is_here else None

    def send_combine(self, y_SH: Tensor, handle: Handle) -> None:
        phases.send_combine(self._plan, self._part(handle), handle.epoch, *_rows(y_SH))

    def receive_combine(
        self, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> Tensor | None:
        return self._combine(None, handle, weights_TK, deadline_ms)

    def combine(
        self, y_SH: Tensor, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> Tensor | None:
        """Send and receive in one call; what was sent is sent, whatever comes back."""
        if self._can_wait:
            return self._combine(y_SH, handle, weights_TK, deadline_ms)
        self.send_combine(y_SH, handle)
        return self._combine(None, handle, weights_TK, deadline_ms)

    def _part(self, handle: Handle) -> NDArray[np.void]:
        return self.sets[handle.epoch % NUM_SETS].part

    def _combine(
        self, y_SH: Tensor | None, handle: Handle, weights_TK: Tensor, deadline_ms: float
    ) -> Tensor | None:
        """y_SH: what is still to be sent."""
        epoch, dtype = handle.epoch, handle.dtype
        ids_TK, weights_TK = handle.ids_TK.contiguous(), weights_TK.float().contiguous()
        sum_TH = torch.empty(len(ids_TK), self._config.hidden, dtype=dtype)
        sums = (
            ids_TK.data_ptr(), weights_TK.data_ptr(), len(ids_TK), sum_TH.data_ptr(),
            kind_of(dtype),
        )  # fmt: skip
        unsent = None if y_SH is None else (self._part(handle), *_rows(y_SH))

        def attempt(until_ns: int) -> int:
            nonlocal unsent
            found: int
            if unsent is None:
                found = phases.receive_combine(self._plan, epoch, until_ns, *sums)
            else:
                part, *rows = unsent
                found = phases.combine(self._plan, part, epoch, *rows, until_ns, *sums)
                unsent = None
            return found

        is_here = self._complete(attempt, self._regions.combine_words, epoch, deadline_ms)
        return sum_TH if is_here else None

    def _complete(
        self, attempt: Callable[[int], int], words: Region, epoch: int, deadline_ms: float
    ) -> bool:
        """Wait until an attempt finds all ranks there; False: one is late, gone or gave up."""
        group = self._group
        if not self._can_wait and not self._let_others_run(words, epoch, deadline_ms):
            return False
        while True:
            until_ms = min(deadline_ms, group.transport.now_ms() + WATCH_MS)
            found = attempt(int(1e6 * until_ms))
            if found <= phases.ALL_HERE:
                return found == phases.ALL_HERE
            if until_ms >= deadline_ms or group.is_gone(found - 1):
                return False

    def _let_others_run(self, words: Region, epoch: int, deadline_ms: float) -> bool:
        """Wait by the transport, where compiled code cannot."""
        group, now_ms = self._group, self._group.transport.now_ms
        for rank in range(group.num_ranks):
            start_ms = now_ms()
            word = words.word(epoch % NUM_SETS * group.num_ranks + rank)
            found = group.wait(word, signal_value(epoch, 0), rank, deadline_ms)
            group.wait_ms_R[rank] += now_ms() - start_ms
            if not found.arrived:
                return False
        return True


def record(dtype: np.dtype[np.void], **values: int) -> NDArray[np.void]:
    """Return an array of one record; all fields are given."""
    assert dtype.names is not None
    assert set(values) == set(dtype.names), set(values) ^ set(dtype.names)
    made = np.zeros(1, dtype=dtype)
    for name, value in values.items():
        made[0][name] = value
    return made


def _rows(y_SH: Tensor) -> tuple[int, int, int]:
    """Return address, stride in bytes and kind of rows with contiguous elements."""
    assert y_SH.stride(-1) == 1 or not y_SH.numel(), y_SH.stride()
    return y_SH.data_ptr(), y_SH.stride(0) * y_SH.element_size(), kind_of(y_SH.dtype)
