"""Steps, admission, preemption, ends of answers, cancels and failures."""

from __future__ import annotations

import random
import zlib

import pytest

from tests.scheduler.simulated_engine import (
    EOS,
    SimulatedEngine,
    make_request,
    make_scheduler,
    reference_answer,
)
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row, RowResult, SequenceOutput, StepResult, TokenLogprob
from whalepod.scheduler.request import Request
from whalepod.scheduler.scheduler import Scheduler

PROMPT = tuple(1 + zlib.crc32(bytes([i])) % 5 for i in range(60))


def finish_with(scheduler: Scheduler, plan: Plan, tokens: tuple[int, ...]) -> list[SequenceOutput]:
    """Give every sampling row the same tokens."""
    logprobs = tuple(TokenLogprob(token_id=t, logprob=-t / 8, rank=1) for t in tokens)
    rows = tuple(
        RowResult(sequence_id=row.sequence_id, token_ids=tokens, logprobs=logprobs)
        if row.sample
        else RowResult(sequence_id=row.sequence_id)
        for row in plan.rows
    )
    return scheduler.finish(StepResult(step=plan.step, rows=rows))


def step(scheduler: Scheduler) -> Plan:
    plan = scheduler.step()
    assert plan is not None
    return plan


def rows_by_request(scheduler: Scheduler, plan: Plan) -> dict[str, Row]:
    return {scheduler.sequence(row.sequence_id).request.request_id: row for row in plan.rows}


# ---- one token budget


def test_queue_of_200_answers_in_32_slots_takes_2142_steps() -> None:
    rng = random.Random(0)
    lengths = [int(10 + 990 * rng.random() ** 3) for _ in range(200)]
    scheduler = make_scheduler(
        num_blocks=32 * 17, block_tokens=64, max_num_seqs=32, max_num_batched_tokens=64,
        max_model_len=1024,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        scheduler.add(make_request(str(i), [i + 1], max_tokens=length))
    num_tokens = 0
    while scheduler.has_work:
        num_tokens += sum(len(o.token_ids) for o in finish_with(scheduler, step(scheduler), (5,)))
    assert num_tokens == sum(lengths)
    assert scheduler.stats().num_steps == 2142


def test_decoding_goes_on_while_long_prompt_is_computed_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    engine = SimulatedEngine(scheduler)
    for name in ("a", "b"):
        scheduler.add(
            make_request(name, [len(name), ord(name) % 5], max_tokens=30, ignore_eos=True)
        )
    engine.run_step()
    scheduler.add(make_request("long", PROMPT))
    chunks = []
    while not chunks or sum(chunks) < len(PROMPT):
        plan = engine.step()
        assert plan is not None
        rows = rows_by_request(scheduler, plan)
        assert len(rows["a"].token_ids) == len(rows["b"].token_ids) == 1
        chunks.append(len(rows["long"].token_ids))
        assert rows["long"].sample == (sum(chunks) == len(PROMPT))
        engine.finish(plan)
    assert chunks == [6] * 10


def test_older_prompt_does_not_take_the_token_of_a_younger_decoding_sequence() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("low", [1, 2], max_tokens=20, priority=1, ignore_eos=True))
    engine.run_step()
    scheduler.add(make_request("long", PROMPT, priority=0))
    engine.run_step()
    plan = engine.step()
    assert plan is not None
    rows = rows_by_request(scheduler, plan)
    assert (len(rows["long"].token_ids), len(rows["low"].token_ids)) == (7, 1)


def test_step_in_flight_must_be_finished_before_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = step(scheduler)
    with pytest.raises(RuntimeError, match="step 1 is in flight"):
        scheduler.step()
    finish_with(scheduler, plan, (1,))
    assert step(scheduler).step == 2


def test_nothing_to_do_plans_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.step() is None
    assert not scheduler.has_work


# ---- the door


