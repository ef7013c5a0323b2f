"""Drafts change nothing but the number of steps: every answer is what it is without them."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torch import Tensor

from tests.engine.fakes import (
    VOCAB_SIZE,
    FakeModel,
    FakeMtp,
    collect,
    encode_letters,
    expected_answer,
    logits_after,
    make_core,
    run_to_end,
)
from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.mtp.depth import FixedDepth
from whalepod.mtp.stats import StepRecord
from whalepod.scheduler.journal import replay
from whalepod.scheduler.params import MAX_SPECULATIVE_TOKENS, SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server.engine.core import EngineCore
from whalepod.server.messages import Abort, Submit

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(top_p=0.9, seed=7, max_tokens=40, ignore_eos=True, logprobs=2)
PENALISED = replace(
    SAMPLED, frequency_penalty=0.7, presence_penalty=-0.5, repetition_penalty=1.2, min_tokens=9,
    logit_bias={3: 2.0}, ignore_eos=False,
)  # fmt: skip
NARROW = replace(SAMPLED, top_k=7, min_p=0.02, temperature=0.7, ignore_eos=False)
# two tokens that take turns: each draft moves the penalties of the next
REPELLED = replace(
    SAMPLED, logit_bias={3: 14.0, 4: 13.0}, frequency_penalty=1.5, repetition_penalty=1.1
)
ALL_PARAMS = (GREEDY, SAMPLED, PENALISED, NARROW, REPELLED, replace(REPELLED, temperature=0.0))


class CycledDepth:
    """Takes the depths of a list in turn."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        self._num_steps = 0
        self.records: list[StepRecord] = []

    def choose(self) -> int:
        self._num_steps += 1
        return self._depths[self._num_steps % len(self._depths)]

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(length))


def submit(
    core: EngineCore, request_id: str, prompt: Sequence[int], params: SamplingParams, n: int = 1
) -> None:
    message = Submit(
        request_id=request_id, prompt_token_ids=tuple(prompt), params=params, num_sequences=n
    )
    assert core.receive([message]) == []


def assert_is_own(
    answer: SequenceOutput, prompt: Sequence[int], params: SamplingParams, index: int = 0
) -> None:
    """Compare ids with the oracle's, and each logprob with the model's own logits."""
    assert list(answer.token_ids) == expected_answer(list(prompt), params, index)
    if params.logprobs is None:
        return
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, found in enumerate(answer.logprobs):
        logits = logits_after([*prompt, *answer.token_ids[:i]]).astype(np.float64)
        expected = logits[answer.token_ids[i]] - np.log(np.exp(logits).sum())
        assert found.token_id == answer.token_ids[i]
        assert found.logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 62, 64, 65, 130])
@pytest.mark.parametrize("params", ALL_PARAMS)
def test_answers_are_the_models_own(num_drafts: int, length: int, params: SamplingParams) -> None:
    core = make_core(depth=FixedDepth(num_drafts), max_num_batched_tokens=48)
    submit(core, "a", text(length), params)

    answer = run_to_end(core)["a", 0]

    assert_is_own(answer, text(length), params)
    stats = core.stats
    assert stats.num_accepted_tokens > 0 or len(answer.token_ids) < 8
    assert sum(stats.num_accepted_by_position) == stats.num_accepted_tokens
    assert stats.num_owned_blocks == 0


def test_right_drafts_save_steps() -> None:
    params = replace(GREEDY, max_tokens=120)
    steps = []
    for num_drafts in (0, 1, 4):
        core = make_core(depth=FixedDepth(num_drafts))
        submit(core, "a", text(20), params)
        run_to_end(core)
        steps.append(core.stats.num_steps)

    assert steps[0] == 120
    assert steps[1] < 0.65 * steps[0]  # two of three texts are guessed right
    assert steps[2] < 0.85 * steps[1]


def test_usage_counts_what_stands_in_the_answer_and_what_does_not() -> None:
    core = make_core(depth=FixedDepth(3))
    submit(core, "a", text(20), GREEDY)
    answer = run_to_end(core)["a", 0]

    stats = core.stats
    assert answer.num_accepted_drafts == stats.num_accepted_tokens
    assert answer.num_accepted_drafts + answer.num_rejected_drafts == stats.num_draft_tokens
    assert answer.num_accepted_drafts + stats.num_steps == len(answer.token_ids)


