"""`whalepod bench decode` and `prefill` on a random model: figures that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whalepod.tools.cli import main

ARGUMENTS = [
    "bench", "decode", "v3-nano", "--load-format", "dummy", "--dtype", "fp32",
    "--kernels", "reference", "--num-threads", "1", "--kv-cache-memory", "8M",
    "--max-model-len", "128", "--num-prompts", "1", "--max-tokens", "12", "--ignore-eos",
]  # fmt: skip


def test_a_rate_for_each_batch_size_and_its_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "2", "--batch-sizes", "1", "--batch-sizes", "3"]
    drafts = ["--speculation", "fixed", "--num-speculative-tokens", "2"]
    assert main([*ARGUMENTS, *flags, *drafts, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["batch_size"] for result in results] == [1, 3]
    for result in results:
        assert [turn["num_tokens"] for turn in result["turns"]] == [12 * result["batch_size"]] * 2
        assert result["tokens_per_forward"] >= 1.0
        assert result["mean_depth"] > 1.0
    assert main([*ARGUMENTS, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("v3-nano: float32, reference kernels, ")
    assert [line.split()[0] for line in lines[2:]] == ["batch", "1", "3"]


def test_prompts_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [5, 6, 7]}\n\n{"prompt": [8, 9]}\n', encoding="utf-8")
    flags = ["--rounds", "1", "--batch-sizes", "1", "--prompts", str(file)]
    assert main([*ARGUMENTS, *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--batch-sizes", "0"], "batch_sizes must be at least 1"),
        (["--batch-sizes", "9", "--max-num-seqs", "4"], "over --max-num-seqs"),
    ],
)
def test_impossible_measurements_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *flags]) != 0
    assert message in capsys.readouterr().err


PREFILL = [
    "bench", "prefill", "v3-nano", "--load-format", "dummy", "--dtype", "fp32", "--num-threads",
    "1", "--kv-cache-memory", "8M", "--max-model-len", "128", "--rounds", "2",
]  # fmt: skip


def test_prompts_are_timed_until_their_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "5", "--lengths", "70"]
    assert main([*PREFILL, *flags, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["num_tokens"] for result in results] == [5, 70]
    for result in results:
        rate = result["num_tokens"] / result["ttft_ms"] * 1e3
        assert result["tokens_per_s"] == pytest.approx(rate)

    assert main([*PREFILL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("v3-nano: float32")
    assert [line.split()[0] for line in lines[2:]] == ["tokens", "5", "70"]


@pytest.mark.parametrize(
    ("length", "message"),
    [("0", "lengths must be at least 1"), ("128", "leaves no room for a token")],
)
def test_bad_lengths_are_refused(
    length: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PREFILL, "--lengths", length]) != 0
    assert message in capsys.readouterr().err
