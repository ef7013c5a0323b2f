"""Which experts get replicas, and on which GPU each lies: DeepSeek's published EPLB, vectorised.

Pure functions of numpy arrays; all layers are computed at once. Loads are estimates in any unit.
Suffix letters: L layers, E experts, P physical experts (slots), C replicas of an expert, X rows.
Ties are broken as published: heavier first and of equals the lower index; the lowest of the
lightest packs; the first of the experts with the most load per replica.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Loads: TypeAlias = NDArray[np.int64] | NDArray[np.float64]


class Placement(NamedTuple):
    """Where experts lie, as the published function returns it.

    phy2log_LP   [L, P] int64 the expert in each slot; slots of one GPU are neighbours
    log2phy_LEC  [L, E, most replicas] int64 the slots of each expert, -1: no more
    logcnt_LE    [L, E] int64 replicas of each expert
    """

    phy2log_LP: Ints
    log2phy_LEC: Ints
    logcnt_LE: Ints


def rebalance_experts(
    weight: Loads, num_physical: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Placement:
    """Place `num_physical` copies of the experts on the GPUs, each with equally many.

    weight      [L, E] load of each expert
    num_groups  groups of experts; where they divide over the nodes, each group and its replicas
                stay on one node (hierarchical), else nodes are not looked at (global)

    Raises ValueError for numbers that do not divide.
    """
    weight_LE = np.asarray(weight, dtype=np.float64)
    num_layers, num_experts = weight_LE.shape
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    _check(num_experts, num_physical, num_groups, num_nodes, num_gpus)
    node_first_LE, place_LE = _spread_over_nodes(weight_LE, num_groups, num_nodes)

    # all nodes of all layers at once: X = L * nodes, experts by their place in the node
    per_node = num_physical // num_nodes
    sorted_XE = np.take_along_axis(weight_LE, node_first_LE, 1).reshape(
        num_layers * num_nodes, num_experts // num_nodes
    )
    expert_XP, replica_XP, count_XE = _replicate(sorted_XE, per_node)
    rows_X = np.arange(len(sorted_XE))[:, None]
    load_XP = (sorted_XE / count_XE)[rows_X, expert_XP]
    gpu_XP, rank_XP = balanced_packing(load_XP, num_gpus // num_nodes)
    slot_XP = gpu_XP * (num_physical // num_gpus) + rank_XP

    first_X = (np.arange(len(sorted_XE)) % num_nodes)[:, None]
    by_slot_XP, replica_by_slot_XP = np.empty_like(expert_XP), np.empty_like(expert_XP)
    np.put_along_axis(by_slot_XP, slot_XP, expert_XP + first_X * (num_experts // num_nodes), axis=1)
    np.put_along_axis(replica_by_slot_XP, slot_XP, replica_XP, axis=1)
    phy2log_LP = np.take_along_axis(
        node_first_LE, by_slot_XP.reshape(num_layers, num_physical), axis=1
    )
    logcnt_LE = np.take_along_axis(count_XE.reshape(num_layers, num_experts), place_LE, axis=1)
    log2phy_LEC = np.full((num_layers, num_experts, int(logcnt_LE.max(initial=1))), -1)
    layers_L = np.arange(num_layers)[:, None]
    replica_LP = replica_by_slot_XP.reshape(num_layers, num_physical)
    log2phy_LEC[layers_L, phy2log_LP, replica_LP] = np.arange(num_physical)
    return Placement(phy2log_LP, log2phy_LEC, logcnt_LE)


def balanced_packing(weight_XN: Floats, num_packs: int) -> tuple[Ints, Ints]:
    """Pack the items of each row so that packs weigh alike, with equally many in each.

    Returns the pack of each item and its place in the pack, both `[X, N]`.
    """
    num_rows, num_items = weight_XN.shape
    capacity = num_items // num_packs
    if capacity == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros(weight_XN.shape, np.int64)
    order_XN = np.argsort(-weight_XN, axis=1, kind="stable")
    pack_XN, place_XN = np.empty_like(order_XN), np.empty_like(order_XN)
    load_XM = np.zeros((num_rows, num_packs))
    count_XM = np.zeros((num_rows, num_packs), np.int64)
    rows_X = np.arange(num_rows)
    for item_X in order_XN.T:
        pack_X = np.where(count_XM < capacity, load_XM, np.inf).argmin(axis=1)
        pack_XN[rows_X, item_X], place_XN[rows_X, item_X] = pack_X, count_XM[rows_X, pack_X]
        load_XM[rows_X, pack_X] += weight_XN[rows_X, item_X]
        count_XM[rows_X, pack_X] += 1
    return pack_XN, place_XN


def _replicate(weight_XE: Floats, num_physical: int) -> tuple[Ints, Ints, Ints]:
    """Give each spare slot to the expert with the most load per replica.

    Returns the expert and the number of the replica of each copy `[X, P]`, and counts `[X, E]`.
    """
    num_rows, num_experts = weight_XE.shape
    expert_XP = np.tile(np.arange(num_physical), (num_rows, 1))
    replica_XP = np.zeros_like(expert_XP)
    count_XE = np.ones(weight_XE.shape, np.int64)
    rows_X = np.arange(num_rows)
    for slot in range(num_experts, num_physical):
        heaviest_X = (weight_XE / count_XE).argmax(axis=1)
        expert_XP[:, slot] = heaviest_X
        replica_XP[:, slot] = count_XE[rows_X, heaviest_X]
        count_XE[rows_X, heaviest_X] += 1
    return expert_XP, replica_XP, count_XE


def _spread_over_nodes(weight_LE: Floats, num_groups: int, num_nodes: int) -> tuple[Ints, Ints]:
    """Pack groups on nodes; returns experts in order of nodes and each one's place in that order.

    The order is node, then place of the group in the node, then expert of the group.
    """
    num_layers, num_experts = weight_LE.shape
    size = num_experts // num_groups
    group_weight_LG = weight_LE.reshape(num_layers, num_groups, size).sum(axis=2)
    node_LG, rank_LG = balanced_packing(group_weight_LG, num_nodes)
    first_LG = (node_LG * (num_groups // num_nodes) + rank_LG) * size
    place_LE = (first_LG[:, :, None] + np.arange(size)).reshape(num_layers, num_experts)
    order_LE = np.empty_like(place_LE)
    np.put_along_axis(order_LE, place_LE, np.arange(num_experts)[None], axis=1)
    return order_LE, place_LE


def _check(
    num_experts: int, num_physical: int, num_groups: int, num_nodes: int, num_gpus: int
) -> None:
    for many, name, few, other in (
        (num_experts, "num_experts", num_groups, "num_groups"),
        (num_gpus, "num_gpus", num_nodes, "num_nodes"),
        (num_physical, "num_physical", num_gpus, "num_gpus"),
    ):
        if few < 1 or many % few:
            raise ValueError(f"{name} ({many}) must be a multiple of {other} ({few})")
    if num_physical < num_experts:
        raise ValueError(
            f"num_physical ({num_physical}) must be at least num_experts ({num_experts}): every "
            "expert needs a slot"
        )
