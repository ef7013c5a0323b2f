"""Speculation as `build_engine` puts it together, from the flags and the checkpoint."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import whalepod.models
from tests.equality import assert_bit_equal
from whalepod.models.synthetic import synthesize
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.local import Engine, Generation
from whalepod.server.errors import StartupError

LIMITS = {"max_model_len": 256, "num_threads": 1, "kv_cache_memory_bytes": 8_000_000}
INVARIANT = LIMITS | {"load_format": "dummy", "dtype": "fp32", "batch_invariant": True}
COPYING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={9: 100.0})


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (5, 63, 64, 130)]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=40, logprobs=0),
    SamplingParams(seed=6, max_tokens=20, logprobs=1, frequency_penalty=1, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True),
]


def generate(**options: object) -> list[Generation]:
    with Engine("v3-nano", **INVARIANT, **options) as engine:
        return [*engine.generate(prompts(), PARAMS), *engine.generate(prompts(), PARAMS)]


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_every_depth_gives_the_bits_of_no_depth(num_drafts: int) -> None:
    plain = generate(speculation="off")
    for expected, got in zip(plain, generate(num_speculative_tokens=num_drafts), strict=True):
        assert_bit_equal(
            expected.token_ids,
            [p.logprob for p in expected.logprobs],
            got.token_ids,
            [p.logprob for p in got.logprobs],
        )


def test_a_model_without_a_layer_looks_drafts_up_where_asked() -> None:
    options = {**LIMITS, "load_format": "dummy", "dtype": "fp32", "kernels": "reference"}
    with Engine("v2-nano", **options) as engine:
        assert engine._core.info.speculation == "off"
        plain = engine.generate([[5, 6, 7]], COPYING)
    with Engine("v2-nano", **options, num_speculative_tokens=3) as engine:
        assert engine._core.info.speculation.startswith("lookup, fixed at 3")
        assert engine.generate([[5, 6, 7]], COPYING)[0].token_ids == plain[0].token_ids
        assert engine._core.stats.num_steps < 14


def test_the_layer_must_be_there_if_it_is_asked_for() -> None:
    with pytest.raises(StartupError, match="num_nextn_predict_layers = 0"):
        Engine("v2-nano", **LIMITS, load_format="dummy", speculation_method="mtp")


# -- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "nano"
    synthesize("v3-nano", folder)
    return folder


def without(checkpoint: Path, folder: Path, word: str) -> Path:
    """Copy a checkpoint and leave out the tensors with `word` in their names."""
    shutil.copytree(checkpoint, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        kept = {name: tensor for name, tensor in tensors.items() if word not in name}
        save_file(kept, file)
    for index in folder.glob("*.index.json"):
        index.unlink()
    return folder


def load(folder: Path) -> Engine:
    return Engine(str(folder), **LIMITS, kernels="reference")


TINY = Path(whalepod.models.__file__).parent / "tiny"


def concat_swapped(tensors: dict[str, Tensor], layer: str) -> None:
    name = f"{layer}.eh_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


def projection_garbled(tensors: dict[str, Tensor], layer: str) -> None:
    order = torch.randperm(len(tensors[f"{layer}.eh_proj.weight"]), generator=torch.Generator())
    tensors[f"{layer}.eh_proj.weight"] = tensors[f"{layer}.eh_proj.weight"][order].contiguous()


def norm_left_at_zero(tensors: dict[str, Tensor], layer: str) -> None:
    tensors[f"{layer}.shared_head.norm.weight"].zero_()


def left_as_it_was(tensors: dict[str, Tensor], layer: str) -> None:
    """Change nothing."""


def changed_tiny(folder: Path, change: Callable[[dict[str, Tensor], str], None]) -> Path:
    """Copy the embedded model, which is trained, with other tensors in its draft layer."""
    shutil.copytree(TINY, folder)
    changed = False
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.4.eh_proj.weight" in tensors:
            change(tensors, "model.layers.4")
            save_file(tensors, file)
            changed = True
    assert changed
    return folder


@pytest.mark.parametrize("change", [concat_swapped, projection_garbled, norm_left_at_zero])
def test_a_garbled_layer_of_a_trained_model_is_reported_with_likely_causes(
    tmp_path: Path,
    change: Callable[[dict[str, Tensor], str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(changed_tiny(tmp_path / "tiny", change)).close()
    for part in ("multi-token prediction is broken", "eh_proj", "model.layers.4.*", "norms"):
        assert part in caplog.text


def test_the_layer_of_a_trained_model_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(changed_tiny(tmp_path / "tiny", left_as_it_was)).close()
    assert "broken" not in caplog.text
    assert "of first guesses are right" in caplog.text


def test_a_random_layer_is_reported_at_the_start(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(checkpoint) as engine:
        assert engine._core.info.speculation.startswith("mtp + lookup, adaptive up to 4")
    assert "multi-token prediction is broken" in caplog.text


def test_the_layer_of_an_fp8_checkpoint_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = synthesize("v3-nano", tmp_path / "fp8", dtype="fp8")
    with load(folder) as engine:
        assert engine._core.info.speculation.startswith("mtp")
        plain = engine.generate([[5, 6, 7]], COPYING)[0]
    assert len(plain.token_ids) == 24
    assert "guesses on the built-in prompts" in caplog.text


def test_a_checkpoint_without_the_whole_layer_is_served_without_drafts(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        load(without(checkpoint, tmp_path / "cut", "layers.3.")) as engine,
    ):
        assert engine._core.info.speculation == "off"
        assert len(engine.generate([[5, 6]], COPYING)[0].token_ids) == 24
    assert "no tensor of it: no drafts" in caplog.text


def test_several_layers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = without(checkpoint, tmp_path / "two", "nothing")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(StartupError, match="num_nextn_predict_layers is 2; at most 1"):
        load(folder)


@pytest.mark.parametrize("word", ["layers.3.eh_proj", "layers.3.mlp.experts.2.up_proj"])
def test_a_part_of_the_layer_that_is_missing_is_named(
    checkpoint: Path, tmp_path: Path, word: str
) -> None:
    with pytest.raises(StartupError, match=word):
        load(without(checkpoint, tmp_path / "cut", word))


def test_copies_of_embedding_and_head_are_not_needed(checkpoint: Path, tmp_path: Path) -> None:
    folder = without(checkpoint, tmp_path / "a", "layers.3.embed_tokens")
    with load(without(folder, tmp_path / "b", "layers.3.shared_head.head")) as engine:
        assert engine._core.info.speculation != "off"


def test_a_tensor_that_the_layer_has_no_place_for_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = without(checkpoint, tmp_path / "more", "nothing")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.3.self_attn.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file)
    with pytest.raises(StartupError, match=r"layers\.3\.self_attn\.extra\.weight is unexpected"):
        load(folder)
