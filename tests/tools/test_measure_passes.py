"""`measure decode`, `prefill` and `steps` on a random model: figures that add up."""

from __future__ import annotations

import json

import pytest

from whalepod.tools.measure.__main__ import main

MODEL = ["v3-nano", "--load-format", "dummy", "--dtype", "fp32", "--num-threads", "1"]
PREFILL = ["prefill", *MODEL, "--rounds", "1", "--lengths", "5", "--lengths", "70"]
SIZES = ["--rounds", "1", "--batch-sizes", "1", "--batch-sizes", "3"]


def test_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREFILL, "--json"]) == 0

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
    assert main(PREFILL) == 0

    out = capsys.readouterr().out
    assert "of read limit" in out
    assert "of GEMM limit" in out
    assert "1 x 70 tokens, context 0:" in out


def test_bad_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "v3-nano", "--lengths", "0"]) != 0
    assert "lengths must be at least 1" in capsys.readouterr().err


def test_decoding_is_measured_for_each_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    decode = ["decode", *MODEL, "--kernels", "reference", *SIZES]
    assert main([*decode, "--json"]) == 0
    roofs = json.loads(capsys.readouterr().out)["results"]
    assert [(r["num_requests"], r["num_tokens"]) for r in roofs] == [(1, 1), (3, 1)]
    for roof in roofs:
        assert roof["tokens_per_s"] == pytest.approx(1e3 * roof["num_requests"] / roof["step_ms"])
        assert roof["share_of_read_limit"] > 0
    assert main(decode) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("v3-nano: ")
    assert lines[2].startswith("requests x tokens")


def test_a_step_is_split_into_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--kv-cache-memory", "8M", "--max-model-len", "128"]
    steps = ["steps", *MODEL, "--kernels", "reference", *limits, *SIZES]
    assert main([*steps, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    for step, batch_size in zip(results, (1, 3), strict=True):
        assert (step["batch_size"], step["num_steps"] > 30) == (batch_size, True)
        assert set(step["median_us"]) == {"scheduler", "batch", "model", "sampler", "wire", "loop"}
        assert min(step["least_us"].values()) > 0
    assert main(steps) == 0
    assert "all but the model" in capsys.readouterr().out
