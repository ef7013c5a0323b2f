"""The model built from files: every stored tensor finds its place, FP8 and sharded included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.models.oracle import Sequences, oracle_logits, random_ids
from tests.models.test_weights_fp8 import write_twin
from whalepod.ep_comm.routed_experts import LocalPlacement
from whalepod.kernels.reference import ReferenceKernels
from whalepod.models.config import load_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.layout import checkpoint_tensors
from whalepod.models.synthetic import synthesize
from whalepod.models.weights import CheckpointWeights, DummyWeights, Weights, is_mtp_tensor

PARTIAL_BLOCKS = {"hidden_size": 160, "intermediate_size": 288, "q_lora_rank": 96}
"""Sizes that are no multiples of 128: the last block of a row or column is cut."""
TOKEN_IDS = random_ids(150, 512)


def build(folder: Path, weights: Weights, experts: range | None = None) -> DeepseekV3:
    config, kernels = load_config(folder), ReferenceKernels()
    assert config.gate is not None
    return DeepseekV3(
        config,
        weights,
        kernels,
        max_positions=512,
        absorbed_max_query_tokens=64,
        placement=LocalPlacement(kernels, config.gate.num_experts, experts),
    )


def logits(folder: Path, weights: Weights) -> torch.Tensor:
    return Sequences(build(folder, weights), [TOKEN_IDS]).run(len(TOKEN_IDS))[0]


def checkpoint_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    return logits(folder, CheckpointWeights(folder, load_config(folder), dtype=dtype))


@pytest.mark.parametrize("preset", ["v3-nano", "v2-nano"])
def test_the_model_of_a_checkpoint_equals_transformers(tmp_path: Path, preset: str) -> None:
    folder = synthesize(preset, tmp_path / "out", dtype="fp32", shard_bytes=1_000_000)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    ours, theirs = checkpoint_logits(folder, torch.float32), oracle_logits(oracle, TOKEN_IDS)

    assert (ours - theirs).abs().max() < 1e-4 * (theirs.max() - theirs.min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_an_fp8_checkpoint_equal_those_of_its_dequantised_twin(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    fp8 = synthesize("v3-nano", tmp_path / "fp8", dtype="fp8", overrides=PARTIAL_BLOCKS)
    twin = write_twin(fp8, tmp_path / "twin", dtype)

    assert torch.equal(checkpoint_logits(fp8, dtype), checkpoint_logits(twin, dtype))


def test_logits_of_an_fp8_checkpoint_equal_transformers_on_its_dequantised_twin(
    tmp_path: Path,
) -> None:
    fp8 = synthesize("v3-nano", tmp_path / "fp8", dtype="fp8", overrides=PARTIAL_BLOCKS)
    twin = write_twin(fp8, tmp_path / "twin", torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)

    ours, theirs = checkpoint_logits(fp8, torch.float32), oracle_logits(oracle, TOKEN_IDS)

    assert (ours - theirs).abs().max() < 1e-4 * (theirs.max() - theirs.min())


@pytest.mark.parametrize("preset", ["v3-nano", "v2-nano"])
def test_dummy_weights_make_the_model_of_the_synthetic_checkpoint(
    tmp_path: Path, preset: str
) -> None:
    folder = synthesize(preset, tmp_path / "out", seed=5)
    dummy = DummyWeights(load_config(folder), dtype=torch.bfloat16, seed=5)

    assert torch.equal(logits(folder, dummy), checkpoint_logits(folder, torch.bfloat16))


def test_a_rank_of_the_model_reads_all_but_the_experts_of_others(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "out", dtype="fp32")
    config = load_config(folder)
    weights = CheckpointWeights(folder, config, dtype=torch.float32)

    build(folder, weights, experts=range(2, 4))

    others = [f".experts.{expert}." for expert in (0, 1, 4, 5, 6, 7)]
    assert weights.bytes_read == sum(
        4 * torch.Size(shape).numel()
        for name, shape in checkpoint_tensors(config)
        if not is_mtp_tensor(name, config) and not any(other in name for other in others)
    )
