"""Placements and loads of experts in files.

A placement is a JSON object in the form of the published function: `phy2log` `[L][P]` the expert in
each slot (-1: none), `log2phy` `[L][E][C]` the slots of each expert padded with -1, `logcnt`
`[L][E]`; here also `num_ranks`. Loads are a trace (`ep_comm/eplb/trace.py`) or JSON: `[L][E]`, or
an object that has them as `weight` or `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whalepod.ep_comm.eplb.placement import count_replicas, live_ranks
from whalepod.ep_comm.eplb.policy import Ints, Loads
from whalepod.ep_comm.eplb.trace import TraceError, read_header, read_trace


class Placement(NamedTuple):
    """slots_LP  `[L, P]` the expert in each slot; slots of one rank are neighbours."""

    slots_LP: Ints
    num_ranks: int

    @property
    def is_alive_D(self) -> NDArray[np.bool_]:
        """Return `[D]`: which ranks hold anything; the others are lost."""
        return live_ranks(self.slots_LP, self.num_ranks)


def read_loads(path: Path, window: int) -> tuple[Loads, int]:
    """Return loads `[L, E]`, of a trace those of the last `window` records, and the groups.

    Raises ValueError for what holds no loads.
    """
    try:
        header = read_header(path)
    except TraceError as error:
        raw = _read_json(path, error)
        if isinstance(raw, dict):
            raw = raw.get("weight", raw.get("tokens"))
        return _matrix(raw, f"{path}: weight or tokens"), 1
    records = [record.loads_LE for record in read_trace(path)]
    if not records:
        raise ValueError(f"{path} holds no record")
    return np.sum(records[-window:], axis=0), header.num_groups


def read_placement(path: Path, num_ranks: int) -> Placement:
    """Read a placement; `num_ranks` 0: the file says. Raises ValueError."""
    raw = _read_json(path, None)
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object with phy2log, got {type(raw).__name__}")
    return placement_of(raw, num_ranks, str(path))


def placement_of(raw: Mapping[str, Any], num_ranks: int, where: str) -> Placement:
    """Check what a file or a server says of a placement. Raises ValueError."""
    slots_LP = _matrix(raw.get("phy2log", raw.get("slots")), f"{where}: phy2log").astype(np.int64)
    num_ranks = num_ranks or int(raw.get("num_ranks", 0))
    if num_ranks < 1 or slots_LP.shape[1] % num_ranks:
        raise ValueError(
            f"{where}: {slots_LP.shape[1]} slots cannot be divided among {num_ranks} ranks: "
            "give --num-ranks"
        )
    return Placement(slots_LP, num_ranks)


def as_json(placement: Placement, num_experts: int) -> dict[str, Any]:
    """Return a placement as files hold it."""
    slots_LP = placement.slots_LP
    count_LE = count_replicas(slots_LP, num_experts)
    slots_of = np.full((*count_LE.shape, int(count_LE.max(initial=1))), -1)
    replica_LE = np.zeros_like(count_LE)
    for layer, slot in np.argwhere(slots_LP >= 0).tolist():
        expert = slots_LP[layer, slot]
        slots_of[layer, expert, replica_LE[layer, expert]] = slot
        replica_LE[layer, expert] += 1
    return {
        "num_ranks": placement.num_ranks,
        "phy2log": slots_LP.tolist(),
        "log2phy": slots_of.tolist(),
        "logcnt": count_LE.tolist(),
    }


def check_fit(placement: Placement, load_LE: Loads) -> None:
    """Raise ValueError unless the loads are those of the placed experts."""
    layers, experts = load_LE.shape
    most = int(placement.slots_LP.max(initial=-1))
    if len(placement.slots_LP) != layers or most >= experts:
        raise ValueError(
            f"the placement has {len(placement.slots_LP)} layers and experts up to {most}, the "
            f"loads have {layers} layers of {experts} experts"
        )


def _read_json(path: Path, cause: Exception | None) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is neither JSON nor a trace of loads") from cause or error


def _matrix(raw: Any, what: str) -> Loads:
    try:
        found: Loads = np.asarray(raw)
    except ValueError:
        found = np.zeros(0)
    if found.ndim != 2 or not found.size or found.dtype.kind not in "iuf":
        raise ValueError(f"{what} must be a list of layers, each a list of equally many numbers")
    return found
