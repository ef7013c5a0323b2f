"""Checkpoints are read by name, exactly as the model needs them, or refused with one sentence."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from whalepod.models.checkpoint_files import INDEX_NAME
from whalepod.models.config import ModelConfig, load_config
from whalepod.models.layout import checkpoint_tensors
from whalepod.models.synthetic import synthesize
from whalepod.models.weights import (
    CheckpointWeights,
    DummyWeights,
    Weights,
    WeightsError,
    is_mtp_tensor,
)

NORM = "model.norm.weight"
Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize("v3-nano", tmp_path_factory.mktemp("weights") / "nano")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("weights") / "sharded"
    return synthesize("v3-nano", out, shard_bytes=300_000)


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """Copy a one-file checkpoint with its tensors changed."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def open_weights(folder: Path, dtype: torch.dtype = torch.bfloat16) -> CheckpointWeights:
    return CheckpointWeights(folder, load_config(folder), dtype=dtype)


def take_main_model(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    return {
        name: weights.take(name, shape)
        for name, shape in checkpoint_tensors(config)
        if not is_mtp_tensor(name, config)
    }


def load(folder: Path) -> dict[str, torch.Tensor]:
    weights = open_weights(folder)
    tensors = take_main_model(weights, load_config(folder))
    weights.finish()
    return tensors


def test_a_sharded_checkpoint_equals_a_single_file(nano: Path, sharded: Path) -> None:
    assert (sharded / INDEX_NAME).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 3

    single, many = load(nano), load(sharded)

    assert single.keys() == many.keys()
    assert all(torch.equal(single[name], many[name]) for name in single)


def test_shards_without_an_index_are_found_by_their_headers(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    (folder / INDEX_NAME).unlink()

    assert load(folder).keys() == load(sharded).keys()


def test_a_tensor_of_the_wanted_dtype_is_a_view_of_the_mapped_file(nano: Path) -> None:
    tensor = open_weights(nano).take(NORM, (128,))

    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert line.endswith(str(nano / "model.safetensors"))
            return
    pytest.fail("the tensor lies in no mapping")


def test_the_dtype_of_a_take_wins_over_the_dtype_of_the_model(nano: Path) -> None:
    weights = open_weights(nano, torch.float32)

    assert weights.take(NORM, (128,)).dtype is torch.float32
    assert weights.take(NORM, (128,), torch.bfloat16).dtype is torch.bfloat16


def test_the_prefix_model_is_optional_in_file_and_take(nano: Path, tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    bare = edited(nano, tmp_path, strip)

    assert load(bare).keys() == load(nano).keys()
    assert torch.equal(
        open_weights(nano).take("norm.weight", (128,)), open_weights(bare).take(NORM, (128,))
    )
    assert open_weights(bare).mtp_names() == open_weights(nano).mtp_names()


def test_a_rank_reads_only_the_bytes_of_its_own_experts(nano: Path) -> None:
    config = load_config(nano)
    weights = open_weights(nano)
    mine = 0
    for name, shape in checkpoint_tensors(config):
        if is_mtp_tensor(name, config):
            continue
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= 2:
            weights.leave(name)
        else:
            mine += weights.take(name, shape, torch.bfloat16).numel() * 2
            mine += 2 * shape[0] if "e_score" in name else 0  # stored in f32
    weights.finish()

    assert weights.bytes_read == mine
    assert mine < 0.6 * (nano / "model.safetensors").stat().st_size


def test_a_tensor_taken_twice_counts_once(nano: Path) -> None:
    weights = open_weights(nano)

    first, second = weights.take(NORM, (128,)), weights.take(NORM, (128,))

    assert torch.equal(first, second)
    assert weights.bytes_read == 256


def test_progress_ends_at_the_size_of_all_files(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = load_config(sharded)
    weights = CheckpointWeights(
        sharded, config, dtype=torch.bfloat16, progress=lambda *call: calls.append(call)
    )
    take_main_model(weights, config)
    weights.finish()

    total = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert calls == sorted(calls)
    assert calls[0][0] < total == calls[-1][0]
    assert {call[1] for call in calls} == {total}


# -- what is wrong with a tensor is said before the model runs ------------------------------------


def test_a_missing_tensor_is_named(nano: Path, tmp_path: Path) -> None:
    folder = edited(nano, tmp_path, lambda tensors: tensors.pop(NORM))

    with pytest.raises(WeightsError, match=rf"{tmp_path.name}: tensor {NORM} is missing"):
        load(folder)


def test_an_unexpected_tensor_is_named_with_its_file(nano: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.extra.weight"
    folder = edited(nano, tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))

    with pytest.raises(
        WeightsError, match=rf"model.safetensors: tensor {name} .*\[3, 5\] is unexpected"
    ):
        load(folder)


def test_an_expert_that_nobody_took_or_left_is_unexpected(nano: Path) -> None:
    config = load_config(nano)
    weights = open_weights(nano)
    for name, shape in checkpoint_tensors(config):
        if "experts.7.up" not in name:
            weights.take(name, shape)

    with pytest.raises(WeightsError, match=r"experts.7.up_proj.weight .* \(and 1 more\)"):
        weights.finish()


def test_a_misshapen_tensor_is_named_with_both_shapes(nano: Path) -> None:
    with pytest.raises(
        WeightsError,
        match=r"model.safetensors: tensor model.norm.weight has shape \[128\], .* \[127\]",
    ):
        open_weights(nano).take(NORM, (127,))


def test_a_transposed_weight_is_refused(nano: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].T.contiguous()

    with pytest.raises(WeightsError, match=rf"{name} has shape \[128, 256\], .*\[256, 128\]"):
        load(edited(nano, tmp_path, transpose))


def test_integer_weights_are_refused(nano: Path, tmp_path: Path) -> None:
    folder = edited(
        nano, tmp_path, lambda tensors: tensors.update({NORM: torch.ones(128, dtype=torch.int8)})
    )

    with pytest.raises(WeightsError, match=rf"{NORM} is I8; weights may be"):
        load(folder)


def test_the_same_tensor_in_two_files_is_refused(nano: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nano, tmp_path / "copy")
    save_file({"norm.weight": torch.ones(128)}, folder / "other.safetensors")

    with pytest.raises(WeightsError, match=r"other.safetensors: tensor norm.weight is also"):
        open_weights(folder)


# -- what is known to be left over is accepted ------------------------------------------------


def test_leftover_rotary_frequencies_are_accepted(nano: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(edited(nano, tmp_path, lambda tensors: tensors.update({name: torch.zeros(16)})))


def test_a_repeated_head_of_a_tied_model_is_accepted(nano: Path) -> None:
    config = dataclasses.replace(load_config(nano), tie_word_embeddings=True)
    weights = CheckpointWeights(nano, config, dtype=torch.bfloat16)
    take_main_model(weights, config)
    weights.finish()


def test_mtp_tensors_are_kept_and_can_be_taken_after_finish(nano: Path) -> None:
    config = load_config(nano)
    weights = open_weights(nano)
    take_main_model(weights, config)
    weights.finish()

    assert "layers.3.eh_proj.weight" in weights.mtp_names()
    assert all(name.startswith("layers.3.") for name in weights.mtp_names())
    assert weights.take("model.layers.3.eh_proj.weight", (128, 256)).shape == (128, 256)


def test_an_mtp_layer_that_the_config_does_not_mention_is_unexpected(nano: Path) -> None:
    config = dataclasses.replace(load_config(nano), num_mtp_layers=0)
    weights = CheckpointWeights(nano, config, dtype=torch.bfloat16)
    take_main_model(weights, config)

    with pytest.raises(WeightsError, match=r"model.layers.3.* is unexpected"):
        weights.finish()


def test_the_mtp_layer_is_told_by_its_index_whatever_the_prefix(nano: Path) -> None:
    config = dataclasses.replace(load_config(nano), num_layers=61)

    assert is_mtp_tensor("layers.61.enorm.weight", config)
    assert is_mtp_tensor("model.layers.61.self_attn.o_proj.weight", config)
    for name in ("layers.60.x.weight", "model.layers.62.x.weight", "layers.6.x", "lm_head.weight"):
        assert not is_mtp_tensor(name, config)


# -- broken folders ---------------------------------------------------------------------------


def with_files(nano: Path, folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(nano / "config.json", folder)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_without_weights_says_so(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors file"):
        open_weights(with_files(nano, tmp_path, {}))


def test_pickle_files_are_never_opened(nano: Path, tmp_path: Path) -> None:
    opened = tmp_path / "opened"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return opened.touch, ()

    bomb = pickle.dumps(Bomb())
    folder = with_files(nano, tmp_path, {"pytorch_model.bin": bomb})
    with pytest.raises(WeightsError, match=r"pytorch_model.bin but no \*\.safetensors"):
        open_weights(folder)

    (folder / "model.safetensors").write_bytes(bomb)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        open_weights(folder)
    assert not opened.exists()


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 100, 20_000, -1])
def test_a_truncated_file_is_refused(nano: Path, tmp_path: Path, kept_bytes: int) -> None:
    whole = (nano / "model.safetensors").read_bytes()
    folder = with_files(nano, tmp_path, {"model.safetensors": whole[:kept_bytes]})

    with pytest.raises(WeightsError, match=r"model.safetensors is not a whole safetensors file"):
        load(folder)


def test_a_truncated_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-10])

    with pytest.raises(WeightsError, match=rf"{shard.name} is not a whole"):
        load(folder)


def test_a_missing_shard_is_named_before_anything_is_read(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.unlink()

    with pytest.raises(WeightsError, match=rf"in {shard.name}, which does not exist .*complete"):
        open_weights(folder)


def test_a_tensor_that_is_not_in_its_indexed_file_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "copy")
    index = json.loads((folder / INDEX_NAME).read_text())
    wrong = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"][NORM] = wrong
    (folder / INDEX_NAME).write_text(json.dumps(index))

    with pytest.raises(WeightsError, match=rf"{wrong}: tensor {NORM} cannot be found"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {"a": 3}}', "not the name of a file"),
        (b'{"weight_map": {"a": "../a.safetensors"}}', "not the name of a file"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file"),
    ],
)
def test_a_broken_index_is_named(nano: Path, tmp_path: Path, index: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=rf"{INDEX_NAME}.*{message}"):
        open_weights(with_files(nano, tmp_path, {INDEX_NAME: index}))


# -- dummy weights ----------------------------------------------------------------------------


def test_dummy_weights_do_not_depend_on_the_order_of_takes(nano: Path) -> None:
    config = load_config(nano)
    shapes = dict(checkpoint_tensors(config))

    def make(names: list[str], seed: int) -> dict[str, torch.Tensor]:
        weights = DummyWeights(config, dtype=torch.bfloat16, seed=seed)
        return {name: weights.take(name, shapes[name]) for name in names}

    forward, backward = make(list(shapes), 1), make(list(shapes)[::-1], 1)
    assert all(torch.equal(forward[name], backward[name]) for name in shapes)
    other_seed = make(list(shapes), 2)
    assert not any(torch.equal(forward[name], other_seed[name]) for name in shapes)


def test_dummy_weights_equal_the_synthetic_checkpoint_of_the_same_seed(nano: Path) -> None:
    dummy = DummyWeights(load_config(nano), dtype=torch.bfloat16, seed=0)

    made = take_main_model(dummy, load_config(nano))

    assert all(torch.equal(made[name], tensor) for name, tensor in load(nano).items())


def test_dummy_weights_differ_between_dtypes_by_rounding_only(nano: Path) -> None:
    name, shape = "model.layers.0.mlp.up_proj.weight", (2000, 600)  # more than one piece
    exact, rounded = (
        DummyWeights(load_config(nano), dtype=dtype, seed=3).take(name, shape)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact.bfloat16(), rounded)
    assert exact.std().item() == pytest.approx(600**-0.5, rel=0.01)
    assert abs(exact.mean().item()) < 1e-3
