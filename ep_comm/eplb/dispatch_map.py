"""Which replica of an expert serves a token: one look into a table for each choice.

A table has a row per expert and a column per class of tokens; how often a slot stands in a row is
its share of the expert's tokens. So all ways to choose are one lookup, and differ in what they
write into the table. A replica's bits are those of any other: the choice changes no result.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm.eplb.config import ReplicaChoice
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.policy import Floats, Ints, Loads

NUM_COLUMNS = 64
_NUM_POURS = 8
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio: neighbours land far apart


def columns(num_tokens: int, rank: int) -> Tensor:
    """Return the column `[T, 1]` int64 of each token of a step, by its place and rank."""
    places_T = np.arange(num_tokens, dtype=np.uint64) + np.uint64(rank * 1_000_003)
    hashed_T = (places_T * np.uint64(_MULTIPLIER)) >> np.uint64(32)
    return torch.from_numpy((hashed_T % NUM_COLUMNS).astype(np.int64))[:, None]


def look_up(table_EC: Tensor, ids_TK: Tensor, columns_T1: Tensor) -> Tensor:
    """Return the slot of each choice `[T, K]`, -1 where there is none (the table's last row)."""
    return table_EC[ids_TK, columns_T1[: len(ids_TK)]]


def new_table(
    phy2log_P: Ints, load_E: Loads, slots: Slots, choice: ReplicaChoice, rank: int
) -> Tensor:
    """Return int64 `[E + 1, NUM_COLUMNS]` for the tokens of `rank`.

    An expert without a slot has -1. "nearest" takes replicas of the same rank, else of the same
    node, else one, which other ranks choose differently; "hashed" all of them in turn;
    "least-loaded" as much of each as levels the loads of the ranks, given the experts' loads.
    """
    table_EC = np.full((slots.num_experts + 1, NUM_COLUMNS), -1)
    slots_of: list[list[int]] = [[] for _ in range(slots.num_experts)]
    for slot, expert in enumerate(phy2log_P.tolist()):
        if expert >= 0:
            slots_of[expert].append(slot)
    if choice == "least-loaded":
        shares = _level(slots_of, load_E, slots)
    for expert, replicas in enumerate(slots_of):
        if not replicas:
            continue
        if choice == "least-loaded":
            table_EC[expert] = np.repeat(replicas, _in_columns(shares[expert]))
            continue
        if choice == "nearest":
            replicas = _nearest(replicas, slots, rank, expert)
        table_EC[expert] = np.resize(np.roll(replicas, -expert), NUM_COLUMNS)
    return torch.from_numpy(table_EC)


def _nearest(replicas: list[int], slots: Slots, rank: int, expert: int) -> list[int]:
    per_node = slots.per_rank * slots.ranks_per_node
    here = [slot for slot in replicas if slot // slots.per_rank == rank]
    if here:
        return here
    node = rank // slots.ranks_per_node
    near = [slot for slot in replicas if slot // per_node == node] or replicas
    return [near[(rank + expert) % len(near)]]


def _level(slots_of: list[list[int]], load_E: Loads, slots: Slots) -> list[Floats]:
    """Split each expert's load among its replicas so that ranks are as level as they can be.

    Begins with even shares; then, in turns, each expert is taken out and poured again
    ("waterfill"). That lowers the sum of squares each time, which only level ranks have least.
    """
    level_D = np.zeros(slots.num_ranks)
    shares, ranks_of = [], []
    for replicas, load in zip(slots_of, load_E.tolist(), strict=True):
        ranks_of.append(np.array(replicas, np.int64) // slots.per_rank)
        shares.append(np.full(len(replicas), load / max(len(replicas), 1)))
        np.add.at(level_D, ranks_of[-1], shares[-1])
    spread = [e for e, replicas in enumerate(slots_of) if len(replicas) > 1 and load_E[e] > 0]
    for _ in range(_NUM_POURS):
        for expert in spread:
            ranks = ranks_of[expert]
            np.subtract.at(level_D, ranks, shares[expert])
            here, place, count = np.unique(ranks, return_inverse=True, return_counts=True)
            poured = _pour(level_D[here], float(load_E[expert]))
            shares[expert] = (poured / count)[place]
            np.add.at(level_D, ranks, shares[expert])
    return [share if share.sum() > 0 else np.ones(len(share)) for share in shares]


def _pour(level_C: Floats, load: float) -> Floats:
    """Return how much of `load` each vessel takes when water finds its level."""
    order = np.argsort(level_C, kind="stable")
    sorted_C = level_C[order]
    surface_C = (np.cumsum(sorted_C) + load) / np.arange(1, len(sorted_C) + 1)
    num_wet = int((surface_C > sorted_C).sum())
    poured = np.zeros(len(level_C))
    poured[order[:num_wet]] = surface_C[num_wet - 1] - sorted_C[:num_wet]
    return poured


def _in_columns(share_C: Floats) -> Ints:
    """Round shares to whole columns that add up to all of them (largest remainder)."""
    exact_C = share_C / share_C.sum() * NUM_COLUMNS
    count_C: Ints = np.floor(exact_C).astype(np.int64)
    left = NUM_COLUMNS - int(count_C.sum())
    count_C[np.argsort(count_C - exact_C, kind="stable")[:left]] += 1
    return count_C