@pytest.mark.parametrize("length", [64, 100, 128, 129, 200])
def test_a_resend_hits_and_drafts_as_the_cold_run_did(length: int) -> None:
    core = make_core(depth=FixedDepth(4))
    submit(core, "cold", text(length), SAMPLED)
    cold = run_to_end(core)["cold", 0]
    num_cold = core.stats.num_accepted_tokens
    submit(core, "warm", text(length), SAMPLED)
    warm = run_to_end(core)["warm", 0]

    assert warm.num_cached_tokens >= (length - 1) // 64 * 64
    assert warm.token_ids == cold.token_ids
    assert core.stats.num_accepted_tokens == 2 * num_cold


@pytest.mark.parametrize("num_shared", [8, 37, 63, 64, 65, 72, 127])
def test_a_text_that_leaves_another_inside_a_block_drafts_from_its_own_states(
    num_shared: int,
) -> None:
    core = make_core(depth=FixedDepth(2))
    for request_id, seed in (("a", 1), ("b", 2), ("c", 1)):
        prompt = text(num_shared) + text(30, seed=seed)
        submit(core, request_id, prompt, GREEDY)
        assert_is_own(run_to_end(core)[request_id, 0], prompt, GREEDY)


def test_branches_draft_each_from_their_own_text() -> None:
    core = make_core(depth=FixedDepth(3))
    for length in (40, 64, 65, 128):
        request_id = f"r{length}"
        submit(core, request_id, text(length), SAMPLED, n=4)
        answers = run_to_end(core)
        for index in range(4):
            assert_is_own(answers[request_id, index], text(length), SAMPLED, index)


def test_preemption_drops_drafts_and_changes_nothing() -> None:
    params = replace(PENALISED, max_tokens=100, min_tokens=100)
    core = make_core(num_blocks=6, depth=FixedDepth(4))
    for i in range(4):
        submit(core, f"r{i}", text(50, seed=i), params)

    answers = run_to_end(core)

    assert core.stats.num_preemptions > 0, "the pool was meant to be too small"
    for i in range(4):
        assert_is_own(answers[f"r{i}", 0], text(50, seed=i), params)


def test_drafts_never_preempt() -> None:
    def num_preemptions(num_drafts: int) -> int:
        core = make_core(num_blocks=4, depth=FixedDepth(num_drafts), max_num_batched_tokens=64)
        for i in range(3):  # 62 tokens and their first answer fit one block, drafts do not
            submit(core, f"r{i}", text(61, seed=i), replace(GREEDY, max_tokens=3))
        run_to_end(core)
        return core.stats.num_preemptions

    assert num_preemptions(4) <= num_preemptions(0)


@pytest.mark.parametrize("num_left", [1, 2, 3, 4, 5])
def test_prompts_that_end_just_below_the_longest_length_end_there(num_left: int) -> None:
    # vllm-project/vllm#44954: drafts past the end must have no place to go
    core = make_core(depth=FixedDepth(4), max_model_len=128, max_num_batched_tokens=128)
    prompt = text(128 - num_left)
    params = replace(GREEDY, max_tokens=None)
    submit(core, "a", prompt, params)

    answer = run_to_end(core)["a", 0]

    assert answer.finish_reason == "length"
    assert_is_own(answer, prompt, replace(params, max_tokens=num_left))


@pytest.mark.parametrize("fails_at", range(1, 14))
@pytest.mark.parametrize("params", [SAMPLED, PENALISED])
def test_a_step_that_fails_once_is_run_again_unnoticed(
    fails_at: int, params: SamplingParams
) -> None:
    model = FakeModel()
    model.fails_at = {fails_at}
    core = make_core(model=model, depth=FixedDepth(3))
    submit(core, "a", text(62), params)

    assert_is_own(run_to_end(core)["a", 0], text(62), params)


