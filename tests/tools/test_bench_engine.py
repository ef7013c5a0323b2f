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


def test_every_depth_writes_the_same_and_figures_add_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--rounds", "1", "--batch-sizes", "1", "--batch-sizes", "3", "--json"]
    assert main([*ARGUMENTS, *flags]) == 0

    report = json.loads(capsys.readouterr().out)
    results = report["results"]
    depths = ["0", "1", "2", "3", "4", "adaptive"]
    assert [(r["batch_size"], r["depth"]) for r in results] == [
        (batch_size, depth) for batch_size in (1, 3) for depth in depths
    ]
    for result in results:
        (turn,) = result["turns"]
        assert turn["num_tokens"] == 12 * result["batch_size"]
        assert result["tokens_per_forward"] >= 1.0
        assert turn["num_accepted"] == sum(turn["accepted_by_position"])
    assert results[0]["speedup"] == results[6]["speedup"] == 1.0
    assert results[0]["mean_depth"] == 0.0
    assert results[4]["mean_depth"] > 1.5


def test_the_table_names_model_and_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--rounds", "2", "--batch-sizes", "1"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("v3-nano: float32, reference kernels, mtp + lookup")
    assert "1, adaptive" in out


def test_prompts_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [5, 6, 7]}\n\n{"prompt": [8, 9]}\n', encoding="utf-8")
    flags = ["--rounds", "1", "--batch-sizes", "1", "--prompts", str(file)]
    assert main([*ARGUMENTS, *flags]) == 0
    assert "1, 4" in capsys.readouterr().out


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