def test_prompt_over_the_context_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(max_model_len=40)
    with pytest.raises(RequestRejected, match=r"40 tokens.* 40: shorten") as refused:
        scheduler.add(make_request("a", [1] * 40))
    assert refused.value.code == "context_length_exceeded"
    assert not scheduler.has_work
    scheduler.add(make_request("a", [1] * 39))


def test_prompt_over_the_whole_cache_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, block_tokens=4)
    with pytest.raises(RequestRejected, match=r"16 tokens .* holds 16") as refused:
        scheduler.add(make_request("a", [1] * 16))
    assert refused.value.code == "too_large"


def test_full_queue_refuses_one_more_until_one_is_admitted() -> None:
    scheduler = make_scheduler(max_num_queued_reqs=2)
    scheduler.add(make_request("a", [1], n=3))
    scheduler.add(make_request("b", [1]))
    with pytest.raises(RequestRejected, match="2 requests wait already and the queue holds 2"):
        scheduler.add(make_request("c", [1]))
    scheduler.cancel("a")
    scheduler.add(make_request("c", [1]))
    SimulatedEngine(scheduler).run_step()
    scheduler.add(make_request("d", [1]))
    scheduler.check()


def test_live_request_id_is_not_taken_twice() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(make_request("a", [2]))


@pytest.mark.parametrize(
    ("prompt", "n", "message"), [((), 1, "no tokens"), ((1, -1), 1, r"-1\.\.1"), ((1,), 0, "got 0")]
)
def test_request_that_makes_no_sense_is_refused(
    prompt: tuple[int, ...], n: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Request(request_id="a", prompt_token_ids=prompt, num_sequences=n)


# ---- the end of an answer


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_answer_without_a_limit_ends_where_the_context_ends(max_tokens: int | None) -> None:
    scheduler = make_scheduler(max_model_len=20)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=max_tokens, ignore_eos=True))
    engine.run()
    answer = engine.answers["a", 0]
    assert (len(answer.token_ids), answer.finish_reason) == (17, "length")


def test_answer_that_outgrows_the_whole_cache_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=3, block_tokens=4)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=None, ignore_eos=True))
    engine.run()
    assert len(engine.answers["a", 0].token_ids) == 12 - 3
    assert scheduler.stats().num_preemptions == 0


def test_no_answer_wanted_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = make_scheduler()
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:9], max_tokens=0, prompt_logprobs=0))
    engine.run()
    answer = engine.answers["a", 0]
    assert (answer.token_ids, answer.finish_reason) == ([], "length")
    assert [logprob.token_id for logprob in answer.prompt_logprobs] == list(PROMPT[1:9])


