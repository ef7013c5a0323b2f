"""An exchange by expert on a GPU: the same heap and protocol, with kernels for both phases.

Nothing here waits for the host: slots come from the choices, counts stay on the device, shapes are
static. A rank may use it while others use `ExpertExchange`.

Suffix letters as in `whalepod.ep_comm.layout`, M most tokens of a rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.heap import ALIGNMENT_BYTES, align
from whalepod.ep_comm.slots import RecvSlots, TransferId
from whalepod.kernels.triton import ep

_MAX_BLOCK_H = 1024
_PARTS = 4
"""Programs that put the records of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResult:
    """What a dispatch gives: rows past an expert's count are garbage.

    rows_ESH     [E_l, R * M, H], S: R * M rows
    info_ES      [E_l, R * M] int32 token on the source
    count_ER     [E_l, R] int32 rows by source
    row_of_RMK   [R, M, K] int64 row of each selection in all rows, -1: none
    found_R      [R] int64 the signals: a rank that is late or gave up has another epoch or an abort
    """

    epoch: int
    ids_TK: Tensor
    rows_ESH: Tensor
    info_ES: Tensor
    count_ER: Tensor
    row_of_RMK: Tensor
    found_R: Tensor


class DeviceExchange:
    """One rank's end, with bf16 or f32 rows, a block of rows per expert, weights at combine.

    heap         this rank's symmetric heap, on its GPU
    max_polls    looks at a signal before a rank counts as late
    extern_libs  the NVSHMEM bitcode by name (`find_bitcode`); empty under the interpreter
    """

    def __init__(
        self,
        rank: int,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        heap: Tensor,
        *,
        max_polls: int,
        extern_libs: Mapping[str, str],
    ) -> None:
        if config.dispatch_dtype != config.combine_dtype or config.layout != "per_expert":
            raise ValueError(
                f"the device exchange has layout per_expert and sends rows both ways in one dtype; "
                f"got layout {config.layout}, dispatch {config.dispatch_dtype}, combine "
                f"{config.combine_dtype}"
            )
        self._rank = rank
        self._config = config
        self._regions = regions
        self._heap_i32 = heap.view(torch.int32)
        self._heap_values = heap.view(config.dispatch_format.torch_dtype)
        self._address = heap.data_ptr()
        self._max_polls = max_polls
        self._options: dict[str, Any] = {"extern_libs": dict(extern_libs)} if extern_libs else {}
        self._item = self._heap_values.element_size()
        self._block_h = min(triton.next_power_of_2(config.hidden), _MAX_BLOCK_H)
        self._epoch = 0

    def send_dispatch(self, x_TH: Tensor, ids_TK: Tensor) -> None:
        """Send each token once to every rank that owns one of its experts."""
        config, num_tokens = self._config, len(x_TH)
        if num_tokens > config.max_tokens:
            raise ValueError(f"{num_tokens} tokens, at most {config.max_tokens} fit")
        self._epoch += 1
        counted = layout.dispatch_layout(ids_TK, config.num_experts, config.num_ranks)
        slots_TR = layout.slots(counted.is_token_in_rank_TR)
        there = config.dispatch_format
        stride = align(config.max_tokens * there.num_bytes, ALIGNMENT_BYTES)
        if num_tokens:
            ep.dispatch_pack[(num_tokens, config.num_ranks)](
                x_TH, ids_TK, slots_TR, self._heap_i32, self._heap_values,
                self._regions.staging.offset, stride, config.top_k, config.hidden,
                RECORD=there.num_bytes, AT_IDS=there.offsets.ids, AT_VALUES=there.offsets.values,
                ITEM=self._item, BLOCK_K=triton.next_power_of_2(config.top_k),
                BLOCK_H=self._block_h,
            )  # fmt: skip
        self._send(counted.num_tokens_per_rank_R, stride, self._regions.rows)

    def receive_dispatch(self, ids_TK: Tensor) -> DeviceResult:
        """Wait for all ranks, then lay their rows out by expert."""
        config, there = self._config, self._config.dispatch_format
        ranks, most, device = config.num_ranks, config.max_tokens, ids_TK.device
        found_R = self._wait(self._regions.rows, device)
        count_ER = torch.empty(config.num_local, ranks, dtype=torch.int32, device=device)
        rows = self._regions.rows.offset(TransferId(self._epoch), 0)
        first, choices = self._rank * config.num_local, config.top_k
        blocks = {
            "BLOCK_M": triton.next_power_of_2(most),
            "BLOCK_K": triton.next_power_of_2(choices),
        }
        ep.count_rows[(config.num_local, ranks)](
            count_ER, found_R, self._heap_i32, rows, self._epoch, first, choices, most,
            RECORD=there.num_bytes, AT_IDS=there.offsets.ids, **blocks,
        )  # fmt: skip
        shape = (config.num_local, ranks * most)
        rows_ESH = torch.empty(*shape, config.hidden, dtype=there.torch_dtype, device=device)
        info_ES = torch.empty(shape, dtype=torch.int32, device=device)
        row_of_RMK = torch.empty(ranks, most, choices, dtype=torch.int64, device=device)
        ep.spread[(ranks, most)](
            rows_ESH, info_ES, row_of_RMK, count_ER, found_R, self._heap_i32, self._heap_values,
            rows, self._epoch, first, config.num_local, choices, config.hidden,
            RECORD=there.num_bytes, AT_IDS=there.offsets.ids, AT_VALUES=there.offsets.values,
            ITEM=self._item, BLOCK_R=triton.next_power_of_2(ranks), BLOCK_H=self._block_h,
            **blocks,
        )  # fmt: skip
        return DeviceResult(
            epoch=self._epoch,
            ids_TK=ids_TK,
            rows_ESH=rows_ESH,
            info_ES=info_ES,
            count_ER=count_ER,
            row_of_RMK=row_of_RMK,
            found_R=found_R,
        )

    def send_combine(self, y_ESH: Tensor, result: DeviceResult) -> None:
        """Send the experts' rows, laid out as the dispatched ones, back to the tokens' ranks."""
        config, back = self._config, self._config.combine_format
        stride = align(config.max_returned * back.num_bytes, ALIGNMENT_BYTES)
        selections = config.max_tokens * config.top_k
        ep.combine_pack[(selections, config.num_ranks)](
            y_ESH, result.row_of_RMK, self._heap_values, self._regions.staging.offset, stride,
            config.hidden, RECORD=back.num_bytes, ITEM=self._item,
            BLOCK_S=triton.next_power_of_2(selections), BLOCK_H=self._block_h,
        )  # fmt: skip
        counts_R = (result.row_of_RMK >= 0).flatten(1).sum(dim=1)
        self._send(counts_R, stride, self._regions.returned)

    def receive_combine(self, result: DeviceResult, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for all owners and add up; returns y `[T, H]` and the signals `[R]`."""
        config, ids_TK = self._config, result.ids_TK
        back = config.combine_format
        found_R = self._wait(self._regions.returned, ids_TK.device)
        y_TH = torch.empty(len(ids_TK), config.hidden, dtype=back.torch_dtype, device=ids_TK.device)
        if len(ids_TK):
            ep.combine_sum[(len(ids_TK), triton.cdiv(config.hidden, self._block_h))](
                y_TH, ids_TK, weights_TK, found_R, self._heap_values,
                self._regions.returned.offset(TransferId(self._epoch), 0),
                config.max_returned * back.num_bytes, self._epoch, config.num_local,
                config.top_k, config.hidden, RECORD=back.num_bytes, ITEM=self._item,
                BLOCK_S=triton.next_power_of_2(ids_TK.numel()), BLOCK_H=self._block_h,
            )  # fmt: skip
        return y_TH, found_R

    def _send(self, counts_R: Tensor, stride: int, slots: RecvSlots) -> None:
        """Put what was packed for each rank, and its signal after it."""
        transfer = TransferId(self._epoch)
        ep.put[(_PARTS, self._config.num_ranks)](
            counts_R, self._address, self._regions.staging.offset, stride,
            slots.offset(transfer, self._rank), RECORD=slots.record_bytes, **self._options,
        )  # fmt: skip
        signal = slots.signal(transfer, self._rank)
        ep.signal[(self._config.num_ranks,)](
            counts_R, self._address, signal, self._epoch, **self._options
        )

    def _wait(self, slots: RecvSlots, device: torch.device) -> Tensor:
        found_R = torch.empty(self._config.num_ranks, dtype=torch.int64, device=device)
        first = slots.signal(TransferId(self._epoch), 0)
        ep.wait[(self._config.num_ranks,)](
            found_R, self._address, first, self._epoch, self._max_polls, **self._options
        )
        return found_R
