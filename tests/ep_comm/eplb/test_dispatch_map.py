"""Tables from experts to slots: each choice leads to a replica, and shares are as they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whalepod.ep_comm.eplb.config import ReplicaChoice
from whalepod.ep_comm.eplb.dispatch_map import NUM_COLUMNS, columns, look_up, new_table
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.plan import plan_placement

SLOTS = Slots(num_experts=8, num_physical=16, num_ranks=4, num_nodes=2)
CHOICES: list[ReplicaChoice] = ["nearest", "hashed", "least-loaded"]


def placed(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a placement `[P]` and the loads `[E]` that it was made for."""
    load_E = np.random.default_rng(seed).zipf(1.5, 8).clip(max=500).astype(float)
    first_LP = np.tile(SLOTS.first(), (1, 1))
    return plan_placement(first_LP, load_E[None], SLOTS)[0], load_E


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(10))
def test_every_choice_leads_to_a_slot_of_its_expert(choice: ReplicaChoice, seed: int) -> None:
    phy2log_P, load_E = placed(seed)
    ids_TK = torch.randint(-1, 8, (50, 3), generator=torch.Generator().manual_seed(seed))
    for rank in range(4):
        table_EC = new_table(phy2log_P, load_E, SLOTS, choice, rank)
        slots_TK = look_up(table_EC, ids_TK, columns(64, rank))
        assert slots_TK.dtype == torch.int64
        assert torch.equal(slots_TK < 0, ids_TK < 0)
        found_TK = torch.from_numpy(phy2log_P)[slots_TK.clamp(min=0)]
        assert torch.equal(torch.where(ids_TK >= 0, found_TK, -1), ids_TK)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_lost_rank_gets_no_token_and_a_lost_expert_has_no_slot(choice: ReplicaChoice) -> None:
    phy2log_P = SLOTS.first()
    phy2log_P[4:8] = -1
    table_EC = new_table(phy2log_P, np.ones(8), SLOTS, choice, rank=0)
    assert not bool(((table_EC >= 4) & (table_EC < 8)).any())
    phy2log_P[phy2log_P == 5] = -1
    table_EC = new_table(phy2log_P, np.ones(8), SLOTS, choice, rank=0)
    assert (table_EC < 0).all(dim=1).tolist() == [False] * 5 + [True] + [False] * 2 + [True]


def test_the_nearest_replica_is_of_the_rank_then_of_its_node() -> None:
    phy2log_P = np.array([0, 1, 2, 3, 0, 4, 5, 6, 7, 4, 1, 2, 1, 3, 6, 0])
    tables = [new_table(phy2log_P, np.ones(8), SLOTS, "nearest", rank) for rank in range(4)]
    assert {*tables[0][0].tolist()} == {0}
    assert {*tables[1][1].tolist()} == {1}  # of the node
    assert {*tables[3][4].tolist()} == {9}
    assert {*tables[2][7].tolist()} == {8}
    far = {tuple({*table[5].tolist()}) for table in tables}
    assert far == {(6,)}
    # replicas of the other node are chosen differently by its two ranks
    only_far_P = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3])
    chosen = {int(new_table(only_far_P, np.ones(8), SLOTS, "nearest", r)[0, 0]) for r in (2, 3)}
    assert chosen == {8, 12}


def test_hashed_tokens_use_all_replicas_alike() -> None:
    phy2log_P = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 1, 1, 2, 3, 4])
    table_EC = new_table(phy2log_P, np.ones(8), SLOTS, "hashed", rank=0)
    ids_TK = torch.zeros(4000, 1, dtype=torch.int64)
    used = torch.bincount(look_up(table_EC, ids_TK, columns(4000, 1)).flatten(), minlength=16)
    counts = used[[0, 8, 9, 10]]
    assert int(counts.sum()) == 4000
    assert int(counts.min()) > 900


def test_water_finds_its_level() -> None:
    """Ranks 0 and 1 are loaded by experts without replicas; expert 7 fills up what is left."""
    slots = Slots(num_experts=4, num_physical=6, num_ranks=3)
    phy2log_P = np.array([0, 3, 1, 3, 2, 3])
    table_EC = new_table(phy2log_P, np.array([30.0, 10.0, 0.0, 50.0]), slots, "least-loaded", 0)
    share = np.bincount(table_EC[3].numpy(), minlength=6)[[1, 3, 5]] / NUM_COLUMNS
    assert share == pytest.approx([0.0, 0.4, 0.6], abs=1 / NUM_COLUMNS)
    even_EC = new_table(phy2log_P, np.zeros(4), slots, "least-loaded", 0)
    assert np.bincount(even_EC[3].numpy(), minlength=6)[[1, 3, 5]].min() >= NUM_COLUMNS // 3


def test_water_levels_ranks_at_least_as_well_as_an_even_split() -> None:
    better = 0
    for seed in range(50):
        phy2log_P, load_E = placed(seed)
        most = {}
        for choice in ("hashed", "least-loaded"):
            table_EC = new_table(phy2log_P, load_E, SLOTS, choice, 0).numpy()[:8]
            load_P = np.zeros(16)
            np.add.at(load_P, table_EC, load_E[:, None] / NUM_COLUMNS)
            most[choice] = load_P.reshape(4, 4).sum(axis=1).max()
        assert most["least-loaded"] <= most["hashed"] * 1.02, seed  # whole columns
        better += most["least-loaded"] < 0.98 * most["hashed"]
    assert better > 10