@pytest.mark.parametrize(
    ("params", "kept", "reason", "stop_token_id"),
    [
        ({}, (3, EOS), "stop", EOS),
        ({"ignore_eos": True}, (3, EOS, 4, 5), None, None),
        ({"ignore_eos": True, "stop_token_ids": (4,)}, (3, EOS, 4), "stop", 4),
        ({"min_tokens": 3}, (3, EOS, 4, 5), None, None),
        ({"min_tokens": 2}, (3, EOS), "stop", EOS),
        ({"max_tokens": 2, "ignore_eos": True}, (9, 3), "length", None),
        ({"max_tokens": 3}, (3, EOS), "stop", EOS),
    ],
)
def test_run_of_accepted_tokens_is_cut_at_the_first_end(
    params: dict[str, object], kept: tuple[int, ...], reason: str | None, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler()
    # the drafts fill the second block, and an end at the second draft leaves it one short
    scheduler.add(make_request("a", [1, 2, 1, 2], **{"max_tokens": 20, **params}))  # type: ignore[arg-type]
    plan = step(scheduler)
    first = RowResult(sequence_id=0, token_ids=(9,), draft_token_ids=(3, EOS, 4))
    outputs = scheduler.finish(StepResult(step=plan.step, rows=(first,)))
    plan = step(scheduler)
    drafts = plan.rows[0].num_drafts
    run = (3, EOS, 4, 5)[: drafts + 1]
    (output,) = finish_with(scheduler, plan, run)
    if params.get("max_tokens") == 2:  # the last allowed token leaves no place for drafts
        output = output._replace(token_ids=(9, *output.token_ids))
    assert outputs[0].token_ids == (9,)
    assert output.token_ids == kept
    assert (output.finish_reason, output.stop_token_id) == (reason, stop_token_id)
    assert [logprob.token_id for logprob in output.logprobs] == [t for t in kept if t != 9]
    assert scheduler.has_work == (reason is None)
    scheduler.check()


# ---- drafts


def test_blocks_of_rejected_drafts_are_returned_and_their_positions_computed_again() -> None:
    scheduler = make_scheduler(block_tokens=4)
    scheduler.add(make_request("a", [1, 2], max_tokens=20))
    plan = step(scheduler)
    result = RowResult(sequence_id=0, token_ids=(4,), draft_token_ids=(1, 2, 3))
    scheduler.finish(StepResult(step=plan.step, rows=(result,)))
    plan = step(scheduler)
    assert plan.rows[0].token_ids == (4, 1, 2, 3)
    assert (plan.rows[0].num_drafts, len(plan.rows[0].block_ids)) == (3, 2)
    finish_with(scheduler, plan, (5,))
    assert scheduler.stats().num_owned_blocks == 1
    scheduler.check()
    plan = step(scheduler)
    assert (plan.rows[0].start, plan.rows[0].token_ids) == (3, (5,))


def test_drafts_preempt_nobody_when_blocks_are_short() -> None:
    scheduler = make_scheduler(num_blocks=2, block_tokens=4)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2, ord(name)], max_tokens=2))
    plan = step(scheduler)
    results = tuple(
        RowResult(sequence_id=row.sequence_id, token_ids=(4,), draft_token_ids=(1, 2, 3))
        for row in plan.rows
    )
    scheduler.finish(StepResult(step=plan.step, rows=results))
    plan = step(scheduler)
    assert not plan.preempted
    assert [row.num_drafts for row in plan.rows] == [0] * len(plan.rows)


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_drafts_change_no_answer_and_save_steps(num_drafts: int) -> None:
    num_steps = []
    answers = []
    for k in (0, num_drafts):
        scheduler = make_scheduler()
        engine = SimulatedEngine(scheduler)
        engine.num_drafts = k
        for i in range(5):
            scheduler.add(make_request(str(i), PROMPT[i : i + 9], max_tokens=25))
        num_steps.append(engine.run())
        answers.append({key: answer.token_ids for key, answer in engine.answers.items()})
    assert answers[0] == answers[1]
    assert num_steps[1] < num_steps[0]


# ---- several answers


def test_answers_to_one_prompt_compute_it_once() -> None:
    scheduler = make_scheduler(block_tokens=4)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:14], n=4, max_tokens=5, ignore_eos=True))
    first = engine.run_step()
    second = engine.step()
    assert first is not None
    assert second is not None
    assert [len(row.token_ids) for row in first.rows] == [14]
    assert [len(row.token_ids) for row in second.rows] == [1, 1, 1, 1]
    assert [copy.num_tokens for copy in second.copies] == [1, 1, 1]
    heads = {tuple(row.block_ids[:3]) for row in second.rows}
    assert len(heads) == 1
    engine.finish(second)
    engine.run()
    assert engine.num_computed_tokens == 14 + 3 + 4 * 4


@pytest.mark.parametrize("has_cache", [True, False])
def test_own_first_answer_is_not_a_cache_hit(has_cache: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=has_cache)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:14], n=4, max_tokens=1))
    engine.run()
    assert [engine.answers["a", i].num_cached_tokens for i in range(4)] == [0] * 4
    assert scheduler.stats().prefix_cache_hits_tokens == 0
    assert scheduler.stats().prompt_tokens == 14