@pytest.mark.parametrize("fails_at", range(1, 14))
def test_a_step_whose_drafts_fail_is_run_again_unnoticed(fails_at: int) -> None:
    class FailingMtp(FakeMtp):
        def forward(self, *arguments):  # type: ignore[no-untyped-def]
            hidden = super().forward(*arguments)
            if self.num_passes == fails_at:
                raise RuntimeError("told to fail")
            return hidden

    core = make_core(mtp=FailingMtp(), depth=FixedDepth(3))
    submit(core, "a", text(62), PENALISED)

    assert_is_own(run_to_end(core)["a", 0], text(62), PENALISED)


def test_a_script_is_followed_with_drafts() -> None:
    core = make_core(depth=FixedDepth(4), steps=("ab", "c", "defg"))
    core.receive([Submit(request_id="a", prompt_token_ids=text(9), params=GREEDY)])
    answer = run_to_end(core)["a", 0]

    assert list(answer.token_ids[:7]) == encode_letters("abcdefg")
    assert core.stats.num_draft_tokens > 0


def test_a_text_ends_at_a_stop_token_inside_an_accepted_run() -> None:
    core = make_core(depth=FixedDepth(4))
    num_cut = 0
    for seed in range(40):
        params = replace(SAMPLED, ignore_eos=False, seed=seed, stop_token_ids=(5, 6, 7, 8))
        submit(core, f"r{seed}", text(9), params)
        answer = run_to_end(core)[f"r{seed}", 0]
        assert_is_own(answer, text(9), params)
        if answer.finish_reason == "stop":
            assert answer.stop_token_id == answer.token_ids[-1]
            num_cut += 1
    assert num_cut > 10


# -- what a request says about drafts -------------------------------------------------------------


@pytest.mark.parametrize("with_lookup", [False, True])
def test_a_request_caps_its_drafts(with_lookup: bool) -> None:
    core = make_core(depth=FixedDepth(4), with_lookup=with_lookup)
    found = {}
    for most in (None, 0, 1, 4):
        params = replace(GREEDY, num_speculative_tokens=most)
        submit(core, f"{most}", text(20), params)
    for (request_id, _), answer in run_to_end(core).items():
        assert_is_own(answer, text(20), GREEDY)
        found[request_id] = answer.num_accepted_drafts + answer.num_rejected_drafts

    assert found["None"] == found["4"] > found["1"] > found["0"] == 0


def test_a_request_cannot_raise_the_number_of_drafts() -> None:
    core = make_core(depth=FixedDepth(1))
    submit(core, "a", text(20), replace(GREEDY, num_speculative_tokens=4))
    run_to_end(core)
    assert core.stats.num_draft_tokens == core.stats.num_drafts > 0


@pytest.mark.parametrize("most", [-1, 5])
def test_a_cap_out_of_range_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match=rf"num_speculative_tokens must be in 0..4, got {most}"):
        SamplingParams(num_speculative_tokens=most)


def test_scheduler_and_drafters_agree_on_the_most_drafts() -> None:
    assert MAX_SPECULATIVE_TOKENS == MAX_DRAFT_TOKENS


# -- drafts looked up in the text ---------------------------------------------------------------

COPYING = replace(GREEDY, max_tokens=60, logit_bias={3: 100.0})
"""One token for ever: the most repetitive text."""


def test_lookup_saves_steps_of_a_model_without_a_layer_of_its_own() -> None:
    core = make_core(depth=FixedDepth(4), has_mtp=False, with_lookup=True)
    submit(core, "a", text(9), COPYING)
    answer = run_to_end(core)["a", 0]

    assert_is_own(answer, text(9), COPYING)
    assert core.stats.num_steps <= 4 + 60 / 5
    assert core.stats.num_accepted_tokens == 60 - core.stats.num_steps


def test_a_request_that_repeats_itself_leaves_a_layer_that_errs_for_lookup() -> None:
    class Wrong(FakeMtp):
        def logits(self, hidden_BH: Tensor) -> Tensor:
            logits_BV = super().logits(hidden_BH)
            logits_BV[:, 3] = -1000.0
            return logits_BV

    mtp = Wrong()
    core = make_core(depth=FixedDepth(2), mtp=mtp, with_lookup=True)
    submit(core, "a", text(9), COPYING)

    assert_is_own(run_to_end(core)["a", 0], text(9), COPYING)
    assert mtp.num_passes < 2 * 12
    assert core.stats.num_steps < 40


