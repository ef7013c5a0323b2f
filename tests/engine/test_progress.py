"""Progress of a start, for people and for logs."""

from __future__ import annotations

import logging

import pytest

from whalepod.server import progress


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_S", -1.0)
    monkeypatch.setenv("TERM", "xterm")


def test_a_log_gets_lines_and_no_bar(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        progress.reporter("weights", "MiB", 10)(30, 90)

    assert caplog.messages == ["weights: 3 of 9 MiB"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_no_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        report = progress.reporter("weights", "MiB", 10, is_terminal=True)
        report(30, 90)
        report(90, 90)

    assert caplog.messages == []
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/9" in err


def test_a_short_start_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_S", 1e9)
    for is_terminal in (False, True):
        progress.reporter("weights", "MiB", is_terminal=is_terminal)(1, 1)

    assert capsys.readouterr() == ("", "")
