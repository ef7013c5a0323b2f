"""The engine against its oracle: whatever is scheduled how, each answer is the model's own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeModel,
    collect,
    encode_letters,
    expected_answer,
    logits_after,
    make_core,
    run_to_end,
)
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server.config import EngineConfig
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.scripted import ScriptFile
from whalepod.server.errors import StartupError
from whalepod.server.messages import (
    Abort,
    Ping,
    Pong,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
PENALISED = replace(SAMPLED, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=3)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(length))


def submit(
    core: EngineCore, request_id: str, prompt: tuple[int, ...], params: SamplingParams, n: int = 1
) -> None:
    message = Submit(request_id=request_id, prompt_token_ids=prompt, params=params, num_sequences=n)
    assert core.receive([message]) == []


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_answers_are_the_models_own_for_every_chunk_size(
    chunk: int, length: int, params: SamplingParams
) -> None:
    core = make_core(max_num_batched_tokens=chunk, max_num_seqs=1)
    submit(core, "a", text(length), params)

    answer = run_to_end(core)["a", 0]

    assert list(answer.token_ids) == expected_answer(list(text(length)), params)
    assert answer.finish_reason == "length"


def test_neighbours_change_nothing() -> None:
    prompts = {f"r{i}": text(3 + 29 * i, seed=i) for i in range(7)}
    core = make_core()
    for request_id, prompt in prompts.items():
        submit(core, request_id, prompt, PENALISED)

    answers = run_to_end(core)

    for request_id, prompt in prompts.items():
        expected = expected_answer(list(prompt), PENALISED)
        assert list(answers[request_id, 0].token_ids) == expected


def test_a_prefix_hit_changes_nothing_and_is_counted() -> None:
    core, prompt = make_core(), text(200)
    submit(core, "cold", prompt, SAMPLED)
    cold = run_to_end(core)["cold", 0]
    submit(core, "warm", prompt, SAMPLED)
    warm = run_to_end(core)["warm", 0]

    assert warm.token_ids == cold.token_ids
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= 192


def test_preemption_changes_nothing() -> None:
    params = replace(PENALISED, max_tokens=100)
    core = make_core(num_blocks=6)
    for i in range(4):
        submit(core, f"r{i}", text(50, seed=i), params)

    answers = run_to_end(core)

    assert core.stats.num_preemptions > 0, "the pool was meant to be too small"
    for i in range(4):
        expected = expected_answer(list(text(50, seed=i)), params)
        assert list(answers[f"r{i}", 0].token_ids) == expected


def test_branches_share_a_prompt_and_draw_their_own_tokens() -> None:
    core = make_core()
    submit(core, "a", text(100), SAMPLED, n=4)

    answers = run_to_end(core)

    for index in range(4):
        expected = expected_answer(list(text(100)), SAMPLED, index)
        assert list(answers["a", index].token_ids) == expected
    assert len({answers["a", index].token_ids for index in range(4)}) == 4


def test_requests_without_a_seed_get_one_that_repeats_with_the_engine() -> None:
    def run() -> list[tuple[int, ...]]:
        core = make_core()
        for i in range(3):
            submit(core, f"r{i}", text(5), replace(SAMPLED, seed=None))
        answers = run_to_end(core)
        return [answers[f"r{i}", 0].token_ids for i in range(3)]

    first = run()

    assert first == run()
    assert len(set(first)) == 3


def test_eos_ends_an_answer_and_min_tokens_keeps_it_away() -> None:
    params = SamplingParams(temperature=0, max_tokens=400)
    core = make_core()
    prompt = next(p for p in (text(4, seed=s) for s in range(99)) if ends_early(p, params))
    submit(core, "short", prompt, params)
    submit(core, "long", prompt, replace(params, min_tokens=50))

    answers = run_to_end(core)

    assert answers["short", 0].finish_reason == "stop"
    assert answers["short", 0].stop_token_id == EOS
    assert answers["short", 0].token_ids[-1] == EOS
    assert EOS not in answers["long", 0].token_ids[:50]
    for request_id, wanted in (("short", params), ("long", replace(params, min_tokens=50))):
        expected = expected_answer(list(prompt), wanted)
        assert list(answers[request_id, 0].token_ids) == expected


def ends_early(prompt: tuple[int, ...], params: SamplingParams) -> bool:
    return len(expected_answer(list(prompt), params)) < 40


def test_prompt_logprobs_score_every_prompt_token_but_the_first_once() -> None:
    prompt = text(130)
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=1)
    core = make_core(max_num_batched_tokens=50)
    submit(core, "warm up the cache", prompt, GREEDY)
    run_to_end(core)
    submit(core, "a", prompt, params, n=2)

    answers = run_to_end(core)

    scored = answers["a", 0].prompt_logprobs
    assert [entry.token_id for entry in scored] == list(prompt[1:])
    for i in (1, 49, 50, 64, 129):
        logits = logits_after(list(prompt[:i]))
        assert scored[i - 1].top[0][0] == int(logits.argmax())
    assert answers["a", 1].prompt_logprobs == ()


def test_logprobs_come_one_per_token() -> None:
    core = make_core()
    submit(core, "a", text(9), replace(SAMPLED, logprobs=3))

    answer = run_to_end(core)["a", 0]

    assert tuple(entry.token_id for entry in answer.logprobs) == answer.token_ids
    assert all(len(entry.top) == 3 for entry in answer.logprobs)


# -- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes", "n", "code", "says"),
    [
        ((1, VOCAB_SIZE), {}, 1, "invalid_request", f"prompt holds token {VOCAB_SIZE}"),
        ((-1,), {}, 1, "invalid_request", "prompt holds token -1"),
        ((), {}, 1, "invalid_request", "no tokens"),
        ((1,), {"logit_bias": {99: 1.0}}, 1, "invalid_request", "logit_bias holds token 99"),
        ((1,), {"stop_token_ids": (77,)}, 1, "invalid_request", "stop_token_ids holds token 77"),
        ((1,), {}, 0, "invalid_request", "n must be"),
        ((1,), {}, 10**9, "invalid_request", "n must be"),
        (text(600), {}, 1, "context_length_exceeded", "512"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(
    prompt: tuple[int, ...], changes: dict[str, object], n: int, code: str, says: str
) -> None:
    core = make_core()
    params = replace(GREEDY, **changes)  # type: ignore[arg-type]

    (reply,) = core.receive(
        [Submit(request_id="a", prompt_token_ids=prompt, params=params, num_sequences=n)]
    )

    assert isinstance(reply, Rejected)
    assert (reply.request_id, reply.code) == ("a", code)
    assert says in reply.message
    assert not core.has_work
    core.check()


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    core = make_core()
    submit(core, "a", text(5), GREEDY)

    (reply,) = core.receive([Submit(request_id="a", prompt_token_ids=text(6), params=GREEDY)])

    assert isinstance(reply, Rejected)
    assert list(run_to_end(core)["a", 0].token_ids) == expected_answer(list(text(5)), GREEDY)


def test_a_full_queue_refuses() -> None:
    core = make_core(max_num_queued_reqs=2)
    messages = [Submit(request_id=f"r{i}", prompt_token_ids=(1,), params=GREEDY) for i in range(3)]

    (reply,) = core.receive(messages)

    assert isinstance(reply, Rejected)
    assert (reply.request_id, reply.code) == ("r2", "queue_full")


def test_a_ping_is_answered_with_fresh_stats() -> None:
    core = make_core()
    submit(core, "a", text(5), GREEDY)

    (reply,) = core.receive([Ping(nonce=8)])

    assert isinstance(reply, Pong)
    assert (reply.nonce, reply.stats.num_waiting) == (8, 1)


def test_a_reset_of_the_prefix_cache_is_done_before_the_next_ping() -> None:
    core, prompt = make_core(), text(200)
    submit(core, "cold", prompt, SAMPLED)
    cold = run_to_end(core)["cold", 0]

    (reply,) = core.receive([ResetPrefixCache(), Ping(nonce=1)])
    submit(core, "again", prompt, SAMPLED)
    again = run_to_end(core)["again", 0]

    assert isinstance(reply, Pong)
    assert reply.stats.num_cached_blocks == 0
    assert again.num_cached_tokens == 0
    assert again.token_ids == cold.token_ids


def test_shutdown_is_noted_and_unknown_aborts_are_ignored() -> None:
    core = make_core()

    assert core.receive([Abort(request_id="who"), Shutdown()]) == []
    assert core.is_stopping


def test_an_abort_frees_everything_at_every_point() -> None:
    for num_steps in range(8):
        core = make_core(max_num_batched_tokens=16)
        submit(core, "a", text(60), SAMPLED, n=2)
        for _ in range(num_steps):
            core.step()
        (told,) = core.receive([Abort(request_id="a")])

        assert told == StepOutputs(outputs=(), stats=core.stats)
        assert not core.has_work
        core.check()
        assert core.stats.num_owned_blocks == 0
        assert core.step() is None


def test_an_aborted_answer_frees_its_slot_at_every_point_and_the_others_go_on() -> None:
    expected = [expected_answer(list(text(60)), SAMPLED, index) for index in range(3)]
    for num_steps in range(12):
        core = make_core(max_num_batched_tokens=16)
        submit(core, "a", text(60), SAMPLED, n=3)
        answers: dict[tuple[str, int], SequenceOutput] = {}
        for _ in range(num_steps):
            outputs = core.step()
            collect(answers, outputs or StepOutputs(outputs=()))
        num_before = core.runner.num_sequences

        assert core.receive([Abort(request_id="a", index=1), Abort(request_id="a", index=9)]) == []
        core.check()
        assert core.runner.num_sequences == num_before - 1
        collect(answers, StepOutputs(outputs=tuple(run_to_end(core).values())))

        for index in (0, 2):
            answer = answers["a", index]
            assert (list(answer.token_ids), answer.finish_reason) == (expected[index], "length")
        assert answers.get(("a", 1)) is None or answers["a", 1].finish_reason is None
        assert core.stats.num_owned_blocks == 0


def test_the_abort_of_the_last_answer_says_that_nothing_runs() -> None:
    core = make_core()
    submit(core, "a", text(60), SAMPLED, n=2)
    core.step()

    replies = core.receive([Abort(request_id="a", index=0), Abort(request_id="a", index=1)])

    assert replies == [StepOutputs(outputs=(), stats=core.stats)]
    assert not core.has_work
    core.check()


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, PENALISED])
def test_a_step_that_fails_once_is_run_again_unnoticed(params: SamplingParams) -> None:
    model = FakeModel()
    model.fails_at = {1, 5, 9}
    core = make_core(model=model, max_num_batched_tokens=32)
    submit(core, "a", text(70), params)

    answer = run_to_end(core)["a", 0]

    assert list(answer.token_ids) == expected_answer(list(text(70)), params)


def test_B107_a_step_that_fails_twice_ends_its_requests_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = FakeModel()
    model.fails_at = {3, 4}
    core = make_core(model=model)
    submit(core, "a", text(9), GREEDY, n=2)

    answers = run_to_end(core)
    submit(core, "b", text(9), GREEDY)
    after = run_to_end(core)

    for index in range(2):
        answer = answers["a", index]
        assert answer.finish_reason == "error"
        assert answer.error == "the engine failed at this step; its log says why"
    assert "was told to fail" in caplog.text
    assert list(after["b", 0].token_ids) == expected_answer(list(text(9)), GREEDY)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_logits_that_are_not_finite_end_that_request_only(params: SamplingParams) -> None:
    class HalfBroken(FakeModel):
        def logits(self, hidden_BH):  # type: ignore[no-untyped-def]
            logits_BV = super().logits(hidden_BH)
            if len(logits_BV) == 2:
                logits_BV[1, 4] = float("nan")
            return logits_BV

    core = make_core(model=HalfBroken())
    submit(core, "good", text(5), GREEDY)
    submit(core, "bad", text(6), params)

    answers = run_to_end(core)

    assert answers["bad", 0].error == "the model's logits are not finite"
    assert list(answers["good", 0].token_ids) == expected_answer(list(text(5)), GREEDY)


# -- test hooks ---------------------------------------------------------------------------------


def scripted(*steps: str, model: FakeModel | None = None, **changes: Any) -> list[SequenceOutput]:
    core = make_core(steps=steps, model=model)
    params = replace(GREEDY, ignore_eos=False, **changes)
    message = Submit(request_id="a", prompt_token_ids=text(5), params=params)
    assert core.receive([message]) == []
    outputs = []
    while core.has_work:
        step = core.step()
        assert step is not None
        outputs += step.outputs
    core.check()
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_script_emits_its_pieces_one_per_output_then_eos(temperature: float) -> None:
    outputs = scripted("hello", "w", "", "orld", logprobs=1, temperature=temperature)

    pieces = [list(output.token_ids) for output in outputs]
    assert pieces == [encode_letters("hello"), encode_letters("w"), encode_letters("orld"), [EOS]]
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
    assert [len(output.logprobs) for output in outputs] == [5, 1, 4, 1]


def test_a_script_is_cut_at_the_budget() -> None:
    outputs = scripted("hello", "world", max_tokens=7)

    assert [len(output.token_ids) for output in outputs] == [5, 2]
    assert outputs[-1].finish_reason == "length"


def test_a_script_can_fail_its_step() -> None:
    outputs = scripted("ab", "!raise", "cd")

    assert [output.finish_reason for output in outputs] == [None, "error"]
    assert "not finite" in (outputs[-1].error or "")


def test_a_script_survives_failed_steps() -> None:
    model = FakeModel()
    model.fails_at = {2, 4}

    outputs = scripted("abc", "d", model=model)

    assert [len(output.token_ids) for output in outputs] == [3, 1, 1]


def test_the_text_that_stands_last_in_a_prompt_has_the_word(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"contains": "weather", "steps": ["call"]}\n\n')
    turns = ScriptFile(path)
    assert turns.find("the weather? <result> 12") == ["call"]
    with path.open("a") as file:
        file.write('{"contains": "<result>", "steps": ["\\udcf0", "b"]}\n')

    assert turns.find("the weather?") == ["call"]
    assert turns.find("the weather? <result> 12") == ["\udcf0", "b"]
    assert turns.find("the weather? <result> 12 and the weather") == ["call"]
    assert turns.find("the time?") is None


@pytest.mark.parametrize(
    "line",
    [
        '{"contains": "a"}',
        '{"contains": "", "steps": ["a"]}',
        '{"contains": "a", "steps": []}',
        '{"contains": "a", "steps": [1]}',
        '{"contains": "a", "steps": ["a"], "rol": "user"}',
        "[]",
        "{",
    ],
)
def test_a_script_that_makes_no_sense_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f"\n{line}\n\n")
    with pytest.raises(StartupError, match="line 2: must be like"):
        ScriptFile(path)


def test_a_script_needs_a_file_and_the_hooks(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        ScriptFile(tmp_path / "none")
    with pytest.raises(ValueError, match="test_script needs enable_test_hooks"):
        EngineConfig(test_script="x")


# -- random histories ---------------------------------------------------------------------------


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_random_histories_leave_nothing_behind_and_answers_stay_right(case: int) -> None:
    """Arrivals, aborts and faults in any order, on pools too small for all."""
    rng = random.Random(case)
    model = FakeModel()
    model.fails_at = {rng.randrange(60) for _ in range(rng.randrange(3))}
    core = make_core(
        model=model,
        num_blocks=rng.choice([4, 6, 20]),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([4, 17, 64]),
        max_model_len=200,
    )
    sent: dict[str, tuple[tuple[int, ...], SamplingParams, int]] = {}
    aborted: set[tuple[str, int]] = set()
    answers: dict[tuple[str, int], SequenceOutput] = {}
    for turn in range(40):
        if rng.random() < 0.3:
            prompt = text(rng.choice([1, 40, 64, 100]), seed=rng.randrange(3))
            params = replace(rng.choice([GREEDY, PENALISED]), max_tokens=rng.randrange(3, 30))
            sent[f"r{turn}"] = (prompt, params, rng.choice([1, 1, 3]))
            submit(core, f"r{turn}", *sent[f"r{turn}"])
        if sent and rng.random() < 0.15:
            request_id, index = rng.choice(list(sent)), rng.choice([None, 0, 2])
            aborted |= {(request_id, i) for i in range(3) if index in (None, i)}
            core.receive([Abort(request_id=request_id, index=index)])
        outputs = core.step()
        if outputs is not None:
            collect(answers, outputs)
        core.check()
    collect(answers, StepOutputs(outputs=tuple(run_to_end(core).values())))

    assert core.stats.num_owned_blocks == 0
    for request_id, (prompt, params, n) in sent.items():
        for index in range(n):
            check_answer(
                answers.get((request_id, index)),
                (request_id, index) in aborted,
                prompt,
                params,
                index,
            )


def check_answer(
    answer: SequenceOutput | None,
    was_aborted: bool,
    prompt: tuple[int, ...],
    params: SamplingParams,
    index: int,
) -> None:
    """A whole answer is the oracle's; an aborted or failed one is a beginning of it."""
    got = [] if answer is None else list(answer.token_ids)
    expected = expected_answer(list(prompt), params, index)
    if answer is not None and answer.finish_reason in ("length", "stop"):
        assert got == expected
        return
    assert was_aborted or (answer is not None and answer.finish_reason == "error")
    assert got == expected[: len(got)]


def test_outputs_say_how_long_their_request_waited_for_a_place() -> None:
    core = make_core(max_num_seqs=1)
    submit(core, "first", text(20), GREEDY)
    submit(core, "second", text(30), GREEDY)
    outputs = run_to_end(core)

    assert 0 <= outputs["first", 0].queue_us < outputs["second", 0].queue_us
