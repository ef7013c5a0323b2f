"""A batch depends on the rows of its step alone, whatever the buffers held before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from whalepod.models.batch import ForwardBatch
from whalepod.scheduler.plan import Row
from whalepod.server.engine.batching import FEW_TOKENS, MAX_LAYOUTS, BatchBuilder

BLOCK = 64


def new_builder() -> BatchBuilder:
    return BatchBuilder(max_tokens=600, max_rows=8, max_model_len=512)


def values(batch: ForwardBatch, rows: list[Row]) -> list[object]:
    """Return what the batch says, without table entries past the rows' own blocks."""
    tables = [
        table[: len(row.block_ids)] for table, row in zip(batch.block_tables_BM, rows, strict=True)
    ]
    tensors = (
        batch.token_ids_T, batch.positions_T, batch.slots_T, batch.query_start_B1,
        batch.context_lens_B, *tables,
    )  # fmt: skip
    return [*(tensor.tolist() for tensor in tensors), batch.max_query_tokens]


def random_step(rng: random.Random, tables: dict[int, tuple[int, ...]]) -> list[Row]:
    """Return rows of some sequences; now and then one of them gets other blocks."""
    rows = []
    for sequence_id in rng.sample(range(8), rng.randrange(1, 8)):
        if rng.random() < 0.2 or sequence_id not in tables:
            tables[sequence_id] = tuple(rng.sample(range(1000), rng.randrange(1, 9)))
        num_places = len(tables[sequence_id]) * BLOCK
        num_tokens = min(rng.choice([1, 1, 1, 3, FEW_TOKENS, FEW_TOKENS + 1, 80]), num_places)
        rows.append(
            Row(
                sequence_id=sequence_id,
                token_ids=tuple(rng.randrange(5000) for _ in range(num_tokens)),
                start=rng.randrange(num_places - num_tokens + 1),
                block_ids=tables[sequence_id],
                sample=True,
            )
        )
    return rows


def test_a_batch_on_used_buffers_equals_one_on_fresh_buffers() -> None:
    rng = random.Random(3)
    used, tables = new_builder(), dict[int, tuple[int, ...]]()
    for _ in range(3 * MAX_LAYOUTS):
        rows = random_step(rng, tables)
        assert values(used.build(rows), rows) == values(new_builder().build(rows), rows)


@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, 100])
def test_slots_follow_the_block_table(num_tokens: int) -> None:
    blocks, start = (7, 3, 9), 60
    row = Row(0, tuple(range(num_tokens)), start, blocks, sample=True)

    batch = new_builder().build([row])

    positions = np.arange(start, start + num_tokens)
    slots = np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    assert batch.positions_T.tolist() == positions.tolist()
    assert batch.slots_T.tolist() == slots.tolist()
    assert batch.context_lens_B.tolist() == [start + num_tokens]


def test_steps_of_one_shape_lie_at_the_same_places() -> None:
    """A recorded step finds its input by its address."""
    builder = new_builder()
    first = builder.build([Row(0, (5,), 3, (1,), sample=True)]).places()
    other = builder.build([Row(0, (5, 6), 3, (1, 2), sample=True)]).places()
    again = builder.build([Row(1, (9,), 0, (4,), sample=True)]).places()

    assert first == again != other
