"""Machine code is kept where the caller says, for each signature apart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from whalepod.kernels.cpu.abi import ParallelKernel, arguments, record
from whalepod.kernels.cpu.compile_cache import compiled
from whalepod.kernels.cpu.simd import store
from whalepod.kernels.cpu.thread_pool import ThreadPool, new_function

_Answer = record("out:i64")


def _answer_kernel(block):  # type: ignore[no-untyped-def]
    store(arguments(block, _Answer).out, 0, 42)


ANSWER = ParallelKernel(_answer_kernel, _Answer)


def _double(x):  # type: ignore[no-untyped-def]
    return x + x


def run_answer(folder: Path, dtype: torch.dtype) -> bool:
    """Compile, as another process would, and run; return whether it was found in the folder."""
    function = new_function(ANSWER, dtype)
    function.keep_in(folder)
    function.compile()
    out = torch.zeros(1, dtype=torch.int64)
    ThreadPool(1, folder).run(ANSWER, dtype, 1, _Answer(out.data_ptr()))
    assert int(out) == 42
    return function.cache_hits == 1


def test_code_goes_where_the_caller_says_and_is_found_again(tmp_path: Path) -> None:
    assert not run_answer(tmp_path, torch.float32)
    assert run_answer(tmp_path, torch.float32), "the second start compiles nothing"
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    beside = Path(__file__).parent / "__pycache__"
    assert not list(beside.glob("*_answer_kernel*.nb?"))


def test_two_dtypes_never_share_a_file(tmp_path: Path) -> None:
    """Else of two processes that start at once one could leave its code under the other's name."""
    run_answer(tmp_path / "a", torch.float32)
    run_answer(tmp_path / "b", torch.bfloat16)
    names = [{file.name for file in (tmp_path / part).rglob("*.nb?")} for part in "ab"]
    assert all(len(found) == 2 for found in names)
    assert not names[0] & names[1]


def test_functions_that_are_called_from_python_are_kept_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    for is_first in (True, False):
        function = compiled(_double)
        assert function(21) == 42
        assert len(function.stats.cache_misses if is_first else function.stats.cache_hits) == 1
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_a_folder_that_cannot_be_written_is_named_and_does_not_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert not run_answer(folder, torch.float32)
    assert str(folder) in caplog.text


def test_A9_a_function_is_compiled_also_where_no_cache_can_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only root file system, or a user without a home."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    function = compiled(_double)
    assert function(2) == 4
    assert "no locator available" in caplog.text
