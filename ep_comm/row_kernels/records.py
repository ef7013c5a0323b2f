"""What compiled code must know of an exchange, as records of int64 that it takes by address.

A record is an array of one element, and its maker keeps it alive.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from whalepod.ep_comm.row_kernels.interface import SpreadRows
from whalepod.ep_comm.row_kernels.memory import kind_of, pointer
from whalepod.ep_comm.rows import RowFormat

Record = NDArray[np.void]


def _dtype(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


FORMAT = _dtype(
    "num_bytes", "hidden", "kind", "value_bytes", "num_ids", "num_weights", "num_scales",
    "at_ids", "at_weights", "at_values", "at_scales",
)  # fmt: skip
"""A `RowFormat`: sizes, and where the parts of a record begin."""

SPREAD = _dtype(
    "counts_R", "num_rows", "row_of_NK", "count_E", "first_row_E", "ranges_ER", "expert_S",
    "rows_SH", "info_S", "scales_SG",
)  # fmt: skip
"""The addresses of a `SpreadRows`; `expert_S` may be 0."""

PLAN = _dtype(
    "rank", "num_ranks", "num_local", "max_tokens", "max_returned", "rows_per_expert",
    "heaps_R", "sent_bytes_R", "waited_ms_R",
    "dispatch_format", "dispatch_signals", "dispatch_rows",
    "combine_format", "combine_signals", "combine_rows",
)  # fmt: skip
"""What stays the same from call to call: sizes, addresses of three arrays over ranks (heaps in this
process: int64, bytes sent: int64, ms waited: f64) and of two `FORMAT`s, and offsets in the heap."""


@njit
def format_at(address):
    return carray(pointer(address), 1, FORMAT)[0]


@njit
def spread_at(address):
    return carray(pointer(address), 1, SPREAD)[0]


@njit
def plan_at(address):
    return carray(pointer(address), 1, PLAN)[0]


def make_record(dtype: np.dtype[np.void], **values: int) -> Record:
    """Return a record; all fields are given."""
    assert dtype.names is not None
    assert set(values) == set(dtype.names), set(values) ^ set(dtype.names)
    made = np.zeros(1, dtype=dtype)
    for name, value in values.items():
        made[0][name] = value
    return made


@cache
def format_record(row_format: RowFormat) -> Record:
    at = row_format.offsets
    return make_record(
        FORMAT,
        num_bytes=at.end,
        hidden=row_format.hidden,
        kind=kind_of(row_format.torch_dtype),
        value_bytes=row_format.hidden * row_format.torch_dtype.itemsize,
        num_ids=row_format.num_ids,
        num_weights=row_format.num_weights,
        num_scales=row_format.num_scales,
        at_ids=at.ids,
        at_weights=at.weights,
        at_values=at.values,
        at_scales=at.scales,
    )


def spread_record(out: SpreadRows) -> Record:
    return make_record(
        SPREAD,
        counts_R=out.count_R.data_ptr(),
        num_rows=out.num_rows.data_ptr(),
        row_of_NK=out.row_of_NK.data_ptr(),
        count_E=out.count_E.data_ptr(),
        first_row_E=out.first_row_E.data_ptr(),
        ranges_ER=out.ranges_ER.data_ptr(),
        expert_S=0 if out.expert_S is None else out.expert_S.data_ptr(),
        rows_SH=out.rows_SH.data_ptr(),
        info_S=out.info_S.data_ptr(),
        scales_SG=out.scales_SG.data_ptr(),
    )