def test_answer_does_not_fork_a_sibling_whose_own_rows_are_still_to_be_copied() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", [1, 2], n=2, ignore_eos=True))
    engine.run_step()
    for name in ("high", "higher"):
        scheduler.add(make_request(name, [3], max_tokens=1, priority=-1))
    engine.run_step()
    plan = engine.step()
    assert plan is not None
    assert [row.sequence_id for row in plan.rows] == [0]
    assert len(plan.copies) == 1
    engine.finish(plan)
    engine.run()


# ---- preemption and priority


def test_youngest_is_preempted_when_blocks_run_out_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(num_blocks=5, block_tokens=4)
    engine = SimulatedEngine(scheduler)
    requests = [
        make_request(name, PROMPT[i : i + 6], max_tokens=10, ignore_eos=True)
        for i, name in enumerate(("old", "young"))
    ]
    for request in requests:
        scheduler.add(request)
    engine.run()
    preempted = [sequence_id for plan in engine.plans for sequence_id in plan.preempted]
    assert preempted
    assert set(preempted) == {1}
    for request in requests:
        answer = engine.answers[request.request_id, 0]
        assert (answer.token_ids, answer.finish_reason) == reference_answer(request, 0, 16)
    assert engine.answers["young", 0].num_cached_tokens == 0


def test_preempted_sequence_returns_before_those_that_waited_longer() -> None:
    scheduler = make_scheduler(num_blocks=5, block_tokens=4, max_num_seqs=2)
    engine = SimulatedEngine(scheduler)
    for i, name in enumerate(("a", "b")):
        scheduler.add(make_request(name, PROMPT[i : i + 6], max_tokens=10, ignore_eos=True))
    engine.run_step()
    scheduler.add(make_request("c", [5, 5], max_tokens=1))
    order = []
    while scheduler.has_work:
        plan = engine.step()
        assert plan is not None
        if plan.preempted:
            order.clear()
        order += [scheduler.sequence(row.sequence_id).request.request_id for row in plan.rows]
        engine.finish(plan)
    assert scheduler.stats().num_preemptions > 0
    assert order.index("b") < order.index("c")


def test_higher_priority_displaces_a_strictly_lower_one_when_slots_are_busy() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    engine = SimulatedEngine(scheduler)
    for i in range(2):
        scheduler.add(make_request(f"low{i}", [1 + i], max_tokens=30, priority=9, ignore_eos=True))
    engine.run_step()
    scheduler.add(make_request("equal", [5], max_tokens=1, priority=9))
    scheduler.add(make_request("high", [4], max_tokens=1, priority=0))
    plan = engine.step()
    assert plan is not None
    assert set(rows_by_request(scheduler, plan)) == {"low0", "high"}
    assert [
        scheduler.sequence(sequence_id).request.request_id for sequence_id in plan.preempted
    ] == ["low1"]
    engine.finish(plan)
    assert engine.answers["high", 0].finish_reason is not None
    engine.run()
    assert len(engine.answers["low1", 0].token_ids) == 30


def test_equal_priority_displaces_nobody_while_a_higher_answer_waits_for_its_sibling() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("low", [1], priority=9, ignore_eos=True))
    engine.run_step()
    scheduler.add(make_request("high", PROMPT, n=2))
    scheduler.add(make_request("equal", [2], priority=9))
    for _ in range(5):
        plan = engine.run_step()
        assert plan is not None
        assert not plan.preempted
    engine.run()


def test_answer_preempted_before_its_fork_was_copied_leaves_no_text_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=2, block_tokens=4)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:6], n=2, ignore_eos=True))
    engine.run_step()
    plan = engine.step()
    assert plan is not None
    assert len(plan.copies) == 1
    engine.fail(plan)
    scheduler.add(make_request("high", [3], max_tokens=1, priority=-1))
    plan = engine.run_step()  # compares every cached text with its rows
    assert plan is not None
    assert plan.preempted == (1,)
    engine.run()


