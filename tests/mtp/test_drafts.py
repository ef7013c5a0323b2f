"""Drafts of a running engine against transformers' layer, computed anew from the whole text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.models.oracle import random_ids
from tests.mtp.speculating import (
    VOCAB_SIZE,
    Models,
    RecordedRunner,
    Settings,
    make_engine,
    make_models,
)
from whalepod.mtp.depth import FixedDepth
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.core import EngineCore
from whalepod.server.messages import Submit

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@torch.no_grad()
def guess_again(models: Models, text: list[int], num_drafts: int) -> list[Tensor]:
    """Return the logits of each draft behind `text`: no cache, no rows kept from earlier steps.

    After the first draft the layer's own last state is fed back at the end of the text.
    """
    mtp = models.mtp_oracle
    main = models.oracle.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
    ids, states, logits = list(text[1:]), main, []
    for _ in range(num_drafts):
        hidden = _layer(mtp, ids, states)
        logits.append(mtp._project_to_logits(hidden[:, -1:])[0, 0])
        ids.append(int(logits[-1].argmax()))
        states = torch.cat([states, hidden[:, -1:]], dim=1)
    return logits


def _layer(mtp: MtpModel, ids: list[int], states: Tensor) -> Tensor:
    embedded = mtp.embed_tokens(torch.tensor([ids]))
    positions = torch.arange(len(ids))[None]
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
    rotary = mtp.rotary_emb(embedded, positions)
    return mtp.layers[0](embedded, states, rotary, mask, positions, None)


def serve(core: EngineCore, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    assert not core.receive(
        [Submit(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)]
    )
    while core.has_work:
        core.step()


def drafts_of(core: EngineCore, prompt: list[int]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return (text, drafts behind it) of every step."""
    found, text = [], list(prompt)
    assert isinstance(core.runner, RecordedRunner)
    for _, result in core.runner.steps:
        (row,) = result.rows
        text += row.token_ids
        if row.draft_token_ids:
            found.append((list(text), row.draft_token_ids))
    return found


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 64), (3, 2), (4, 3), (50, 64), (64, 64), (130, 23)]
)
def test_drafts_are_those_of_the_whole_text(num_drafts: int, length: int, chunk: int) -> None:
    models, prompt = make_models(), random_ids(length, VOCAB_SIZE)
    core = make_engine(Settings(depth=FixedDepth(num_drafts), chunk=chunk, max_num_seqs=1))

    serve(core, "a", prompt, GREEDY)

    found = drafts_of(core, prompt)
    assert len(found) > 4
    for text, drafts in found:
        for draft, logits in zip(drafts, guess_again(models, text, len(drafts)), strict=True):
            assert logits.max() - logits[draft] < 1e-4, f"{text}: {drafts}"


def test_the_first_draft_equals_transformers() -> None:
    """transformers' own loop over its modules, at the end of a prompt."""
    models, prompt = make_models(), random_ids(70, VOCAB_SIZE)
    core = make_engine(Settings(depth=FixedDepth(1)))
    serve(core, "a", prompt, GREEDY)
    text, drafts = drafts_of(core, prompt)[0]

    with torch.no_grad():
        main = models.oracle.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
        expected, logits, _ = models.mtp_oracle(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=main,
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=models.oracle.config.get_mtp_config()),
        )

    assert tuple(expected[0].tolist()) == drafts
    for ours, theirs in zip(guess_again(models, text, 1), logits[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_most_drafts_of_these_models_are_right_and_not_all() -> None:
    core = make_engine(Settings(depth=FixedDepth(3)))
    serve(core, "a", random_ids(20, VOCAB_SIZE), SamplingParams(seed=1, max_tokens=120))

    stats = core.stats
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.98, stats


@pytest.mark.parametrize("length", [40, 64, 66, 67, 100, 129])
def test_a_hit_drafts_as_the_cold_run_did(length: int) -> None:
    prompt = random_ids(length, VOCAB_SIZE)
    core = make_engine(Settings(depth=FixedDepth(4)))
    assert isinstance(core.runner, RecordedRunner)
    runs = []
    for request_id in ("cold", "warm"):
        core.runner.steps.clear()
        serve(core, request_id, prompt, GREEDY)
        runs.append(drafts_of(core, prompt))

    assert core.stats.prefix_cache_hits_tokens > 0 or length == 40
    assert runs[0] == runs[1]
