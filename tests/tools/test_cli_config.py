"""What can be set, where values come from, and completion in a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from whalepod.tools import cli


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[object, str]]:
    """Return value and source of each flag."""
    assert cli.main(["config", "check", "--json", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {row["flag"]: (row["value"], row["source"]) for row in rows}


def test_config_check_names_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 9\nseed = 4\nmax-num-seqs = 3\napi_key = ["x", "y"]\n')
    monkeypatch.setenv("WHALEPOD_SEED", "7")
    monkeypatch.setenv("WHALEPOD_PORT", "8")

    rows = check(capsys, "some/model", "--config", str(file), "--port", "7")

    assert rows["--model"] == ("some/model", "command line")
    assert rows["--port"] == (7, "command line")
    assert rows["--seed"] == (7, "environment (WHALEPOD_SEED)")
    assert rows["--max-num-seqs"] == (3, str(file))
    assert rows["--api-key"] == ("(2 secret)", str(file))
    assert rows["--host"] == ("127.0.0.1", "default")
    assert set(rows) == {f"--{flag.name}" for flag in cli.serve_flags().values()}


def test_config_check_refuses_unknown_keys_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1")

    assert cli.main(["config", "check", "--config", str(file)]) == 2
    assert "unknown key 'prot'; the nearest is 'port'" in capsys.readouterr().err


def test_config_check_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", "--port", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].split() == ["flag", "value", "source"]
    assert ["--port", "7", "command", "line"] in [line.split() for line in lines]


def test_flags_are_found_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "PREFIX"]) == 0
    assert "--enable-prefix-caching" in (found := capsys.readouterr().out)
    assert "--port" not in found
    assert cli.main(["flags", "nothing-of-this-name"]) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(
    capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out

    for word in ("serve", "doctor", "max-num-seqs", "adaptive"):
        assert word in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_help_has_groups_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out

    titles = ("Model", "Device", "Scheduler", "Speculation", "Server", "Access", "Answers")
    places = [text.index(f"\u2500 {title} \u2500") for title in (*titles, "Limits", "Debugging")]
    assert places == sorted(places)
