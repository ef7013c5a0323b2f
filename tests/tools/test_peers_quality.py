"""The quality of int8: q8_0 spelled out, and a distance that grows with what is rounded."""

from __future__ import annotations

import json

import pytest
import torch

from whalepod.tools.peers.quality import (
    WEIGHTS_AND_ROWS,
    WEIGHTS_ONLY,
    main,
    mean_kl,
    measure_distances,
    round_to_q8_0,
)

ARGUMENTS = [
    "v3-nano", "--load-format", "dummy", "--num-threads", "1",
    "--prompt-tokens", "40",
]  # fmt: skip


def test_q8_0_keeps_the_largest_of_32_values_and_rounds_the_others_to_its_steps() -> None:
    x = torch.zeros(2, 40)
    x[0, 3], x[0, 7], x[0, 35] = -127.0, 2.6, 100.0
    kept = round_to_q8_0(x)
    # steps of 1 in the first block; those of the second, 100 / 127, are an f16
    assert (kept[0, 3], kept[0, 7]) == (-127.0, 3.0)
    assert kept[0, 35] == 127 * torch.tensor(100 / 127).half().float()
    assert not kept[1].any()


def test_distances_are_means_over_positions_and_ratios_to_rounded_weights() -> None:
    exact = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    far = torch.tensor([[0.0, torch.tensor(3.0).log()], [0.0, 0.0]])
    # KL((1/2, 1/2) || (1/4, 3/4)) at one of two positions
    expected = (0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()) / 2
    assert mean_kl(exact, far) == pytest.approx(float(expected), rel=1e-6)
    found = {d.name: d for d in measure_distances(exact, {"x": exact, WEIGHTS_ONLY: far})}
    assert (found["x"].ratio, found[WEIGHTS_ONLY].ratio) == (0.0, 1.0)
    assert (found["x"].same_best, found[WEIGHTS_ONLY].same_best) == (1.0, 0.5)


def test_all_ways_of_computing_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--num-prompts", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["distances"]
    assert list(found) == ["int8", "fp32", WEIGHTS_ONLY, WEIGHTS_AND_ROWS]
    kl = {name: distance["mean_kl"] for name, distance in found.items()}
    assert 0 < kl["fp32"] < kl[WEIGHTS_ONLY] < 1
    assert kl["fp32"] < kl["int8"] < 10 * kl[WEIGHTS_AND_ROWS]


def test_the_table_has_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--num-prompts", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("v3-nano: 40 positions, distance from bf16")
    assert "(<= 1.1" in out


def test_impossible_measurements_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--num-prompts", "0"]) == 2
    assert "num_prompts must be at least 1" in capsys.readouterr().err
