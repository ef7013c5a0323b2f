"""`whalepod bench decode` on a random model: figures that add up, for every depth."""

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
    for step, batch_size in zip(report["steps"], (1, 3), strict=True):
        assert (step["batch_size"], step["num_steps"] > 30) == (batch_size, True)
        assert set(step["median_us"]) == {"scheduler", "batch", "model", "sampler", "wire", "loop"}
        assert min(step["least_us"].values()) > 0


def test_the_table_names_model_and_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--rounds", "2", "--batch-sizes", "1"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("v3-nano: float32, reference kernels, mtp + lookup")
    assert "1, adaptive" in out


def test_the_model_alone_is_measured_without_an_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--rounds", "1", "--batch-sizes", "1", "--batch-sizes", "3", "--model-only"]
    assert main([*ARGUMENTS, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["num_requests"], r["num_tokens"]) for r in report["roofs"]] == [(1, 1), (3, 1)]
    for roof in report["roofs"]:
        assert roof["tokens_per_s"] == pytest.approx(1e3 * roof["num_requests"] / roof["step_ms"])
        assert roof["share_of_read_limit"] > 0
    assert main([*ARGUMENTS, *flags]) == 0
    assert capsys.readouterr().out.startswith("v3-nano:\nrequests x tokens")


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
