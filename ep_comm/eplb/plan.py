"""Where to go from the placement that is there: little is moved, for a gain, and no rank is dead.

The published policy packs anew each time, and a little noise in the loads moves most experts. So
what it reaches is the measure, and a few changes of what is there are tried first: the most loaded
rank swaps a slot with another one, or an expert of it gets a further replica elsewhere, in place of
one that has several.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from whalepod.ep_comm.eplb.placement import Slots, balancedness, count_replicas, preserve_slots
from whalepod.ep_comm.eplb.policy import Floats, Ints, Loads, rebalance_experts

_NEARLY = 0.98
"""The share of the published policy's balancedness that is as good."""
_MAX_CHANGES = 0.4
"""Share of a layer's slots after which a new placement is as good."""
_NUM_HOT, _NUM_SPARE = 2, 4
"""Experts of the rank that may get a replica, and replicated ones that may lose theirs."""


def plan_placement(
    current_LP: Ints,
    load_LE: Loads,
    slots: Slots,
    *,
    dead: Collection[int] = (),
    min_gain: float = 0.0,
) -> Ints:
    """Return the placement `[L, P]` to go to from the current one.

    dead      ranks without capacity: dead, or draining; their slots are -1 in the result
    min_gain  by how much balancedness must rise for a layer to change at all

    A layer without load stays as it is, and so does one that is nearly as good as the published
    policy's, unless an expert of it has no place on a live rank. What stays on a rank keeps its
    slot. Raises ValueError if the live ranks have too few slots.
    """
    live = [rank for rank in range(slots.num_ranks) if rank not in dead]
    kept_LP = current_LP.copy()
    for rank in dead:
        kept_LP[:, slots.of_rank(rank)] = -1
    planned_LP = preserve_slots(kept_LP, _published(load_LE, slots, live), slots, live)
    old_L = balancedness(kept_LP, load_LE, slots.num_ranks)
    new_L = balancedness(planned_LP, load_LE, slots.num_ranks)
    must_L = (count_replicas(kept_LP, slots.num_experts) == 0).any(axis=1)
    gains_L = (old_L < _NEARLY * new_L) & (new_L - old_L >= min_gain) & load_LE.any(axis=1)
    if not slots.is_hierarchical and (kept_LP >= 0).all():
        for layer in np.flatnonzero(gains_L):
            target = max(_NEARLY * new_L[layer], old_L[layer] + min_gain)
            few_P = _refined(kept_LP[layer], load_LE[layer], slots, target)
            if few_P is not None:
                planned_LP[layer] = few_P
    return np.where((gains_L | must_L)[:, None], planned_LP, kept_LP)


def next_part(old_P: Ints, new_P: Ints, slots: Slots, max_changes: int) -> Ints:
    """Return a placement between the two, with every expert in it, as a part of the way.

    max_changes  slots of a rank that change; more only where experts change places in a ring that
                 comes through a rank more often
    """
    part_P, num_changes = old_P, max_changes
    while (part_P == old_P).all():
        is_changed_P = old_P != new_P
        for rank in range(slots.num_ranks):
            of_rank = slots.of_rank(rank)
            is_changed_P[of_rank] &= is_changed_P[of_rank].cumsum() <= num_changes
        part_P = _keep_all(old_P, np.where(is_changed_P, new_P, old_P), slots.num_experts)
        num_changes *= 2
    return part_P


def _keep_all(old_P: Ints, part_P: Ints, num_experts: int) -> Ints:
    """Take changes back until no expert is lost that `old_P` has."""
    part_P = part_P.copy()
    held = np.unique(old_P[old_P >= 0])
    while True:
        count_E = np.bincount(part_P[part_P >= 0], minlength=num_experts)
        lost = held[count_E[held] == 0]
        if not len(lost):
            return part_P
        slot = int((old_P == lost[0]).argmax())
        part_P[slot] = old_P[slot]