def test_higher_priority_displaces_strictly_lower_ones_when_blocks_are_short() -> None:
    scheduler = make_scheduler(num_blocks=6, block_tokens=4)
    engine = SimulatedEngine(scheduler)
    for i in range(3):
        scheduler.add(make_request(f"low{i}", PROMPT[i : i + 6], priority=9, max_tokens=2))
    engine.run_step()
    scheduler.add(make_request("high", PROMPT[20:34], priority=0, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert set(rows_by_request(scheduler, plan)) == {"low0", "high"}
    engine.finish(plan)
    engine.run()
    assert len(engine.answers) == 4


def test_higher_priority_does_not_wait_for_a_long_prompt_of_lower_priority() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("low", PROMPT, priority=1))
    engine.run_step()
    scheduler.add(make_request("high", [1, 2, 3], priority=0, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert "high" in rows_by_request(scheduler, plan)
    engine.finish(plan)
    engine.run()


def test_longest_cached_prefix_is_admitted_first_but_overtakes_a_bounded_number_of_times() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_admission_skips=3)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("first", PROMPT[:20], max_tokens=1))
    engine.run()
    scheduler.add(make_request("cold", [5] * 20, max_tokens=1))
    for i in range(6):
        scheduler.add(make_request(f"warm{i}", (*PROMPT[:20], i), max_tokens=1))
    order = []
    while scheduler.has_work:
        plan = engine.run_step()
        assert plan is not None
        order += [row.sequence_id for row in plan.rows]
    assert order == [2, 3, 4, 1, 5, 6, 7]


# ---- cancels and failures


def test_cancelled_request_frees_its_blocks_at_once_between_steps() -> None:
    scheduler = make_scheduler()
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:9], n=2))
    scheduler.add(make_request("waiting", PROMPT[:9]))
    engine.run_step()
    for request_id in ("a", "waiting", "a", "unknown"):
        scheduler.cancel(request_id)
    assert not scheduler.has_work
    assert scheduler.stats().num_owned_blocks == 0
    assert scheduler.step() is None
    scheduler.check()


def test_request_cancelled_in_flight_yields_nothing_and_is_free_after_the_step() -> None:
    scheduler = make_scheduler()
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:9]))
    scheduler.add(make_request("b", PROMPT[:9]))
    plan = engine.step()
    assert plan is not None
    scheduler.cancel("a")
    scheduler.cancel("a")
    assert scheduler.stats().num_owned_blocks == 6
    outputs = engine.finish(plan)
    assert [output.request_id for output in outputs] == ["b"]
    engine.run()
    assert scheduler.stats().num_owned_blocks == 0


def test_the_announced_tokens_count_answers_that_share_a_prompt_without_a_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("a", PROMPT[:13], n=2, ignore_eos=True))
    engine.run_step()
    plan = engine.run_step()  # compares what is planned with what was announced
    assert plan is not None
    assert len(plan.rows) == 2


def test_one_answer_that_is_cancelled_leaves_the_others_alone() -> None:
    request = make_request("a", PROMPT[:9], n=3, max_tokens=30, ignore_eos=True)
    for num_steps in range(6):
        scheduler = make_scheduler()
        engine = SimulatedEngine(scheduler)
        scheduler.add(make_request("a", PROMPT[:9], n=3, max_tokens=30, ignore_eos=True))
        for _ in range(num_steps):
            engine.run_step()
        plan = engine.step() if num_steps % 2 else None
        scheduler.cancel("a", 1)
        scheduler.cancel("a", 1)
        scheduler.cancel("a", 7)
        if plan is not None:
            engine.finish(plan)
        engine.run_step()
        assert 1 not in {scheduler.sequence(row.sequence_id).index for row in engine.plans[-1].rows}
        engine.run()
        for index in (0, 2):
            answer = engine.answers["a", index]
            wanted = reference_answer(request, index, max_total_tokens=39)
            assert (answer.token_ids, answer.finish_reason) == wanted
        assert ("a", 1) not in engine.answers or engine.answers["a", 1].finish_reason is None


def test_the_last_answers_cancel_ends_the_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT[:9], n=2))
    for index in range(2):
        assert scheduler.has_work
        scheduler.cancel("a", index)
    assert not scheduler.has_work
    assert scheduler.num_queued_requests == 0
    scheduler.check()


