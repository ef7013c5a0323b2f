"""Which requests of a step attend absorbed, and which expanded."""

from __future__ import annotations

import torch

from whalepod.models.batch import ForwardBatch
from whalepod.models.mla import plan_attention

GARBAGE_BLOCK = 2_147_480_000


def make_batch(queries: list[int], contexts: list[int], tables: list[list[int]]) -> ForwardBatch:
    num_tokens = sum(queries)
    return ForwardBatch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.zeros(num_tokens, dtype=torch.int64),
        slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        query_start_B1=torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        context_lens_B=torch.tensor(contexts, dtype=torch.int32),
        block_tables_BM=torch.tensor(tables, dtype=torch.int32),
        max_query_tokens=max(queries),
    )


def test_requests_with_up_to_the_limit_of_queries_attend_absorbed() -> None:
    tables = [[9, GARBAGE_BLOCK], [3, 5], [7, GARBAGE_BLOCK], [2, GARBAGE_BLOCK]]
    plan = plan_attention(make_batch([3, 5, 0, 4], [3, 66, 10, 4], tables), 4)
    assert plan.absorbed is not None
    assert plan.absorbed.tokens_T is not None
    assert plan.absorbed.tokens_T.tolist() == [0, 1, 2, 8, 9, 10, 11]
    assert plan.absorbed.query_start_B1.tolist() == [0, 3, 3, 7]
    assert plan.absorbed.context_lens_B.tolist() == [3, 10, 4]
    assert plan.absorbed.block_tables_BM[:, 0].tolist() == [9, 7, 2]

    (expanded,) = plan.expanded
    assert expanded.tokens == slice(3, 8)
    assert expanded.context_slots_S.tolist() == [*range(192, 256), 320, 321]


def test_a_step_of_short_requests_is_absorbed_as_it_stands() -> None:
    batch = make_batch([1, 4], [8, 9], [[0], [1]])
    plan = plan_attention(batch, 4)
    assert plan.absorbed is not None
    assert plan.absorbed.tokens_T is None
    assert plan.absorbed.query_start_B1 is batch.query_start_B1
    assert plan.expanded == ()


def test_without_short_requests_nothing_is_absorbed() -> None:
    plan = plan_attention(make_batch([2, 3], [2, 3], [[0], [1]]), 0)
    assert plan.absorbed is None
    assert [request.tokens for request in plan.expanded] == [slice(0, 2), slice(2, 5)]
