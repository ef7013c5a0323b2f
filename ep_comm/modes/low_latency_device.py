"""The low-latency mode on a GPU: the same heap and protocol, with kernels for both phases.

Nothing here waits for the host: slots come from the choices, counts stay on the device, shapes are
static. A rank may use it while others use `LowLatency`.

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
from whalepod.ep_comm.heap import ALIGNMENT_BYTES, Region
from whalepod.ep_comm.modes.low_latency_config import (
    NUM_SETS,
    LowLatencyConfig,
    LowLatencyRegions,
)
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


class DeviceLowLatency:
    """One rank's end, with bf16 or f32 rows, a block of rows per expert, weights at combine.

    heap         this rank's symmetric heap, on its GPU
    max_polls    looks at a signal before a rank counts as late
    extern_libs  the NVSHMEM bitcode by name (`find_bitcode`); empty under the interpreter
    """

    def __init__(
        self,
        rank: int,
        config: LowLatencyConfig,
        regions: LowLatencyRegions,
        heap: Tensor,
        *,
        max_polls: int,
        extern_libs: Mapping[str, str],
    ) -> None:
        if config.dispatch_dtype != config.combine_dtype or config.pre_reduce:
            raise ValueError(
                f"the device mode sends rows both ways in one dtype and sums at the token's rank; "
                f"got dispatch {config.dispatch_dtype}, combine {config.combine_dtype}, "
                f"pre_reduce {config.pre_reduce}"
            )
        if config.output != "per_expert":
            raise ValueError(f"the device mode has output per_expert, not {config.output}")
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
        stride = _align(config.max_tokens * there.num_bytes)
        if num_tokens:
            ep.dispatch_pack[(num_tokens, config.num_ranks)](
                x_TH, ids_TK, slots_TR, self._heap_i32, self._heap_values,
                self._regions.staging.offset, stride, config.num_choices, config.hidden,
                RECORD=there.num_bytes, AT_IDS=there.offsets.ids, AT_VALUES=there.offsets.values,
                ITEM=self._item, BLOCK_K=triton.next_power_of_2(config.num_choices),
                BLOCK_H=self._block_h,
            )  # fmt: skip
        rows = self._offset(self._regions.dispatch_rows, self._rank, config.max_tokens)
        word = self._word(self._regions.dispatch_words, self._rank)
        self._send(counted.num_tokens_per_rank_R, stride, rows, word, there.num_bytes)

    def receive_dispatch(self, ids_TK: Tensor) -> DeviceResult:
        """Wait for all ranks, then lay their rows out by expert."""
        config, there = self._config, self._config.dispatch_format
        ranks, most, device = config.num_ranks, config.max_tokens, ids_TK.device
        found_R = self._wait(self._regions.dispatch_words, device)
        count_ER = torch.empty(config.num_local, ranks, dtype=torch.int32, device=device)
        rows = self._offset(self._regions.dispatch_rows, 0, most)
        first, choices = self._rank * config.num_local, config.num_choices
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
        most = config.combine_rows
        stride = _align(most * back.num_bytes)
        selections = config.max_tokens * config.num_choices
        ep.combine_pack[(selections, config.num_ranks)](
            y_ESH, result.row_of_RMK, self._heap_values, self._regions.staging.offset, stride,
            config.hidden, RECORD=back.num_bytes, ITEM=self._item,
            BLOCK_S=triton.next_power_of_2(selections), BLOCK_H=self._block_h,
        )  # fmt: skip
        rows = self._offset(self._regions.combine_rows, self._rank, most)
        word = self._word(self._regions.combine_words, self._rank)
        counts_R = (result.row_of_RMK >= 0).flatten(1).sum(dim=1)
        self._send(counts_R, stride, rows, word, back.num_bytes)

    def receive_combine(self, result: DeviceResult, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for all owners and add up; returns y `[T, H]` and the signals `[R]`."""
        config, ids_TK = self._config, result.ids_TK
        back = config.combine_format
        found_R = self._wait(self._regions.combine_words, ids_TK.device)
        y_TH = torch.empty(len(ids_TK), config.hidden, dtype=back.torch_dtype, device=ids_TK.device)
        if len(ids_TK):
            ep.combine_sum[(len(ids_TK), triton.cdiv(config.hidden, self._block_h))](
                y_TH, ids_TK, weights_TK, found_R, self._heap_values,
                self._offset(self._regions.combine_rows, 0, config.combine_rows),
                config.combine_rows * back.num_bytes, self._epoch, config.num_local,
                config.num_choices, config.hidden, RECORD=back.num_bytes, ITEM=self._item,
                BLOCK_S=triton.next_power_of_2(ids_TK.numel()), BLOCK_H=self._block_h,
            )  # fmt: skip
        return y_TH, found_R

    def _send(self, counts_R: Tensor, stride: int, rows: int, word: int, record_bytes: int) -> None:
        """Put what was packed for each rank, and its signal behind it."""
        ep.put[(_PARTS, self._config.num_ranks)](
            counts_R, self._address, self._regions.staging.offset, stride, rows,
            RECORD=record_bytes, **self._options,
        )  # fmt: skip
        ep.signal[(self._config.num_ranks,)](
            counts_R, self._address, word, self._epoch, **self._options
        )

    def _wait(self, words: Region, device: torch.device) -> Tensor:
        found_R = torch.empty(self._config.num_ranks, dtype=torch.int64, device=device)
        ep.wait[(self._config.num_ranks,)](
            found_R, self._address, self._word(words, 0), self._epoch, self._max_polls,
            **self._options,
        )  # fmt: skip
        return found_R

    def _place(self, rank: int) -> int:
        return (self._epoch % NUM_SETS) * self._config.num_ranks + rank

    def _word(self, words: Region, rank: int) -> int:
        return words.word(self._place(rank))

    def _offset(self, region: Region, rank: int, num_records: int) -> int:
        """Return where a rank's block of this call begins in the heap."""
        record_bytes = region.num_bytes // (NUM_SETS * self._config.num_ranks * num_records)
        return region.offset + self._place(rank) * num_records * record_bytes


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
