"""Placements and what they are worth; naming ranks and ordering slots so that little moves.

Suffix letters as in `policy`; D GPUs (ranks), S slots of one of them. A slot that holds nothing
(of a dead rank) is -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whalepod.ep_comm.eplb.policy import Floats, Ints, Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """How many experts have how many slots on how many ranks.

    num_groups  of experts, see `rebalance_experts`
    """

    num_experts: int
    num_physical: int
    num_ranks: int
    num_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.num_physical < self.num_experts or self.num_physical % self.num_ranks:
            raise ValueError(
                f"num_physical ({self.num_physical}) must be a multiple of num_ranks "
                f"({self.num_ranks}) and at least num_experts ({self.num_experts})"
            )
        if self.num_ranks % self.num_nodes:
            raise ValueError(
                f"num_ranks ({self.num_ranks}) must be a multiple of num_nodes ({self.num_nodes})"
            )

    @property
    def per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def is_hierarchical(self) -> bool:
        """Return whether each group of experts stays on one node."""
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0

    def first(self) -> Ints:
        """Return `[P]`: the expert in each slot at the start, in turn."""
        return np.arange(self.num_physical) % self.num_experts

    def of_rank(self, rank: int) -> slice:
        return slice(rank * self.per_rank, (rank + 1) * self.per_rank)


def count_replicas(phy2log_LP: Ints, num_experts: int) -> Ints:
    """Return `[L, E]`: in how many slots each expert lies."""
    num_layers = len(phy2log_LP)
    flat = (phy2log_LP + np.arange(num_layers)[:, None] * num_experts)[phy2log_LP >= 0]
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def slot_loads(phy2log_LP: Ints, load_LE: Loads) -> Floats:
    """Return `[L, P]`: an expert's load split among its replicas; 0 in an empty slot."""
    split_LE = load_LE / np.maximum(count_replicas(phy2log_LP, load_LE.shape[1]), 1)
    load_LP = np.take_along_axis(split_LE, np.maximum(phy2log_LP, 0), axis=1)
    return np.where(phy2log_LP >= 0, load_LP, 0.0)


def rank_loads(phy2log_LP: Ints, load_LE: Loads, num_ranks: int) -> Floats:
    """Return `[L, D]`: the load of each rank when an expert's load is split among its replicas."""
    load_LP = slot_loads(phy2log_LP, load_LE)
    loads: Floats = load_LP.reshape(len(load_LP), num_ranks, -1).sum(axis=2)
    return loads


def live_ranks(phy2log_LP: Ints, num_ranks: int) -> NDArray[np.bool_]:
    """Return `[D]`: which ranks hold anything; the others are lost."""
    held_LDS = (phy2log_LP >= 0).reshape(len(phy2log_LP), num_ranks, -1)
    return np.asarray(held_LDS.any(axis=(0, 2)))


def balancedness(phy2log_LP: Ints, load_LE: Loads, num_ranks: int) -> Floats:
    """Return `[L]`: mean over max of the ranks' loads, in 0..1; 1 where there is no load.

    Ranks whose slots are all empty do not count.
    """
    load_LD = rank_loads(phy2log_LP, load_LE, num_ranks)
    load_LD = load_LD[:, live_ranks(phy2log_LP, num_ranks)]
    most_L = load_LD.max(axis=1)
    mean_L = load_LD.mean(axis=1)
    return np.where(most_L > 0, mean_L / np.where(most_L > 0, most_L, 1.0), 1.0)


# -- what stays where it is ---------------------------------------------------------------------


def preserve_slots(old_LP: Ints, new_LP: Ints, slots: Slots, live: list[int]) -> Ints:
    """Return the new placement with ranks named and slots ordered so that little has to move.

    Whole nodes, then ranks of a node, change names to hold the most experts that they held; an
    expert that stays on a rank stays in its slot. Balance does not change by it.
    """
    num_layers, num_ranks = len(old_LP), slots.num_ranks
    old_LDS = old_LP.reshape(num_layers, num_ranks, -1)
    new_LDS = new_LP.reshape(num_layers, num_ranks, -1).copy()
    num_nodes = slots.num_nodes if len(live) == num_ranks else 1
    if num_nodes > 1:
        shape = (num_layers, num_nodes, -1)
        names_LV = _match(_overlap(old_LDS.reshape(shape), new_LDS.reshape(shape), slots))
        new_LDS = np.take_along_axis(new_LDS.reshape(shape), names_LV[:, :, None], axis=1)
        new_LDS = new_LDS.reshape(old_LDS.shape)
    per_node = num_ranks // num_nodes
    for node in range(num_nodes):
        ranks = [r for r in range(node * per_node, (node + 1) * per_node) if r in live]
        old, new = old_LDS[:, ranks], new_LDS[:, ranks]
        names_LR = _match(_overlap(old, new, slots))
        new_LDS[:, ranks] = np.take_along_axis(new, names_LR[:, :, None], axis=1)
    shape_XS = (num_layers * num_ranks, slots.per_rank)
    kept = _keep_order(old_LDS.reshape(shape_XS), new_LDS.reshape(shape_XS))
    return kept.reshape(num_layers, slots.num_physical)


def _overlap(old_LDS: Ints, new_LDS: Ints, slots: Slots) -> Ints:
    """Return `[L, D new, D old]`: how many copies of experts each pair of holders has in common."""
    num_layers, num_holders, _ = old_LDS.shape

    def held(placed_LDS: Ints) -> Ints:
        flat = placed_LDS.reshape(num_layers * num_holders, -1)
        return count_replicas(flat, slots.num_experts).reshape(num_layers, num_holders, -1)

    old_LDE, new_LDE = held(old_LDS), held(new_LDS)
    common = [np.minimum(new_LDE, old_LDE[:, d : d + 1]).sum(axis=2) for d in range(num_holders)]
    return np.stack(common, axis=2)


def _match(overlap_LDD: Ints) -> Ints:
    """Return `[L, D old]`: the new holder that takes each old one's name, largest overlap first."""
    left = overlap_LDD.copy()
    num_layers, num_holders, _ = left.shape
    names = np.empty((num_layers, num_holders), np.int64)
    layers_L = np.arange(num_layers)
    for _ in range(num_holders):
        new_L, old_L = np.divmod(left.reshape(num_layers, -1).argmax(axis=1), num_holders)
        names[layers_L, old_L] = new_L
        left[layers_L, new_L] = left[layers_L, :, old_L] = -1
    return names


def _keep_order(old_XS: Ints, new_XS: Ints) -> Ints:
    """Order each row of `new_XS` so that what is in `old_XS`, too, has its place there."""
    out_XS = np.full(new_XS.shape, -1)
    is_placed_XS = np.zeros(new_XS.shape, bool)
    is_free_XS = np.ones(new_XS.shape, bool)
    for slot, old_X in enumerate(old_XS.T):
        same_XS = (new_XS == old_X[:, None]) & ~is_placed_XS & (old_X >= 0)[:, None]
        rows_x = same_XS.any(axis=1).nonzero()[0]
        places_x = same_XS.argmax(axis=1)[rows_x]
        is_placed_XS[rows_x, places_x], is_free_XS[rows_x, slot] = True, False
        out_XS[rows_x, slot] = new_XS[rows_x, places_x]
    # the k-th expert that comes goes to the k-th free slot, in each row
    out_XS[is_free_XS] = new_XS[~is_placed_XS]
    return out_XS
