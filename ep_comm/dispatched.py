"""What a dispatch gives to the experts of a rank, and what its combine must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whalepod.ep_comm.group import CallStatus
from whalepod.ep_comm.row_kernels.interface import SendRows, SpreadRows, UnpackedRows
from whalepod.ep_comm.slots import TransferId


@dataclass(slots=True, kw_only=True)
class Handle:
    """One call, from its dispatch to its combine.

    is_in_TR     `[T, R]` bool: the token has an expert on that rank; None after one compiled call
    rows         what is still to be sent
    is_compiled  rows were received in one compiled call
    spread       rows by expert: the set of buffers that holds them
    unpacked     rows per token: all that came
    count_R      rows per token: how many come from each source, if that was gathered
    received     per chunk, source rank -> (first row, rows)
    forwarded    per chunk, source node -> `[n, J]` bool: which neighbour each row was passed on to
    in_combine   the chunk that is to be combined next, or is being combined; at first the first one
    sums_TH      what has come back so far
    """

    call: int
    in_combine: TransferId
    ids_TK: Tensor
    weights_TK: Tensor
    dtype: torch.dtype
    is_in_TR: Tensor | None = None
    rows: SendRows | None = None
    num_chunks: int = 1
    num_received: int = 0
    is_compiled: bool = False
    spread: SpreadRows | None = None
    unpacked: UnpackedRows | None = None
    count_R: list[int] | None = None
    received: list[Mapping[int, tuple[int, int]]] = field(default_factory=list)
    forwarded: list[Mapping[int, Tensor]] = field(default_factory=list)
    sums_TH: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanges:
    """Where the rows of each expert are.

    first_row_E  [E_l] int64 an expert's first row
    ranges_ER    [E_l, R] int64 (begin << 32) | count of each source's rows of an expert
    expert_S     [rows in use] int64 local expert of each row; None if there are unused rows between
    """

    first_row_E: Tensor
    ranges_ER: Tensor
    expert_S: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What the experts of this rank work on. Rows are ordered by source rank, then by token.

    rows        "per_expert": `[E_l, R * M, H]`, "packed": `[most rows, H]`, "per_token": `[N, H]`;
                of the dispatch dtype. Rows past an expert's count are garbage.
    scales      f32 `[..., H / 128]`, None without fp8
    info        `[...]` int32 token index on the source, of each row
    count_E     `[E_l]` rows of each expert (per_token: choices of it)
    ranges      where each expert's rows are; None if rows are per token
    ids_NK      per_token: int64 local expert ids, -1 where the choice is another rank's
    weights_NK  per_token: f32, 0 where the choice is another rank's
    """

    rows: Tensor
    scales: Tensor | None
    info: Tensor
    count_E: Tensor
    ranges: ExpertRanges | None = None
    ids_NK: Tensor | None = None
    weights_NK: Tensor | None = None
    status: CallStatus
    handle: Handle
