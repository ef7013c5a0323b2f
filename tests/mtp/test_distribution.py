"""The first tokens of many answers of a running engine have the model's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from tests.mtp.speculating import Settings, make_engine, make_models
from whalepod.mtp.depth import FixedDepth
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine import runner
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.local import Engine
from whalepod.server.messages import Submit

NUM_CHOICES = 3
"""Tokens that may follow each text, so that all answers can be enumerated."""
NUM_TOKENS = 3
LEAST_P = 0.001
BATCH_SIZE = 64

Text = tuple[int, ...]
Shares = Mapping[Text, float]


@dataclass(frozen=True)
class Subject:
    """A model under test: its engine, what is asked of it, and what its answers should be."""

    prompt: Text
    params: SamplingParams
    make_core: Callable[[], EngineCore]
    next_shares: Callable[[Text], Mapping[int, float]]

    def expected(self) -> Shares:
        """Enumerate all answers."""
        shares = {(): 1.0}
        for _ in range(NUM_TOKENS):
            shares = {
                (*text, token_id): share * more
                for text, share in shares.items()
                for token_id, more in self.next_shares((*self.prompt, *text)).items()
            }
        return shares


def small_model() -> Subject:
    """The random model whose drafts are often right; transformers says what is expected."""

    def make_core() -> EngineCore:
        return make_engine(
            Settings(
                depth=FixedDepth(3), max_num_seqs=BATCH_SIZE,
                num_blocks=80, chunk=512, max_model_len=64,
            )
        )  # fmt: skip

    @torch.no_grad()
    def next_shares(text: Text) -> dict[int, float]:
        oracle = make_models().oracle
        logits = oracle(torch.tensor([text]), use_cache=False).logits[0, -1].double() / 1.5
        top = logits.topk(NUM_CHOICES)
        return dict(zip(top.indices.tolist(), top.values.softmax(dim=-1).tolist(), strict=True))

    params = SamplingParams(
        top_k=NUM_CHOICES, temperature=1.5, max_tokens=NUM_TOKENS + 2, ignore_eos=True
    )
    return Subject((7, 23, 11, 64, 40), params, make_core, next_shares)


def v3_nano() -> Subject:
    """The preset as it is served; its own log-probabilities without drafts are expected. A bias
    leaves three tokens, so that drafts of an untrained layer are right now and then."""
    chosen, temperature = (40, 200, 333), 0.9
    options = {
        "load_format": "dummy", "dtype": "fp32", "num_threads": 1, "max_model_len": 64,
        "max_num_seqs": BATCH_SIZE, "kv_cache_memory_bytes": 32_000_000,
    }  # fmt: skip
    plain = Engine("v3-nano", **options, speculation="off")

    def make_core() -> EngineCore:
        return Engine(
            "v3-nano",
            **options,
            num_speculative_tokens=3,
            speculation_method="mtp",
        )._core

    def logprob(text: Text, token_id: int) -> float:
        forced = SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, logit_bias={token_id: 100.0}
        )
        (answer,) = plain.generate([list(text)], forced)
        assert answer.token_ids == (token_id,)
        return answer.logprobs[0].logprob

    def next_shares(text: Text) -> dict[int, float]:
        logprobs = torch.tensor([logprob(text, i) for i in chosen], dtype=torch.float64)
        return dict(zip(chosen, (logprobs / temperature).softmax(dim=-1).tolist(), strict=True))

    params = SamplingParams(
        temperature=temperature, max_tokens=NUM_TOKENS + 2, ignore_eos=True,
        logit_bias=dict.fromkeys(chosen, 100.0),
    )  # fmt: skip
    return Subject((7, 23, 11, 64, 40), params, make_core, next_shares)


def answers(subject: Subject, *, num_answers: int) -> Counter[Text]:
    """Count the first tokens of many seeds; more are asked for, so that drafts can bring all."""
    core = subject.make_core()
    kept: dict[str, list[int]] = {}
    for seed in range(num_answers):
        submit = Submit(
            request_id=str(seed),
            prompt_token_ids=subject.prompt,
            params=replace(subject.params, seed=seed),
        )
        assert not core.receive([submit])
        kept[submit.request_id] = []
        if (seed + 1) % BATCH_SIZE == 0 or seed + 1 == num_answers:
            while core.has_work:
                step = core.step()
                for output in step.outputs if step is not None else ():
                    kept[output.request_id] += output.token_ids
    assert core.stats.num_accepted_tokens > num_answers // 2, "drafts were meant to be right often"
    return Counter(tuple(token_ids[:NUM_TOKENS]) for token_ids in kept.values())


def probability(found: Mapping[Text, int], expected: Shares) -> float:
    """Return the probability of a chi-square value as large as the one that was found."""
    assert len(expected) == len(list(product(range(NUM_CHOICES), repeat=NUM_TOKENS)))
    if not set(found) <= set(expected):
        return 0.0
    num_answers = sum(found.values())
    value = sum(
        (found.get(text, 0) - share * num_answers) ** 2 / (share * num_answers)
        for text, share in expected.items()
    )
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(value / 2).double()))


@pytest.mark.parametrize(
    ("make_subject", "num_answers"),
    [
        (small_model, 2_000),
        (v3_nano, 2_000),
        pytest.param(small_model, 20_000, marks=pytest.mark.long),
        pytest.param(v3_nano, 20_000, marks=pytest.mark.long),
    ],
)
def test_answers_are_distributed_as_the_models(
    make_subject: Callable[[], Subject], num_answers: int
) -> None:
    subject = make_subject()
    found = answers(subject, num_answers=num_answers)

    p = probability(found, subject.expected())
    print(f"{num_answers} answers: p = {p:.4f}")
    assert p > LEAST_P, found


# -- the test above can fail --------------------------------------------------------------------


def accept_all(drafts: Text, choices: Text) -> int:
    return len(drafts)


def accept_one_too_many(drafts: Text, choices: Text) -> int:
    num_right = next((i for i, d in enumerate(drafts) if d != choices[i]), len(drafts))
    return min(num_right + 1, len(drafts))


@pytest.mark.parametrize("broken", [accept_all, accept_one_too_many])
def test_a_wrong_number_of_accepted_drafts_is_found(
    broken: Callable[[Text, Text], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "count_accepted", broken)
    # the scheduler compares what is yielded with the drafts, and refuses it
    subject = small_model()
    with pytest.raises(ValueError, match="accepted"):
        answers(subject, num_answers=BATCH_SIZE)