def _published(load_LE: Loads, slots: Slots, live: list[int]) -> Ints:
    """Return the policy's placement on the live ranks, -1 elsewhere."""
    num_physical = len(live) * slots.per_rank
    if num_physical < slots.num_experts:
        raise ValueError(
            f"{len(live)} live ranks have {num_physical} slots for {slots.num_experts} experts: "
            f"give {slots.num_ranks} ranks at least "
            f"{slots.num_ranks * -(-slots.num_experts // max(len(live), 1))} physical experts"
        )
    is_whole = len(live) == slots.num_ranks
    num_nodes = slots.num_nodes if slots.is_hierarchical and is_whole else 1
    num_groups = slots.num_groups if num_nodes > 1 else 1
    # an even load where there is none: else one expert would get all spare slots
    weight_LE = np.where(load_LE.sum(axis=1, keepdims=True) > 0, load_LE, 1.0)
    placed = rebalance_experts(weight_LE, num_physical, num_groups, num_nodes, len(live))
    out_LP = np.full((len(load_LE), slots.num_physical), -1)
    by_rank = out_LP.reshape(len(load_LE), slots.num_ranks, slots.per_rank)
    by_rank[:, live] = placed.phy2log_LP.reshape(len(load_LE), len(live), slots.per_rank)
    return out_LP


def _refined(content_P: Ints, load_E: Loads, slots: Slots, target: float) -> Ints | None:
    """Return a placement of one layer whose balancedness is at least `target`; None: not found.

    content_P  the expert in each slot, all of them in use
    """
    layer = _Layer(content_P.copy(), np.asarray(load_E, np.float64), slots)
    goal = layer.load_D.mean() / target
    for _ in range(int(_MAX_CHANGES * len(content_P))):
        if layer.load_D.max() <= goal:
            return layer.content_P
        rank = int(layer.load_D.argmax())
        gains = [*layer.replicas(rank), layer.swap(rank)]
        gain, first, second = max(gains, key=lambda found: found[0])
        if gain <= 0:
            return None
        layer.change(first, second)
    return layer.content_P if layer.load_D.max() <= goal else None


Change = tuple[float, int, int]
"""How much lower the sum of squares of all ranks' loads is after it; for a swap two slots, for a
replica -1 - expert and the slot that it gets."""


class _Layer:
    """One layer's slots, and the load of each expert's replica and of each rank."""

    def __init__(self, content_P: Ints, load_E: Floats, slots: Slots) -> None:
        self.content_P = content_P
        self._load_E, self._slots = load_E, slots
        self._rank_P = np.arange(len(content_P)) // slots.per_rank
        self._count()

    def _count(self) -> None:
        self._count_E = np.bincount(self.content_P, minlength=len(self._load_E))
        self._load_P = (self._load_E / self._count_E)[self.content_P]
        self.load_D = np.bincount(self._rank_P, self._load_P, self._slots.num_ranks)

    def change(self, first: int, second: int) -> None:
        if first < 0:
            self.content_P[second] = -1 - first
        else:
            pair = [first, second]
            self.content_P[pair] = self.content_P[pair[::-1]]
        self._count()

    def swap(self, rank: int) -> Change:
        """Return the best swap of a slot of `rank` with one of another rank."""
        mine = self._slots.of_rank(rank)
        given_SP = self._load_P[mine, None] - self._load_P
        room_P = self.load_D[rank] - self.load_D[self._rank_P]
        gain_SP = 2 * given_SP * (room_P - given_SP)
        slot, other = np.unravel_index(int(gain_SP.argmax()), gain_SP.shape)
        return float(gain_SP[slot, other]), mine.start + int(slot), int(other)

    def replicas(self, rank: int) -> list[Change]:
        """Return further replicas for the heaviest experts of `rank`, in place of light ones."""
        mine = self._slots.of_rank(rank)
        hot = self.content_P[mine][np.argsort(-self._load_P[mine], kind="stable")[:_NUM_HOT]]
        # what a replica leaves to the others of its expert when it goes
        left_P = (self._load_E / np.maximum(self._count_E - 1, 1))[self.content_P]
        left_P = np.where(self._count_E[self.content_P] > 1, left_P, np.inf)
        before = float(np.square(self.load_D).sum())
        changes = []
        for slot in np.argsort(left_P, kind="stable")[:_NUM_SPARE].tolist():
            for expert in hot.tolist():
                if self.content_P[slot] != expert and np.isfinite(left_P[slot]):
                    content_P = self.content_P.copy()
                    content_P[slot] = expert
                    after = _Layer(content_P, self._load_E, self._slots).load_D
                    changes.append((before - float(np.square(after).sum()), -1 - expert, slot))
        return changes
