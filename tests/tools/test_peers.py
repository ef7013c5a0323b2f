"""The comparison with peers, on programs that only look like them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools import fake_peers
from whalepod.tools.cli import make_app
from whalepod.tools.measure import __main__ as measure
from whalepod.tools.peers import programs
from whalepod.tools.peers.__main__ import main as peers
from whalepod.tools.peers.programs import (
    LlamaEngine,
    PeerFailed,
    peer_environment,
    run_program,
)
from whalepod.tools.peers.servers import Served, llama_server, rate_row
from whalepod.tools.peers.table import Ratio

PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server", "python")
ROOT = Path(fake_peers.__file__).parents[2]


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for program in PROGRAMS:
        arguments = f"exec {sys.executable} {fake_peers.__file__} {program}"
        write_program(tmp_path / program, f'PYTHONPATH={ROOT} {arguments} "$@"')
    return tmp_path


@pytest.fixture
def flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is there, our own program included."""
    monkeypatch.setattr(programs, "WHALEPOD", fake_peers.WHALEPOD)
    monkeypatch.setattr(programs, "MEASURE", fake_peers.MEASURE)
    monkeypatch.setenv(fake_peers.LOG, str(folder / "log"))
    return [
        *("--llama-dir", str(folder), "--gguf", "a.gguf", "--gguf-q8", "b.gguf"),
        *("--vllm-python", str(folder / "python"), "--num-requests", "16"),
    ]


def commands(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_medians_and_ratios_of_all_engines(
    folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers(["m", *flags, "--repeats", "2", "--json", "--peer-context"]) == 0

    report = json.loads(capsys.readouterr().out)
    rows: dict[str, Any] = {row["row"]: row for row in report["rows"]}
    assert rows["prefill 2,048, bf16"]["medians"] == {"whalepod": 2048, "llama.cpp": 1024}
    assert rows["decode x 1, bf16"]["medians"] == {"whalepod": 60, "llama.cpp": 50}
    assert rows["decode x 16, int8"]["medians"] == {"whalepod": 960, "llama.cpp": 116}
    assert rows["decode x 16, int8"]["samples"]["llama.cpp"] == [116, 116]
    # filled once, measured as often as there are turns
    assert rows["decode x 1 after 8,000, bf16"]["samples"]["llama.cpp"] == [40, 40]
    assert report["long_context_share"] == 0.7
    assert set(rows["HTTP x 16, tok/s"]["medians"]) == {"whalepod", "llama.cpp", "vLLM"}
    (ratio,) = rows["prefill 2,048, bf16"]["ratios"]
    assert ratio == {"peer": "llama.cpp", "ratio": 2.0, "bar": 3.0, "met": False}
    assert report["failures"] == []

    starts = [words for words in commands(folder) if "--port" in words]
    names = [words[0] for words in starts]
    assert names == ["whalepod", "llama-server", "python", "whalepod", "llama-server"]


def test_the_table_says_what_is_missed_and_our_own_commands_exist(
    folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out.json"
    assert peers(["m", *flags, "--repeats", "1", "--out", str(out)]) == 0

    assert json.loads(out.read_text())["repeats"] == 1
    lines = capsys.readouterr().out.splitlines()
    by_row = {line.split("  ")[0]: line for line in lines}
    assert "1.20 (>= 1)" in by_row["decode x 1, bf16"]
    assert "2.00 (>= 3, missed)" in by_row["prefill 2,048, bf16"]
    assert "decode x 16, bf16: share of the read limit: 90%" in lines
    assert "after 8,000 tokens decode keeps 70% of its rate (>= 75%, missed)" in lines

    apps = {"whalepod": make_app(), "measure": measure.make_app()}
    ours = [(words[0], words[1:]) for words in commands(folder) if words[0] in apps]
    assert len(ours) == 6
    for program, words in ours:
        apps[program].parse_args(words, exit_on_error=False, print_error=False)


def test_peers_that_are_not_named_are_left_out(
    flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers(["m", "--repeats", "1", "--num-requests", "2"]) == 0
    assert "llama.cpp" not in capsys.readouterr().out
    assert {words[0] for words in commands(folder)} == {"whalepod", "measure"}


def test_a_peer_that_fails_is_named_and_the_others_go_on(
    flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(folder / "llama-server", "echo 'no such model' >&2; exit 3")
    assert peers(["m", *flags, "--repeats", "1", "--json"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == ["llama.cpp: the server ended with code 3: no such model"]
    rows = {row["row"]: row["medians"] for row in report["rows"]}
    assert set(rows[rate_row(1)]) == {"whalepod", "vLLM"}
    assert "llama.cpp" in rows["decode x 1, bf16"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec sleep 60", "llama-bench was not done after 0.2 s"),
        ("echo broken >&2; exit 7", "llama-bench ended with code 7: broken"),
        ("echo hello", "no figures in what was written: hello"),
    ],
)
def test_a_program_without_figures_is_an_error(folder: Path, script: str, message: str) -> None:
    write_program(folder / "llama-bench", script)
    engine = LlamaEngine(
        precision="bf16",
        folder=folder,
        gguf=Path("a.gguf"),
        num_threads=1,
        context=0,
        num_turns=1,
        timeout_s=0.2 if "sleep" in script else 60.0,
    )
    with pytest.raises(PeerFailed, match=message):
        engine.measure(0)


def test_llama_cpp_is_told_to_leave_weights_as_they_are(flags: list[str], folder: Path) -> None:
    engine = LlamaEngine(
        precision="int8",
        folder=folder,
        gguf=Path("b.gguf"),
        num_threads=1,
        context=0,
        num_turns=1,
        timeout_s=60.0,
        repacks=False,
    )
    engine.measure(0)
    alone, batched = commands(folder)
    assert (alone[alone.index("--repack") + 1], batched[-1]) == ("0", "--no-repack")


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="cannot be run: No such file"):
        run_program([str(tmp_path / "none")], peer_environment(), 1.0)
    with pytest.raises(PeerFailed, match="cannot be run: No such file"):
        llama_server(tmp_path, Path("a.gguf"), 1, 2, 60.0).measure(0)


def test_a_server_that_stays_is_frozen_between_its_turns_and_ends(folder: Path) -> None:
    def command(port: int) -> list[str]:
        return [str(folder / "python"), "--port", str(port)]

    served = Served(
        name="vLLM",
        command=command,
        environment=peer_environment(),
        num_requests=2,
        timeout_s=60.0,
        stays=True,
    )
    try:
        for turn in range(2):
            assert served.measure(turn)[rate_row(16)][0] > 0
            assert served._server is not None
            pid = served._server._process.pid
            os.waitid(os.P_PID, pid, os.WSTOPPED)  # returns once it is stopped
    finally:
        served.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_ratios_of_times_are_the_other_way_round() -> None:
    ratio = Ratio(peer="vLLM", row="HTTP x 1, TTFT ms", value=0.6, bar=0.5)
    assert (ratio.is_met, str(ratio)) == (False, "0.60 (<= 0.5, missed)")
    assert str(Ratio(peer="vLLM", row="decode", value=0.6, bar=None)) == "0.60"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--gguf", "a.gguf"], "--llama-dir goes with --gguf"),
        (["--llama-dir", "here"], "--llama-dir goes with --gguf"),
        (["--context", "-1"], "context must be at least 0"),
    ],
)
def test_impossible_comparisons_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers(["m", *flags]) == 2
    assert message in capsys.readouterr().err
