"""What a low-latency dispatch gives to the experts of a rank, and the tensors it fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whalepod.ep_comm.group import CallStatus
from whalepod.ep_comm.modes.low_latency_config import LowLatencyConfig
from whalepod.ep_comm.row_kernels.interface import ExpertOutput

_BYTES_PER_WORD = 4
"""Exponent bytes in one int32 of UE8M0 scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What the experts of this rank work on. Rows past an expert's count are garbage.

    rows          `[E_l, R * M, H]`, or `[rows, H]` if packed; of the dispatch dtype
    scales        f32 `[E_l, R * M, H / 128]` (UE8M0: int32 `[E_l, R * M, H / 512]`), None without
                  fp8; packed: without the first axis
    count_E       `[E_l]` int32
    first_row_E   `[E_l]` int64, an expert's first row if `rows` had no expert axis
    source_info   int32 token index on the source, of each row
    expert_S      `[rows in use]` int64 local expert of each row, if packed; else None
    ranges_ER     `[E_l, R]` int64, (begin << 32) | count of each source's rows of an expert
    """

    rows: Tensor
    scales: Tensor | None
    count_E: Tensor
    first_row_E: Tensor
    source_info: Tensor
    expert_S: Tensor | None
    ranges_ER: Tensor
    status: CallStatus
    handle: Handle


class Received(Protocol):
    """What came from whom, and where it went."""

    @property
    def counts(self) -> Mapping[int, int]:
        """Source rank -> records."""
        ...

    @property
    def row_of_NK(self) -> Tensor:
        """`[N, K]` int64 output row of each selection of the records, -1: another rank's."""
        ...

    @property
    def weights_NK(self) -> Tensor:
        """`[N, K]` f32; `[N, 0]` if records have none."""
        ...

    @property
    def count_E(self) -> Tensor:
        """As in `Dispatched`, like all that follow."""
        ...

    @property
    def first_row_E(self) -> Tensor: ...

    @property
    def expert_S(self) -> Tensor | None: ...

    @property
    def ranges_ER(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRows:
    """`Received` as it is."""

    counts: Mapping[int, int]
    row_of_NK: Tensor
    weights_NK: Tensor
    count_E: Tensor
    first_row_E: Tensor
    expert_S: Tensor | None
    ranges_ER: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """What combine must know of a dispatch: its own choices, and what came from whom."""

    epoch: int
    ids_TK: Tensor
    dtype: torch.dtype
    received: Received


class LowLatencyOutput:
    """One set of outputs, allocated once: rows, their source tokens, their scales."""

    def __init__(self, config: LowLatencyConfig) -> None:
        num_rows, row_format = config.num_output_rows, config.dispatch_format
        num_blocks = config.num_local if config.output == "per_expert" else 1
        self.places = ExpertOutput(
            rows_SH=torch.empty(num_rows, config.hidden, dtype=row_format.torch_dtype),
            info_S=torch.empty(num_rows, dtype=torch.int32),
            scales_BSG=_empty_scales(config, num_blocks, num_rows // num_blocks),
        )
        is_split = config.output == "per_expert"
        shape = (num_blocks, -1) if is_split else (-1,)
        self.rows = self.places.rows_SH.view(*shape, config.hidden)
        self.source_info = self.places.info_S.view(shape)
        self.scales: Tensor | None = None
        if row_format.num_scales:
            self.scales = self.places.scales_BSG if is_split else self.places.scales_BSG[0]

    def poison(self) -> None:
        """Fill everything with 0xFF: NaN in every float type, and no valid index."""
        self.places.rows_SH.view(torch.uint8).fill_(0xFF)
        self.places.info_S.fill_(-1)
        self.places.scales_BSG.view(torch.int32).fill_(-1)


def _empty_scales(config: LowLatencyConfig, num_blocks: int, num_rows: int) -> Tensor:
    """Return `[blocks, rows, columns]`, its storage along rows if `column_major`."""
    num_columns = config.dispatch_format.num_scales
    dtype = torch.float32
    if config.ue8m0:
        num_columns, dtype = num_columns // _BYTES_PER_WORD, torch.int32
    if config.column_major:
        return torch.empty(num_blocks, num_columns, num_rows, dtype=dtype).transpose(1, 2)
    return torch.empty(num_blocks, num_rows, num_columns, dtype=dtype)
