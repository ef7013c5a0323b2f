"""The sampler against its plain twin, against the distribution it claims, and at its edges."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.engine import plain_sampler
from tests.engine.fakes import NoiseKernels
from tests.engine.noise import gumbel
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.logprobs import logprobs
from whalepod.server.engine.sampler import Sampler, restrict
from whalepod.server.engine.sampling_state import (
    SampleRequest,
    SamplingState,
    as_int64,
    seed_of_branch,
)

VOCAB = 40
STOPS = {3, 5}


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=maybe(0.0, rng.choice([0.3, 1.0, 2.5])),
        top_k=maybe(rng.choice([1, 2, 7, VOCAB, 1000]), rng.choice([0, -1])),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.3]), 1.0),
        presence_penalty=maybe(rng.choice([-2.0, 0.5]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.5, 1.1]), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.choice([-100.0, 5.0]) for _ in "ab"}, {}),
        min_tokens=maybe(4, 0),
        logprobs=maybe(rng.randrange(4), None),
    )


def state_after(
    params: SamplingParams, prompt: list[int], answer: list[int], seed: int
) -> SamplingState:
    state = SamplingState(params, prompt, seed, STOPS)
    state.observe(0, prompt)
    state.observe(len(prompt), answer)
    return state


@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_mixed_batch_equals_the_plain_twin_row_by_row(case: int) -> None:
    rng = random.Random(case)
    num_rows = rng.randrange(1, 9)
    logits = np.random.default_rng(case).normal(size=(num_rows, VOCAB)).astype(np.float32) * 4
    wanted, expected = [], []
    for row in range(num_rows):
        params, seed = random_params(rng), rng.randrange(-(2**63), 2**63)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 10))]
        answer = [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
        state = state_after(params, prompt, answer, seed)
        wanted.append(SampleRequest(state, len(prompt) + len(answer)))
        expected.append(plain_sampler.choose(logits[row], params, prompt, answer, STOPS, seed))
    before = torch.from_numpy(logits.copy())

    samples = Sampler(NoiseKernels()).sample(before, wanted)

    assert samples.token_ids == expected
    assert np.array_equal(before.numpy(), logits), "the model's logits were changed"
    for row, want in enumerate(wanted):
        assert (samples.logprobs[row] is None) == (want.state.params.logprobs is None)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.97, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_the_whole_sort(
    top_p: float, spread: float
) -> None:
    logits = np.random.default_rng(1).normal(size=5000).astype(np.float32) * spread
    params = SamplingParams(top_p=top_p)

    kept = restrict(logits[None].copy(), [SamplingState(params, [1], 0)])

    expected = plain_sampler.restricted(logits, params)
    assert np.array_equal(np.isfinite(kept[0]), np.isfinite(expected))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, logit_bias={0: 1.0}),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square at p = 0.001 over 20,000 draws at as many positions of one sequence."""
    num_draws, logits = 20_000, np.array([2.0, 1.2, 0.3, -0.4, -1.0], dtype=np.float32)
    state = SamplingState(params, [1], 1234)
    rows = torch.from_numpy(logits).expand(num_draws, -1)

    token_ids = (
        Sampler(NoiseKernels())
        .sample(rows, [SampleRequest(state, position) for position in range(1, num_draws + 1)])
        .token_ids
    )

    x = plain_sampler.restricted(plain_sampler.edited(logits, params, [1], [], set()), params)
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    counts = np.bincount(token_ids, minlength=5)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    chi2 = float(((counts[kept] - num_draws * p[kept]) ** 2 / (num_draws * p[kept])).sum())
    limit = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}[int(kept.sum()) - 1]
    assert chi2 < limit, (chi2, limit, counts.tolist())


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, VOCAB)).astype(np.float32))
    wanted = [
        SampleRequest(SamplingState(SamplingParams(top_p=0.9), [1], seed), 5 + seed)
        for seed in range(6)
    ]
    together = Sampler(NoiseKernels()).sample(logits, wanted).token_ids

    alone = [Sampler(NoiseKernels()).sample(logits[i : i + 1], [wanted[i]]) for i in range(6)]
    backwards = Sampler(NoiseKernels()).sample(logits.flip(0), wanted[::-1]).token_ids

    assert together == [samples.token_ids[0] for samples in alone] == backwards[::-1]


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [7.0, 7.0, 1.0, 7.0]])
    plain = SamplingState(SamplingParams(temperature=0), [1], 0)
    edited = SamplingState(SamplingParams(temperature=0, logit_bias={0: 0.5}), [1], 0)

    samples = Sampler(NoiseKernels()).sample(
        logits, [SampleRequest(plain, 1), SampleRequest(edited, 1)]
    )

    assert samples.token_ids == [1, 0]


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    states = [SamplingState(SamplingParams(top_k=2), [1], 0)]
    kept = restrict(np.array([[3.0, 2.0, 2.0, 1.0]], dtype=np.float32), states)

    assert np.isfinite(kept).tolist() == [[True, True, True, False]]


def test_rows_that_are_not_finite_are_faults_and_their_neighbours_are_not() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    states = [SamplingState(SamplingParams(temperature=t), [1], 0) for t in (0, 0, 1, 1)]

    samples = Sampler(NoiseKernels()).sample(logits, [SampleRequest(state, 1) for state in states])

    assert samples.is_fault == [True, False, True, True]


def test_logprobs_are_the_models_own_whatever_the_settings() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={3: 100.0})

    samples = Sampler(NoiseKernels()).sample(
        logits, [SampleRequest(SamplingState(params, [1], 0), 1)]
    )

    scored = samples.logprobs[0]
    assert scored is not None
    norm = math.log(sum(math.exp(v) for v in (1, 3, 2, 0)))
    assert (scored.token_id, scored.rank) == (3, 4)
    assert scored.logprob == pytest.approx(0 - norm, abs=1e-6)
    assert [token_id for token_id, _ in scored.top] == [1, 2]
    assert scored.top[0][1] == pytest.approx(3 - norm, abs=1e-6)


def test_asking_for_no_alternatives_gives_none() -> None:
    assert logprobs(torch.zeros(1, 4), [2], 0)[0].top == ()


def test_recomputed_and_repeated_rows_are_counted_once() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    state = SamplingState(params, [1, 2], 0)
    state.observe(0, [1, 2])
    for _ in range(2):
        state.observe(2, [7])
    state.observe(3, [7])
    state.observe(0, [1, 2, 7, 7, 9])

    counts = dict(zip(state.counts.ids.tolist(), state.counts.generated.tolist(), strict=True))

    assert counts == {1: 0, 2: 0, 7: 2, 9: 1}


def test_many_distinct_tokens_are_counted() -> None:
    state = SamplingState(SamplingParams(presence_penalty=1.0), [0], 0)
    state.observe(1, list(range(500)))

    assert state.counts.ids.tolist() == list(range(500))
    assert state.counts.generated.tolist() == [1.0] * 500


def test_branches_differ_and_the_first_is_the_request_itself() -> None:
    seeds = {seed_of_branch(seed, index) for seed in (0, 1, -5) for index in range(50)}

    assert len(seeds) == 150
    assert seed_of_branch(42, 0) == 42
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert as_int64(2**63) == -(2**63)


def test_the_noise_of_the_tests_is_a_gumbel_variable() -> None:
    g = gumbel(5, 9, 100_000)

    assert abs(g.mean() - np.euler_gamma) < 0.02
    assert abs(g.var() - math.pi**2 / 6) < 0.05
