"""MODEL may be `tiny`, a preset, a folder or a Hugging Face id; anything else gets a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest

import whalepod.models
from whalepod.models.config import load_config
from whalepod.models.source import SourceError, default_cache_folder, resolve_model


def test_tiny_is_package_data() -> None:
    expected = Path(whalepod.models.__file__).resolve().parent / "tiny"

    assert resolve_model("tiny").resolve() == expected


def test_an_existing_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_preset_is_written_to_the_cache_once(tmp_path: Path) -> None:
    first = resolve_model("v3-nano", cache_folder=tmp_path)
    written_ns = (first / "model.safetensors").stat().st_mtime_ns

    assert first.parent == tmp_path / "synth"
    assert resolve_model("v3-nano", cache_folder=tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_ns
    assert load_config(first).hidden_size == 128


def test_a_preset_for_dummy_weights_has_config_and_tokenizer_only(tmp_path: Path) -> None:
    folder = resolve_model("v3-layer", with_weights=False, cache_folder=tmp_path)

    assert load_config(folder).hidden_size == 7168
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_two_starts_at_once_share_one_cached_preset(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: resolve_model("v3-nano", cache_folder=tmp_path), range(4)))

    assert len(folders) == 1
    assert list((tmp_path / "synth").iterdir()) == list(folders)  # nothing partial is left


def test_a_huge_preset_is_not_put_into_the_cache(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"v2-lite would put \d+ GiB .*--load-format dummy"):
        resolve_model("v2-lite", cache_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "synth").write_text("in the way")

    with pytest.raises(SourceError, match=rf"v3-nano cannot be written to {tmp_path}"):
        resolve_model("v3-nano", cache_folder=tmp_path)


def test_something_in_a_presets_place_is_named(tmp_path: Path) -> None:
    folder = resolve_model("v3-nano", cache_folder=tmp_path, with_weights=False)
    shutil.rmtree(folder)
    folder.write_text("in the way")

    with pytest.raises(
        SourceError, match=rf"v3-nano cannot be written to {folder}: .* not an empty"
    ):
        resolve_model("v3-nano", cache_folder=tmp_path, with_weights=False)


@pytest.mark.parametrize("with_weights", [True, False])
def test_dummy_weights_download_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_weights: bool
) -> None:
    wanted: list[str] = []

    def snapshot(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("some-lab/some-model", with_weights=with_weights) == tmp_path
    assert ("*.safetensors" in wanted) == with_weights
    assert "*.json" in wanted


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "whalepod"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_folder() == Path("/home/someone/.cache/whalepod")


@pytest.mark.parametrize(
    "model", ["", "v3-giant", "/no/such/folder", "a/b/c", "../x", "a b/c", "a\0b", "x" * 5000]
)
def test_anything_else_lists_what_is_accepted(model: str) -> None:
    with pytest.raises(SourceError, match=r"folder that exists, a Hugging Face id .*v3-nano"):
        resolve_model(model)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()

    with pytest.raises(SourceError, match="is a file; give the folder"):
        resolve_model(str(file))


@pytest.mark.parametrize("model", ["tiny", "v3-nano", "."])
def test_a_revision_needs_a_hugging_face_id(model: str) -> None:
    with pytest.raises(SourceError, match=rf"revision 'main' needs .* MODEL is '{model}'"):
        resolve_model(model, "main")


@pytest.mark.parametrize("setting", ["HF_ENDPOINT=http://127.0.0.1:9", "HF_HUB_OFFLINE=1"])
def test_a_hub_id_without_a_network_gives_one_sentence(tmp_path: Path, setting: str) -> None:
    # huggingface_hub reads its settings when it is imported, so this takes a process of its own
    code = (
        "from whalepod.models.source import SourceError, resolve_model\n"
        "try: resolve_model('some-lab/some-model', 'v1')\n"
        "except SourceError as error: print(error)\n"
    )
    key, value = setting.split("=", 1)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {key: value, "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        "some-lab/some-model is no folder here, and cannot be downloaded from Hugging Face at "
        "revision v1: the hub cannot be reached and the files are not in the local cache\n"
    )