def test_failed_step_keeps_no_token_shares_no_block_and_is_planned_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    engine = SimulatedEngine(scheduler)
    engine.num_drafts = 2
    scheduler.add(make_request("a", PROMPT[:10], max_tokens=9, ignore_eos=True))
    scheduler.add(make_request("b", PROMPT[:30], max_tokens=9, ignore_eos=True))
    for _ in range(6):
        plan = engine.step()
        assert plan is not None
        num_texts = sum(1 for _ in scheduler.tree.nodes())
        engine.fail(plan)
        assert sum(1 for _ in scheduler.tree.nodes()) == num_texts
        again = engine.step()
        assert again is not None
        assert (again.rows, again.copies) == (plan.rows, plan.copies)
        assert again.step == plan.step + 1
        engine.finish(again)
    assert scheduler.stats().generation_tokens == sum(
        len(answer.token_ids) for answer in engine.answers.values()
    )


def test_error_of_one_row_ends_its_request_and_shares_none_of_its_blocks() -> None:
    scheduler = make_scheduler()
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("bad", PROMPT[:9], n=2))
    scheduler.add(make_request("good", PROMPT[20:29]))
    plan = engine.step()
    assert plan is not None
    outputs = engine.finish(plan, failing=frozenset({0}))
    errors = [(o.request_id, o.index, o.finish_reason) for o in outputs if o.error]
    assert errors == [("bad", 0, "error"), ("bad", 1, "error")]
    roots = [node for node in scheduler.tree.nodes() if node.token_ids == PROMPT[:4]]
    assert roots == []
    engine.run()
    assert engine.answers["good", 0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "1 rows and 0"),
        ((RowResult(sequence_id=7, token_ids=(1,)),), "lacks the result of sequence 0"),
        ((RowResult(sequence_id=0),), r"1\.\.1 tokens, got 0"),
        ((RowResult(sequence_id=0, token_ids=(1, 2)),), r"1\.\.1 tokens, got 2"),
    ],
)
def test_result_that_does_not_fit_the_plan_changes_nothing(
    rows: tuple[RowResult, ...], message: str
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = step(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.finish(StepResult(step=plan.step, rows=rows))
    with pytest.raises(ValueError, match="step 9, but the step in flight is 1"):
        scheduler.finish(StepResult(step=9, rows=()))
    (output,) = finish_with(scheduler, plan, (4,))
    assert output.token_ids == (4,)


def test_accepted_tokens_must_be_the_drafts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = step(scheduler)
    result = RowResult(sequence_id=0, token_ids=(4,), draft_token_ids=(1, 2))
    scheduler.finish(StepResult(step=plan.step, rows=(result,)))
    plan = step(scheduler)
    with pytest.raises(ValueError, match=r"accepted \(3,\), but its drafts are \(1, 2\)"):
        finish_with(scheduler, plan, (3, 4))


# ---- prompt log-probabilities


def test_prompt_logprobs_are_complete_in_spite_of_a_warm_cache_and_preemption() -> None:
    scheduler = make_scheduler(num_blocks=8, block_tokens=4, max_num_batched_tokens=16)
    engine = SimulatedEngine(scheduler)
    scheduler.add(make_request("warm", PROMPT[:14], max_tokens=1))
    engine.run()
    scheduler.add(
        make_request("a", PROMPT[:14], max_tokens=8, priority=1, ignore_eos=True, prompt_logprobs=0)
    )
    engine.run_step()
    scheduler.add(make_request("high", PROMPT[20:45], max_tokens=2))
    engine.run()
    assert scheduler.stats().num_preemptions == 1
    answer = engine.answers["a", 0]
    assert [logprob.token_id for logprob in answer.prompt_logprobs] == list(PROMPT[1:14])
    assert answer.num_cached_tokens == 0


def test_default_parameters_are_those_of_the_request() -> None:
    assert Request(request_id="a", prompt_token_ids=(1,)).params == SamplingParams()
