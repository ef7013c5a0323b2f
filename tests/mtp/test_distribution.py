"""First tokens of many answers of a running engine: their distribution is the model's, with drafts
and either rule of acceptance."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import settings

from tests.mtp.speculating import Settings, make_engine, make_models
from whalepod.mtp.depth import FixedDepth
from whalepod.scheduler.params import SamplingParams
from whalepod.server.messages import Submit

PROMPT = (7, 23, 11, 64, 40)
TOP_K = 3
NUM_TOKENS = 3
NUM_ANSWERS = 20_000 if settings.default.max_examples > 1000 else 2_000
CRITICAL = {26: 54.05}
"""Chi-square value that is exceeded with a probability of 0.001."""


def answers(by_rejection: bool) -> Counter[tuple[int, ...]]:
    """Count the first tokens of many seeds; a fourth token, so that three can come from drafts."""
    core = make_engine(
        Settings(
            depth=FixedDepth(3), by_rejection=by_rejection, max_num_seqs=64, num_blocks=80,
            chunk=512, max_model_len=64,
        )
    )  # fmt: skip
    found: Counter[tuple[int, ...]] = Counter()
    kept: dict[str, list[int]] = {}
    for seed in range(NUM_ANSWERS):
        params = SamplingParams(
            top_k=TOP_K, temperature=1.5, max_tokens=NUM_TOKENS + 2, seed=seed, ignore_eos=True
        )
        name = str(seed)
        assert not core.receive([Submit(request_id=name, prompt_token_ids=PROMPT, params=params)])
        kept[name] = []
        if (seed + 1) % 64 == 0 or seed + 1 == NUM_ANSWERS:
            while core.has_work:
                step = core.step()
                for output in step.outputs if step is not None else ():
                    kept[output.request_id] += output.token_ids
    for token_ids in kept.values():
        found[tuple(token_ids[:NUM_TOKENS])] += 1
    assert core.stats.num_accepted_tokens > NUM_ANSWERS // 2, "drafts were meant to be right often"
    return found


@torch.no_grad()
def expected_shares() -> dict[tuple[int, ...], float]:
    """Enumerate all answers with transformers' model."""
    oracle = make_models().oracle

    def next_tokens(text: tuple[int, ...]) -> list[tuple[int, float]]:
        logits = oracle(torch.tensor([text]), use_cache=False).logits[0, -1].double() / 1.5
        top = logits.topk(TOP_K)
        shares = top.values.softmax(dim=-1).tolist()
        return list(zip(top.indices.tolist(), shares, strict=True))

    shares = {(): 1.0}
    for _ in range(NUM_TOKENS):
        shares = {
            (*text, token_id): share * more
            for text, share in shares.items()
            for token_id, more in next_tokens((*PROMPT, *text))
        }
    return shares


@pytest.mark.parametrize("by_rejection", [False, True])
def test_answers_are_distributed_as_the_models(by_rejection: bool) -> None:
    expected, found = expected_shares(), answers(by_rejection)

    assert set(found) <= set(expected)
    assert len(expected) == len(list(product(range(TOP_K), repeat=NUM_TOKENS)))
    chi_square = sum(
        (found[text] - share * NUM_ANSWERS) ** 2 / (share * NUM_ANSWERS)
        for text, share in expected.items()
    )
    assert chi_square < CRITICAL[26], found
