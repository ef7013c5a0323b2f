"""Counts, offsets, slots and prefixes, first of all those of the worked example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tests.ep_comm import worked_example as example
from tests.ep_comm.groups import make_inputs
from whalepod.ep_comm import layout


@pytest.mark.parametrize("rank", [0, 1])
def test_the_worked_example_is_counted(rank: int) -> None:
    counted = layout.dispatch_layout(example.IDS[rank], example.NUM_EXPERTS, example.NUM_RANKS)
    assert counted.num_tokens_per_rank_R.tolist() == example.TOKENS_PER_RANK[rank]
    assert counted.num_tokens_per_expert_E.tolist() == example.TOKENS_PER_EXPERT[rank]
    assert counted.is_token_in_rank_TR.int().tolist() == example.IS_TOKEN_IN_RANK[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_worked_examples_rows_are_spread_over_experts(rank: int) -> None:
    local_NK = torch.tensor(example.IDS_PER_TOKEN[rank])
    sources = torch.tensor([source for source, _ in example.ROWS_PER_TOKEN[rank]])
    spread = layout.expert_rows(local_NK, example.NUM_LOCAL)
    assert spread.count_E.tolist() == example.EXPERT_COUNTS[rank]
    assert spread.first_row_E.tolist() == example.FIRST_ROWS[rank]
    begin_ER, count_ER = layout.source_ranges(
        local_NK, sources, example.NUM_LOCAL, example.NUM_RANKS
    )
    pairs = torch.stack([begin_ER, count_ER], dim=-1).tolist()
    assert pairs == [[list(pair) for pair in row] for row in example.RANGES[rank]]


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_layouts_agree_with_plain_loops(seed: int, num_ranks: int, skew: bool) -> None:
    num_experts, num_choices = 16, 4
    [inputs] = make_inputs(seed, 1, num_experts, num_choices, 1, 9, skew=skew)
    ids, per_rank = inputs.ids_TK.tolist(), num_experts // num_ranks
    counted = layout.dispatch_layout(inputs.ids_TK, num_experts, num_ranks)
    owners = [[e // per_rank for e in token if e >= 0] for token in ids]
    expected = [[int(r in token) for r in range(num_ranks)] for token in owners]
    assert counted.is_token_in_rank_TR.int().tolist() == expected

    slots_TR = layout.slots(counted.is_token_in_rank_TR)
    for rank in range(num_ranks):
        present = [t for t, token in enumerate(owners) if rank in token]
        assert slots_TR[present, rank].tolist() == list(range(len(present)))
        local_NK = layout.local_ids(inputs.ids_TK[present], rank * per_rank, per_rank)
        spread = layout.expert_rows(local_NK, per_rank, 20)
        for expert in range(per_rank):
            chosen = [n for n, row in enumerate(local_NK.tolist()) if expert in row]
            rows = spread.row_of_NK[local_NK == expert].tolist()
            assert rows == [20 * expert + place for place in range(len(chosen))]
            assert spread.source_S[spread.row_S // 20 == expert].tolist() == chosen

    owners_TK = layout.owner_of(inputs.ids_TK, num_experts, num_ranks)
    places = layout.selection_slots(owners_TK, num_ranks)
    for rank in range(num_ranks):
        mine = places[owners_TK == rank].tolist()
        assert mine == list(range(len(mine)))
    assert bool((places[owners_TK < 0] == -1).all())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 4]], "outside -1..3"),
        ([[-2, 1]], "outside -1..3"),
        ([[1, 2], [3, 3]], "token 1 selects an expert twice"),
        ([[0, 1, 2]], r"int64 \[T, 2\]"),
    ],
)
def test_bad_choices_are_refused_by_name(ids: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check_choices(torch.tensor(ids), 4, 2)


def test_several_masked_choices_are_not_a_repetition() -> None:
    layout.check_choices(torch.tensor([[-1, -1], [0, -1]]), 4, 2)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_experts \(6\) must be a positive multiple"):
        layout.split_experts(6, 4)
