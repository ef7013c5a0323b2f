"""The published placement exactly, and what a server adds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ep_comm.groups import num_examples
from whalepod.ep_comm.eplb.placement import (
    Slots,
    balancedness,
    count_replicas,
    preserve_slots,
    rank_loads,
)
from whalepod.ep_comm.eplb.plan import next_part, plan_placement
from whalepod.ep_comm.eplb.policy import balanced_packing, rebalance_experts

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = [VECTORS["upstream"], *VECTORS["own"]]
LAYERS = 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.get("why", "published example"))
def test_the_vectors_are_reproduced(case: dict[str, Any]) -> None:
    sizes = [case[f"num_{name}"] for name in ("physical", "groups", "nodes", "gpus")]
    weight_LE = np.array(case["weight"])
    found = rebalance_experts(weight_LE, *sizes)
    assert found.phy2log_LP.tolist() == case["phy2log"]
    for name, actual in (("logcnt", found.logcnt_LE), ("log2phy", found.log2phy_LEC)):
        assert name not in case or actual.tolist() == case[name]
    if "gpu_load" in case:
        assert rank_loads(found.phy2log_LP, weight_LE, sizes[3]).tolist() == case["gpu_load"]
    if "balancedness" in case:
        shown = balancedness(found.phy2log_LP, weight_LE, sizes[3]).round(4)
        assert shown.tolist() == case["balancedness"]


def plain_packing(weights: list[float], num_packs: int) -> tuple[list[int], list[int]]:
    """Return what `balanced_packing` means, for one row."""
    capacity, packs = len(weights) // num_packs, [[] for _ in range(num_packs)]
    pack_of, place_of = [0] * len(weights), [0] * len(weights)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    for item in order if capacity > 1 else range(len(weights)):
        open_packs = [p for p in range(num_packs) if len(packs[p]) < capacity]
        if capacity == 1:
            chosen = item
        else:
            chosen = min(open_packs, key=lambda p: sum(weights[i] for i in packs[p]))
        pack_of[item], place_of[item] = chosen, len(packs[chosen])
        packs[chosen].append(item)
    return pack_of, place_of


def test_packing_is_its_plain_twin_for_each_row() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        num_packs, capacity = random.integers(1, 6, 2)
        weights = random.integers(0, 9, (3, num_packs * capacity)).astype(float)
        pack, place = balanced_packing(weights, int(num_packs))
        for row in range(3):
            assert (pack[row].tolist(), place[row].tolist()) == plain_packing(
                weights[row].tolist(), int(num_packs)
            )


def drawn(random: np.random.Generator, number: int) -> tuple[Slots, np.ndarray]:
    """Return sizes and loads: even, of few values, or with very heavy experts."""
    num_nodes = int(random.choice([1, 1, 2, 4]))
    num_ranks = num_nodes * int(random.choice([1, 2, 4]))
    num_physical = num_ranks * int(random.integers(1, 7))
    num_groups = int(random.choice([1, num_nodes, 2 * num_nodes]))
    low = max(num_physical // 2, 1)
    fitting = [e for e in range(low, num_physical + 1) if e % num_groups == 0]
    if not fitting:
        num_groups, fitting = 1, list(range(low, num_physical + 1))
    num_experts = int(random.choice(fitting))
    shape = (LAYERS, num_experts)
    loads = [random.random(shape), random.integers(0, 4, shape), random.zipf(1.4, shape)]
    return Slots(
        num_experts=num_experts, num_physical=num_physical, num_ranks=num_ranks,
        num_groups=num_groups, num_nodes=num_nodes,
    ), loads[number % 3].astype(float)  # fmt: skip


def test_random_loads_are_placed_whole_and_never_worse_than_before() -> None:
    """5,000 cases; a placement also survives a second plan from the same loads unmoved."""
    random = np.random.default_rng(15)
    num_better = 0
    for number in range(num_examples(1000) * 5):
        slots, load_LE = drawn(random, number)
        first_LP = np.tile(slots.first(), (LAYERS, 1))
        planned_LP = plan_placement(first_LP, load_LE, slots)
        assert planned_LP.shape == (LAYERS, slots.num_physical)  # so capacities are exact
        counts = count_replicas(planned_LP, slots.num_experts)
        assert counts.min() >= 1
        assert counts.sum(axis=1).tolist() == [slots.num_physical] * LAYERS
        before = balancedness(first_LP, load_LE, slots.num_ranks)
        after = balancedness(planned_LP, load_LE, slots.num_ranks)
        assert (after >= before).all(), (number, slots)
        num_better += int((after > before).sum())
        assert (plan_placement(planned_LP, load_LE, slots) == planned_LP).all(), (number, slots)
    assert num_better > 2000


def test_the_published_placement_alone_can_be_worse_than_experts_in_turn() -> None:
    """Which is why a plan is compared with what is there."""
    random, num_worse = np.random.default_rng(1), 0
    for number in range(300):
        slots, load_LE = drawn(random, number)
        first_LP = np.tile(slots.first(), (LAYERS, 1))
        sizes = slots.num_physical, 1, 1, slots.num_ranks
        placed_LP = rebalance_experts(load_LE, *sizes).phy2log_LP
        worse = balancedness(placed_LP, load_LE, slots.num_ranks) < balancedness(
            first_LP, load_LE, slots.num_ranks
        )
        num_worse += int(worse.sum())
    assert num_worse > 0


def test_what_stays_on_a_rank_keeps_its_slot_and_balance_is_kept() -> None:
    random = np.random.default_rng(8)
    moved = {"kept": 0, "published": 0}
    for number in range(300):
        slots, load_LE = drawn(random, number)
        sizes = slots.num_physical, slots.num_groups, slots.num_nodes, slots.num_ranks
        old_LP = rebalance_experts(load_LE, *sizes).phy2log_LP
        drifted_LE = load_LE * random.uniform(0.7, 1.4, load_LE.shape)
        new_LP = rebalance_experts(drifted_LE, *sizes).phy2log_LP
        kept_LP = preserve_slots(old_LP, new_LP, slots, list(range(slots.num_ranks)))
        by_rank = (LAYERS, slots.num_ranks, -1)
        for layer in range(LAYERS):
            sets = [
                sorted(map(sorted, p.reshape(by_rank)[layer].tolist())) for p in (new_LP, kept_LP)
            ]
            assert sets[0] == sets[1]  # the same sets of experts, under other names
            for old, kept in zip(
                old_LP.reshape(by_rank)[layer], kept_LP.reshape(by_rank)[layer], strict=True
            ):
                staying = set(old.tolist()) & set(kept.tolist())
                assert all(expert in kept[old == expert] for expert in staying)
        loads = [rank_loads(p, drifted_LE, slots.num_ranks) for p in (new_LP, kept_LP)]
        np.testing.assert_allclose(np.sort(loads[0]), np.sort(loads[1]))
        moved["kept"] += int((kept_LP != old_LP).sum())
        moved["published"] += int((new_LP != old_LP).sum())
    assert moved["kept"] < 0.6 * moved["published"], moved


def test_a_layer_changes_only_for_the_least_gain_and_for_load() -> None:
    slots = Slots(num_experts=8, num_physical=8, num_ranks=2)
    first_LP = np.tile(slots.first(), (3, 1))
    even, skewed, none = [1] * 8, [8, 8, 8, 8, 1, 1, 1, 1], [0] * 8
    load_LE = np.array([even, skewed, none], float)
    planned_LP = plan_placement(first_LP, load_LE, slots, min_gain=0.1)
    assert (planned_LP != first_LP).any(axis=1).tolist() == [False, True, False]
    gain = 1 - balancedness(first_LP, load_LE, 2)[1]
    assert (plan_placement(first_LP, load_LE, slots, min_gain=gain + 0.01) == first_LP).all()


def test_dead_ranks_have_no_capacity_and_their_experts_a_place_elsewhere() -> None:
    random, slots = np.random.default_rng(2), Slots(num_experts=12, num_physical=24, num_ranks=4)
    first_LP = np.tile(slots.first(), (3, 1))
    load_LE = np.stack([random.random(12), np.zeros(12), np.arange(12.0)])
    planned_LP = plan_placement(first_LP, load_LE, slots, dead=[1, 3], min_gain=2.0)
    dead = [*range(6, 12), *range(18, 24)]
    assert (planned_LP[:, dead] == -1).all()
    assert (count_replicas(planned_LP, 12) >= 1).all()
    assert (balancedness(planned_LP, load_LE, 4) > 0).all()
    with pytest.raises(ValueError, match="1 live ranks have 6 slots for 12 experts: give 4 ranks"):
        plan_placement(first_LP, load_LE, slots, dead=[0, 1, 3])


def test_a_way_is_gone_in_parts_that_hold_every_expert() -> None:
    random, num_parts, num_over = np.random.default_rng(6), 0, 0
    for number in range(300):
        slots, load_LE = drawn(random, number)
        first_LP = np.tile(slots.first(), (LAYERS, 1))
        new_P = plan_placement(first_LP, load_LE, slots)[0]
        part_P, most = first_LP[0], int(random.integers(1, 4))
        for _ in range(slots.num_physical + 1):
            if (part_P == new_P).all():
                break
            after_P = next_part(part_P, new_P, slots, most)
            assert count_replicas(after_P[None], slots.num_experts).min() >= 1
            assert ((after_P == part_P) | (after_P == new_P)).all()
            changed = (after_P != part_P).reshape(slots.num_ranks, -1).sum(axis=1)
            assert changed.any()
            num_parts, num_over = num_parts + 1, num_over + (changed.max() > most)
            part_P = after_P
        assert (part_P == new_P).all()
    assert num_parts > 300
    assert num_over < num_parts / 10, "rings that come through a rank twice are rare"


def test_numbers_that_do_not_divide_are_refused_by_name() -> None:
    weight_LE = np.ones((1, 8))
    for sizes, message in {
        (9, 1, 1, 2): r"num_physical \(9\) must be a multiple of num_gpus \(2\)",
        (8, 3, 1, 2): r"num_experts \(8\) must be a multiple of num_groups \(3\)",
        (8, 2, 2, 1): r"num_gpus \(1\) must be a multiple of num_nodes \(2\)",
        (4, 1, 1, 2): r"num_physical \(4\) must be at least num_experts \(8\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            rebalance_experts(weight_LE, *sizes)
    with pytest.raises(ValueError, match=r"num_physical \(9\) must be a multiple of num_ranks"):
        Slots(num_experts=8, num_physical=9, num_ranks=2)


def test_zipf_loads_of_the_published_sizes() -> None:
    """256 experts with loads 1 / rank ** 0.7 in random order, as in the simulation on record."""
    random = np.random.default_rng(0)
    load_LE = np.stack([random.permutation(np.arange(1, 257) ** -0.7) for _ in range(58)])

    def placed(num_ranks: int, num_physical: int) -> float:
        found = rebalance_experts(load_LE, num_physical, 1, 1, num_ranks)
        return float(balancedness(found.phy2log_LP, load_LE, num_ranks).mean())

    contiguous = balancedness(np.tile(np.arange(256), (58, 1)), load_LE, 32).mean()
    assert 0.32 < contiguous < 0.36
    assert placed(32, 256) == pytest.approx(0.40, abs=0.01)
    assert placed(32, 288) > 0.93
    assert placed(64, 320) == pytest.approx(0.99, abs=0.01)
    assert placed(144, 288) == pytest.approx(0.69, abs=0.01)
