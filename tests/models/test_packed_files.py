"""Packed weights in files: what a second start maps, and what makes it pack again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import Packed
from whalepod.models.packed_files import MAX_FOLDERS, PackedFiles, fingerprint

KERNELS = CpuKernels(num_threads=1)
WEIGHT = torch.randn(20, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
X = torch.randn(3, 33, generator=torch.Generator().manual_seed(1)).bfloat16()


class Start:
    """One start of an engine with a dense weight and two experts."""

    def __init__(self, folder: Path, experts: str = "0-2") -> None:
        files = PackedFiles(folder, experts)
        self.num_made = 0
        self.linear, self.names = files.get("o", KERNELS, False, self.make_linear)
        self.experts, _ = files.get("experts", KERNELS, True, self.make_experts)
        files.save()

    def make_linear(self) -> tuple[Packed, list[str]]:
        self.num_made += 1
        return KERNELS.pack_linear(WEIGHT), ["o.weight"]

    def make_experts(self) -> tuple[Packed, list[str]]:
        self.num_made += 1
        gate_up = WEIGHT.expand(2, 20, 33).contiguous()
        return KERNELS.pack_experts(gate_up, torch.ones(2, 33, 10).bfloat16()), []


def test_a_second_start_maps_what_the_first_made(tmp_path: Path) -> None:
    first, second = Start(tmp_path / "key"), Start(tmp_path / "key")
    assert (first.num_made, second.num_made) == (2, 0)
    assert second.names == ["o.weight"]
    assert torch.equal(KERNELS.linear(X, second.linear), KERNELS.linear(X, first.linear))
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    expected = KERNELS.experts(X, ids, weights, first.experts)
    assert torch.equal(KERNELS.experts(X, ids, weights, second.experts), expected)
    assert second.linear.address % 64 == 0


def test_experts_that_move_are_written_over_in_memory_and_not_in_the_file(tmp_path: Path) -> None:
    Start(tmp_path / "key")
    path = tmp_path / "key" / "experts-0-2.safetensors"
    before, mapped = path.read_bytes(), Start(tmp_path / "key")
    for part in KERNELS.packed_parts(mapped.experts)[0]:
        part.zero_()
    assert path.read_bytes() == before
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    assert not KERNELS.experts(X, ids, weights, mapped.experts).any()


def test_a_rank_with_other_experts_shares_the_dense_file(tmp_path: Path) -> None:
    Start(tmp_path / "key")
    assert Start(tmp_path / "key", experts="2-4").num_made == 1
    names = {path.name for path in (tmp_path / "key").iterdir()}
    assert names == {"dense.safetensors", "experts-0-2.safetensors", "experts-2-4.safetensors"}


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None])
def test_a_broken_file_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    Start(tmp_path / "key")
    path = tmp_path / "key" / "dense.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 64] if damage is None else damage)
    assert Start(tmp_path / "key").num_made == 1
    assert path.read_bytes() == whole
    assert Start(tmp_path / "key").num_made == 0


def test_no_more_folders_than_allowed_are_kept(tmp_path: Path) -> None:
    for i in range(MAX_FOLDERS + 2):
        Start(tmp_path / f"key{i}")
        os.utime(tmp_path / f"key{i}", (i, i))
    Start(tmp_path / "last")
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == MAX_FOLDERS
    assert "last" in names
    assert "key0" not in names


def test_a_folder_that_vanishes_meanwhile_does_not_stop_a_start(tmp_path: Path) -> None:
    (tmp_path / "vanished").symlink_to(tmp_path / "nowhere")
    assert Start(tmp_path / "key").num_made == 2
    assert Start(tmp_path / "key").num_made == 0


def test_what_a_killed_start_left_is_removed_and_what_is_being_written_stays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "key"
    folder.mkdir()
    for name, mtime in (("partial-old", 1), ("partial-new", None)):
        (folder / name).write_bytes(b"x")
        if mtime:
            os.utime(folder / name, (mtime, mtime))
    Start(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"partial-new", "dense.safetensors", "experts-0-2.safetensors"}


def test_a_fingerprint_follows_content_and_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))
    first = fingerprint(tmp_path, "a")
    assert fingerprint(tmp_path, "a") == first
    assert fingerprint(tmp_path, "b") != first
    (tmp_path / "model.safetensors").write_bytes(bytes(9_999) + b"x")
    assert fingerprint(tmp_path, "a") != first
