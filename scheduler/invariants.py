"""What must hold: of a step's results before they are taken, and of all state after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as SequenceOf

from whalepod.scheduler.plan import Plan, Row, RowResult
from whalepod.scheduler.request import Sequence, Status


def check_results(plan: Plan, results: Mapping[int, RowResult]) -> None:
    """Raise ValueError unless there is one fitting result for each row of the plan."""
    if len(results) != len(plan.rows):
        raise ValueError(
            f"step {plan.step} has {len(plan.rows)} rows and {len(results)} different results"
        )
    for row in plan.rows:
        result = results.get(row.sequence_id)
        if result is None:
            raise ValueError(f"step {plan.step} lacks the result of sequence {row.sequence_id}")
        if result.error is None and not (row.sample and len(result.token_ids) == 1):
            _check_tokens(row, result.token_ids)


def _check_tokens(row: Row, token_ids: SequenceOf[int]) -> None:
    least = 1 if row.sample else 0
    most = row.num_drafts + 1 if row.sample else 0
    if not least <= len(token_ids) <= most:
        raise ValueError(
            f"sequence {row.sequence_id} must yield {least}..{most} tokens, got {len(token_ids)}"
        )
    drafts = tuple(row.token_ids[len(row.token_ids) - row.num_drafts :])
    accepted = tuple(token_ids[:-1])
    if accepted != drafts[: len(accepted)]:
        raise ValueError(
            f"sequence {row.sequence_id} accepted {accepted}, but its drafts are {drafts}"
        )


def held_blocks(running: SequenceOf[Sequence]) -> list[int]:
    """List the blocks of all running sequences, each as often as it is held."""
    held: list[int] = []
    for sequence in running:
        held += sequence.block_ids
        if sequence.pending_copy is not None:
            held.append(sequence.pending_copy.source)
    return held


def check_sequences(
    *,
    running: SequenceOf[Sequence],
    waiting: SequenceOf[Sequence],
    block_tokens: int,
    max_num_seqs: int,
) -> None:
    """Raise AssertionError with both values unless counts, orders and states agree."""
    assert len(running) <= max_num_seqs, f"{len(running)} run, the limit is {max_num_seqs}"
    orders = [sequence.order for sequence in running]
    assert orders == sorted(orders), f"running sequences are out of order: {orders}"
    for sequence in waiting:
        assert sequence.status is Status.WAITING, f"{sequence.status} in the waiting queue"
        assert not sequence.block_ids, f"a waiting sequence holds {sequence.block_ids}"
    for sequence in running:
        _check_running(sequence, block_tokens)


def _check_running(sequence: Sequence, block_tokens: int) -> None:
    assert sequence.status is Status.RUNNING, f"{sequence.status} among the running"
    num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed
    assert num_computed < num_tokens, f"{num_computed} of {num_tokens} tokens are computed"
    num_rows = len(sequence.block_ids) * block_tokens
    assert num_computed <= num_rows, f"{num_computed} computed tokens in {num_rows} rows"
    path = [node.block_id for node in sequence.path]
    head = sequence.block_ids[: len(path)]
    assert path == head, f"shared blocks are {path}, the sequence holds {head}"
    num_full = num_computed // block_tokens
    if sequence.is_shared:
        assert len(path) == num_full, f"{len(path)} of {num_full} full blocks are shared"
