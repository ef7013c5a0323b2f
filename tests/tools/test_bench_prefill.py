"""`whalepod bench prefill` on a random model: figures that add up."""

from __future__ import annotations

import json

import pytest

from whalepod.tools.cli import main

ARGUMENTS = [
    "bench", "prefill", "v3-nano", "--load-format", "dummy", "--dtype", "fp32", "--num-threads",
    "1", "--rounds", "1", "--lengths", "5", "--lengths", "70",
]  # fmt: skip


def test_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json"]) == 0

    short, long = json.loads(capsys.readouterr().out)["results"]
    assert (short["num_tokens"], long["num_tokens"]) == (5, 70)
    for result in (short, long):
        rate = result["num_tokens"] / result["step_ms"] * 1e3
        assert result["tokens_per_s"] == pytest.approx(rate)
        assert result["share_of_read_limit"] > 0
        assert 0 < result["share_of_gemm_limit"] < 2
        names = {stage["name"] for stage in result["stages"]}
        assert {"experts", "route", "linear_f32", "gated_mlp"} <= names
    assert short["bytes_per_token"] > long["bytes_per_token"]
    assert any(stage["name"] == "mla_prefill" for stage in long["stages"])


def test_the_tables_name_limits_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0

    out = capsys.readouterr().out
    assert "of read limit" in out
    assert "of GEMM limit" in out
    assert "1 x 70 tokens, context 0:" in out


def test_bad_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "v3-nano", "--lengths", "0"]) != 0
    assert "lengths must be at least 1" in capsys.readouterr().err
