"""`measure ep`: figures that add up, and the one that is promised."""

from __future__ import annotations

import json

import pytest
import torch

from whalepod.ep_comm.layout import dispatch_layout
from whalepod.ep_comm.rows import RowFormat
from whalepod.tools.measure.__main__ import main
from whalepod.tools.measure.ep import measure_case
from whalepod.tools.measure.ep_rank import Case, EpConfig

SMALL = ["--hidden", "128", "--experts", "8", "--choices", "3", "--repeats", "2"]


def wire_bytes(num_ranks: int, num_tokens: int, record_bytes: int) -> int:
    """Return what the layout predicts that a dispatch sends to other ranks, on all ranks."""
    total = 0
    for rank in range(num_ranks):
        random = torch.Generator().manual_seed(rank)
        torch.randn(num_tokens, 128, generator=random)
        ids_TK = torch.rand(num_tokens, 8, generator=random).argsort(dim=1)[:, :3]
        counts_R = dispatch_layout(ids_TK, 8, num_ranks).num_tokens_per_rank_R
        total += int(counts_R.sum() - counts_R[rank])
    return total * record_bytes


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_figures_of_both_modes_add_up(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    sizes = ["--ranks", "2", "--tokens", "5", "--dtype", dtype, "--json"]
    assert main(["ep", *SMALL, *sizes]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["tokens"] == [5]
    results = report["results"]
    assert [(r["mode"], r["num_tokens"], r["phase"]) for r in results] == [
        (mode, 5, phase)
        for mode in ("low_latency", "throughput")
        for phase in ("dispatch", "combine")
    ]
    for result in results:
        assert 0 < result["fastest_ms"] <= result["time_ms"]
        assert result["gb_per_s"] * result["times_limit"] == pytest.approx(result["limit_gb_per_s"])
        if result["phase"] == "dispatch":
            weights = 0 if result["mode"] == "low_latency" else 3
            row_format = RowFormat(
                hidden=128,
                dtype="bfloat16" if dtype == "bf16" else "float8",
                num_ids=3,
                num_weights=weights,
            )
            predicted = wire_bytes(2, result["num_tokens"], row_format.num_bytes)
            assert result["wire_bytes"] == predicted
    low_latency = results[:2]
    assert all(r["send_ms"] > 0 for r in low_latency)
    row_bytes = 128 * (2 if dtype == "bf16" else 1)
    assert low_latency[0]["payload_bytes"] == 2 * 5 * 3 * row_bytes


@pytest.mark.ranks
def test_the_table_names_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep", *SMALL, "--modes", "low_latency", "--tokens", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 8 experts" in lines[0]
    assert lines[3].startswith("low_latency dispatch")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_low_latency_dispatch_takes_at_most_three_copies_of_its_bytes() -> None:
    config = EpConfig(repeats=30)
    dispatch, _ = measure_case(config, Case(mode="low_latency", num_ranks=2, num_tokens=128))
    # on a machine that others use too, ranks wait for a core: then CPU time is what can be compared
    assert min(dispatch.times_limit, dispatch.cpu_times_limit) <= 3.0, dispatch


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--repeats", "0"], ["--experts", "0"]])
def test_sizes_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["ep", *flags]) == 2
    assert "must be at least 1, got" in capsys.readouterr().err
