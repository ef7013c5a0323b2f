"""Damaged checkpoints are refused with WeightsError and never with anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, strategies as st

from whalepod.models.checkpoint_files import INDEX_NAME
from whalepod.models.config import load_config
from whalepod.models.layout import checkpoint_tensors
from whalepod.models.presets import smaller
from whalepod.models.synthetic import synthesize
from whalepod.models.weights import CheckpointWeights, WeightsError

SMALLEST = smaller("v3-nano", num_layers=1, num_experts=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "nano"
    return synthesize("v3-nano", out, dtype="fp8", overrides=SMALLEST)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "sharded"
    return synthesize(
        "v3-nano",
        out,
        overrides=SMALLEST,
        shard_bytes=200_000,
    )


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    config = load_config(folder)
    weights = CheckpointWeights(folder, config, dtype=torch.bfloat16)
    tensors = {name: weights.take(name, shape) for name, shape in checkpoint_tensors(config)}
    weights.finish()
    return tensors


def damage(whole: Path, file_name: str, data: bytes) -> Path:
    """Write `data` as one file of an otherwise whole copy of the checkpoint."""
    copy = whole.with_name(whole.name + "_damaged")
    if not copy.exists():
        shutil.copytree(whole, copy)
    (copy / file_name).unlink()  # never write into a file that may still be mapped
    (copy / file_name).write_bytes(data)
    return copy


def assert_refused_or_unchanged(damaged: Path, whole: Path) -> None:
    """A damaged byte may be one that means nothing (padding, metadata); no other is let through."""
    try:
        tensors = load_all(damaged)
    except WeightsError:
        return
    expected = load_all(whole)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@given(data=st.data())
def test_flipped_bytes_in_a_header(folder: Path, data: st.DataObject) -> None:
    whole = bytearray((folder / "model.safetensors").read_bytes())
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    places = st.one_of(st.integers(0, 7), st.integers(8, 400), st.integers(0, header_bytes - 1))
    flips = data.draw(st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=3))
    for place, bits in flips:
        whole[place] ^= bits

    assert_refused_or_unchanged(damage(folder, "model.safetensors", whole), folder)


@given(kept=st.floats(0, 1, exclude_max=True), tail=st.binary(max_size=20))
@example(kept=0.0, tail=b"")
@example(kept=0.0, tail=b"\xff" * 8)
@example(kept=0.0, tail=b"\x02\0\0\0\0\0\0\0{}")
@example(kept=0.0, tail=b"\x02\0\0\0\0\0\0\0[]")
def test_truncated_files(folder: Path, kept: float, tail: bytes) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    cut = whole[: int(kept * (len(whole) - 21))] + tail
    damaged = damage(folder, "model.safetensors", cut)

    with pytest.raises(WeightsError):
        load_all(damaged)


@given(data=st.data())
def test_flipped_bytes_in_an_index(sharded: Path, data: st.DataObject) -> None:
    index = bytearray((sharded / INDEX_NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        index[data.draw(st.integers(0, len(index) - 1))] ^= data.draw(st.integers(1, 255))

    assert_refused_or_unchanged(damage(sharded, INDEX_NAME, index), sharded)