def test_a_request_that_does_not_repeat_itself_asks_the_layer() -> None:
    mtp = FakeMtp()
    core = make_core(depth=FixedDepth(1), mtp=mtp, with_lookup=True)
    submit(core, "a", text(9), replace(GREEDY, max_tokens=60))

    run_to_end(core)
    assert mtp.num_passes > 0.8 * core.stats.num_steps


# -- random histories ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A prompt is the beginning of one of two long texts, and then perhaps goes its own way."""

    base: int
    num_shared: int
    num_own: int
    params: SamplingParams
    n: int

    def prompt(self, number: int) -> tuple[int, ...]:
        own = text(self.num_own, seed=100 + number)
        return (text(200, seed=self.base)[: self.num_shared] + own) or (1,)


@dataclass(frozen=True)
class Cancel:
    which: int


arrivals = st.builds(
    Arrival,
    base=st.integers(0, 1),
    num_shared=st.sampled_from([0, 1, 9, 40, 63, 64, 65, 72, 127, 128, 129, 150]),
    num_own=st.sampled_from([0, 1, 5, 30]),
    params=st.builds(
        replace,
        st.sampled_from(ALL_PARAMS),
        max_tokens=st.sampled_from([1, 2, 3, 11, 40]),
        min_tokens=st.sampled_from([0, 0, 1]),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (4,), (5, 9)]),
        logprobs=st.sampled_from([None, 1]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    ),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)
events = st.lists(
    st.one_of(arrivals, arrivals, st.builds(Cancel, st.integers(0, 5)), st.integers(1, 12)),
    max_size=14,
)


@given(
    events=events,
    depths=st.sampled_from([(1,), (2,), (4,), (0, 3), (4, 1, 0, 2), (3, 3, 0)]),
    num_blocks=st.sampled_from([4, 5, 9, 40]),
    chunk=st.sampled_from([5, 17, 64]),
    max_num_seqs=st.sampled_from([1, 3, 5]),
    fails_at=st.sets(st.integers(1, 60), max_size=3),
    caching=st.sampled_from([True, True, True, False]),
    drafters=st.sampled_from([(True, False), (True, True), (False, True)]),
)
def test_random_histories_give_every_request_its_own_text(
    events: list[Arrival | Cancel | int],
    depths: tuple[int, ...],
    num_blocks: int,
    chunk: int,
    max_num_seqs: int,
    fails_at: set[int],
    caching: bool,
    drafters: tuple[bool, bool],
) -> None:
    model = FakeModel()
    model.fails_at = {n for n in fails_at if n + 1 not in fails_at and n - 1 not in fails_at}
    journal = io.BytesIO()
    core = make_core(
        model=model, depth=CycledDepth(depths), num_blocks=num_blocks, max_model_len=240,
        max_num_batched_tokens=chunk, max_num_seqs=max_num_seqs, journal=journal,
        enable_prefix_caching=caching, has_mtp=drafters[0], with_lookup=drafters[1],
    )  # fmt: skip
    answers: dict[tuple[str, int], SequenceOutput] = {}
    alive: dict[str, tuple[Arrival, tuple[int, ...]]] = {}
    for number, event in enumerate(events):
        if isinstance(event, Arrival):
            prompt = event.prompt(number)
            alive[f"r{number}"] = event, prompt
            submit(core, f"r{number}", prompt, event.params, event.n)
        elif isinstance(event, Cancel):
            request_id = f"r{event.which}"
            core.receive([Abort(request_id=request_id)])
            alive.pop(request_id, None)
        else:
            for _ in range(event):
                outputs = core.step()
                if outputs is not None:
                    collect(answers, outputs)
            core.check()
    for key, output in run_to_end(core).items():
        answers[key] = output if key not in answers else _join(answers[key], output)

    for request_id, (arrival, prompt) in alive.items():
        for index in range(arrival.n):
            assert_is_own(answers[request_id, index], prompt, arrival.params, index)
    assert core.stats.num_owned_blocks == 0
    assert replay(io.BytesIO(journal.getvalue())) is None


def _join(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
    )
