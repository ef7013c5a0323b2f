"""`measure drafts` on a random model: figures that add up, for every depth."""

from __future__ import annotations

import json

import pytest

from whalepod.tools.measure.__main__ import main

ARGUMENTS = [
    "drafts", "v3-nano", "--load-format", "dummy", "--dtype", "fp32",
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
    assert ["1", "adaptive"] in [line.split()[:2] for line in out.splitlines()]
