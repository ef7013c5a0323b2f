"""`measure ranks` on a random model: both engines answer, and the ratio is theirs."""

from __future__ import annotations

import json

import pytest

from whalepod.tools.measure.__main__ import main

ARGUMENTS = [
    "ranks", "v3-nano", "--load-format", "dummy", "--dtype", "fp32", "--num-threads", "1",
    "--kv-cache-memory", "8M", "--max-model-len", "128", "--speculation", "off",
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
def test_a_group_and_one_engine_decode_the_same_batch(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-size", "3", "--max-tokens", "96", "--rounds", "2", "--json"]
    assert main([*ARGUMENTS, "--expert-parallel-size", "2", *flags]) == 0

    report = json.loads(capfd.readouterr().out)
    assert report["num_ranks"] == 2
    one, group = report["results"]
    assert (one["name"], group["name"]) == ("one engine", "2 ranks")
    for result in (one, group):
        assert len(result["turns"]) == 2
        assert all(turn["tokens_per_s"] > 0 for turn in result["turns"])
        assert all(turn["tokens_per_cpu_s"] > 0 for turn in result["turns"])
    assert report["ratio"] == pytest.approx(group["tokens_per_s"] / one["tokens_per_s"])


def test_one_rank_has_nothing_to_be_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 1
    assert "--expert-parallel-size must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--batch-size", "0"], ["--rounds", "0"], ["--max-tokens", "3"]])
def test_sizes_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main([*ARGUMENTS, *flags]) == 2
    assert "must be at least" in capsys.readouterr().err
