"""Logits against transformers' on random tiny models: every family, attention form and chunk."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.equality import Fp64Oracle, ToleratedDifferences
from tests.models.oracle import (
    V2,
    YARN,
    Sequences,
    make_model,
    make_oracle,
    oracle_logits,
    random_ids,
)
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import Kernels
from whalepod.kernels.reference import ReferenceKernels

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000)
CHUNKS = (1, 7, 64, 100)
TOLERANCE = 1e-4
"""Of the range of the logits."""

FAMILIES: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3-yarn": {"rope_parameters": YARN},
    "v3-yarn-factor-only": {
        "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}
    },
    "v3-yarn-two-mscales": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "v3-yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 1.3}},
    "v3-yarn-not-truncated": {"rope_parameters": YARN | {"truncate": False}},
    "v3-no-q-lora": {"q_lora_rank": None},
    "v3-no-q-lora-yarn": {"q_lora_rank": None, "rope_parameters": YARN},
    "v3-halves-rope": {"rope_interleave": False, "rope_parameters": YARN},
    "v3-no-groups": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "v3-tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "v2": {"model_type": "deepseek_v2", **V2, "routed_scaling_factor": 16.0},
    "v2-yarn": {"model_type": "deepseek_v2", **V2, "rope_parameters": YARN},
    "v2-lite": {
        "model_type": "deepseek_v2",
        **V2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "rope_parameters": YARN,
    },
}


@functools.cache
def oracle_of(family: str) -> PreTrainedModel:
    return make_oracle(**FAMILIES[family])


@functools.cache
def texts_and_logits(family: str) -> tuple[list[list[int]], list[Tensor]]:
    oracle = oracle_of(family)
    texts = [random_ids(n, oracle.config.vocab_size, seed=n) for n in LENGTHS]
    return texts, [oracle_logits(oracle, text) for text in texts]


def assert_parity(
    family: str, chunk: int, absorbed_max: int, kernels: Kernels, longest: int = max(LENGTHS)
) -> None:
    """Run texts of all lengths side by side in chunks and compare every logit."""
    texts, expected = texts_and_logits(family)
    count = LENGTHS.index(longest) + 1
    texts, expected = texts[:count], expected[:count]
    model = make_model(oracle_of(family), kernels, absorbed_max_query_tokens=absorbed_max)
    for text, ours, theirs in zip(
        texts, Sequences(model, texts, seed=chunk).run(chunk), expected, strict=True
    ):
        error = (ours - theirs).abs().max() / (theirs.max() - theirs.min())
        assert error <= TOLERANCE, f"length {len(text)}: {error:.1e} of the logits' range"


ABSORBED, EXPANDED = 1 << 30, 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("chunk", "absorbed_max"), [(100, EXPANDED), (64, ABSORBED)])
def test_logits_equal_transformers(family: str, chunk: int, absorbed_max: int) -> None:
    assert_parity(family, chunk, absorbed_max, ReferenceKernels())


@pytest.mark.parametrize(
    ("family", "chunk", "absorbed_max", "longest"),
    [
        ("v3-yarn", 1, ABSORBED, 129),
        ("v3", 1, EXPANDED, 129),
        ("v2-yarn", 7, ABSORBED, 1000),
        ("v3-no-q-lora", 7, EXPANDED, 1000),
    ],
)
def test_logits_equal_transformers_in_short_chunks(
    family: str, chunk: int, absorbed_max: int, longest: int
) -> None:
    assert_parity(family, chunk, absorbed_max, ReferenceKernels(), longest)


@pytest.mark.parametrize("family", ["v3-yarn", "v2-lite"])
def test_batch_invariant_logits_equal_transformers(family: str) -> None:
    assert_parity(family, 100, ABSORBED, CpuKernels(is_invariant=True))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("absorbed_max", [ABSORBED, EXPANDED])
def test_logits_equal_transformers_on_the_full_grid(
    family: str, chunk: int, absorbed_max: int
) -> None:
    assert_parity(family, chunk, absorbed_max, ReferenceKernels())


def test_item_70_logits_of_a_long_text_equal_transformers() -> None:
    """The last chunk attends to all before it; lengths up to 1,000 are compared above."""
    length = 4096
    oracle = make_oracle(rope_parameters=YARN, max_position_embeddings=length)
    text = random_ids(length, oracle.config.vocab_size, seed=length)
    expected = oracle_logits(oracle, text)
    model = make_model(oracle, ReferenceKernels())

    (got,) = Sequences(model, [text], seed=1).run(512)

    error = (got - expected).abs().max() / (expected.max() - expected.min())
    assert error <= TOLERANCE, f"{error:.1e} of the logits' range"


def test_a_step_may_mix_decodes_chunks_and_idle_requests() -> None:
    texts, expected = texts_and_logits("v3-yarn")
    model = make_model(oracle_of("v3-yarn"), ReferenceKernels(), absorbed_max_query_tokens=4)
    run = Sequences(model, texts)
    run.step([1, 62, 60, 64, 127, 0, 129, 500])
    logits = run.step([0, 1, 4, 1, 0, 128, 0, 300])

    places = [(1, 62), *((2, 60 + i) for i in range(4)), (3, 64)]
    places += [*((5, i) for i in range(128)), *((7, 500 + i) for i in range(300))]
    theirs = torch.stack([expected[text][position] for text, position in places])
    assert (logits - theirs).abs().max() <= TOLERANCE * (theirs.max() - theirs.min())


def test_a_batch_without_tokens_gives_no_hidden_states() -> None:
    model = make_model(oracle_of("v3"), ReferenceKernels(), absorbed_max_query_tokens=4)
    assert Sequences(model, [[1, 2, 3]]).step([0]).shape == (0, 96)


def test_greedy_text_equals_transformers_up_to_near_ties() -> None:
    oracle = oracle_of("v3-yarn")
    model = make_model(oracle, ReferenceKernels())
    differences = ToleratedDifferences(Fp64Oracle(oracle))
    prompts = [random_ids(20, 96, seed=n) for n in range(50)]
    theirs = oracle.generate(
        torch.tensor(prompts), max_new_tokens=16, do_sample=False, eos_token_id=None
    )[:, 20:].tolist()
    run = Sequences(model, [prompt + [0] * 16 for prompt in prompts])
    last = run.step([20] * 50)[19::20]
    for i in range(16):
        for sequence, token in zip(run.token_ids, last.argmax(-1).tolist(), strict=True):
            sequence[20 + i] = token
        last = run.step([1] * 50)
    for prompt, expected, sequence in zip(prompts, theirs, run.token_ids, strict=True):
        differences.compare(prompt, expected, sequence[20:])
    differences.finish()


def test_bf16_is_as_close_to_fp32_as_transformers_bf16() -> None:
    oracle = make_oracle(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    prompts = torch.stack([torch.tensor(random_ids(40, 512, seed=n)) for n in range(64)])
    with torch.no_grad():
        exact = oracle(prompts, use_cache=False).logits.flatten(0, 1)
        theirs = _in_bf16(oracle)(prompts, use_cache=False).logits.flatten(0, 1)
    for absorbed_max in (ABSORBED, EXPANDED):
        model = make_model(
            oracle,
            ReferenceKernels(),
            absorbed_max_query_tokens=absorbed_max,
            dtype=torch.bfloat16,
        )
        ours = torch.cat(Sequences(model, prompts.tolist()).run(40))
        assert _mean_kl(exact, ours) <= 1.2 * _mean_kl(exact, theirs), absorbed_max


def _in_bf16(oracle: PreTrainedModel) -> PreTrainedModel:
    """Round as `from_pretrained(dtype=torch.bfloat16)` does: routers stay in fp32."""
    rounded = copy.deepcopy(oracle).to(torch.bfloat16)
    state = oracle.state_dict()
    for name, module in rounded.named_modules():
        if name.endswith("mlp.gate"):
            module.float()
            module.weight.data.copy_(state[f"{name}.weight"])
            module.e_score_correction_bias.copy_(state[f"{name}.e_score_correction_bias"])
    return rounded


def _mean_kl(exact: Tensor, other: Tensor) -> float:
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
