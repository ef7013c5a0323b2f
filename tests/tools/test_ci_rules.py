"""CI turns red on hidden skips and on lost tests."""

from __future__ import annotations

import pytest

from tests import ci_rules

SUITE = """
import pytest

def test_that_runs(): pass

@pytest.mark.gpu
@pytest.mark.skip(reason="no device")
def test_of_a_device(): pass
"""
HIDDEN = """
@pytest.mark.skip(reason="later")
def test_that_someone_forgot(): pass
"""


def run(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    floor: int,
    *options: str,
) -> pytest.RunResult:
    """Run a suite of its own under the rules."""
    monkeypatch.setattr(ci_rules, "FLOOR", pytester.path / "floor.txt")
    ci_rules.FLOOR.write_text(f"{floor}\n", encoding="utf-8")
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a device\n")
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess("--ci", "-p", "tests.ci_rules", *options)


def test_a_skip_marked_gpu_is_counted_and_allowed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, SUITE, floor=2)
    assert result.ret == 0
    result.stdout.re_match_lines(
        ["gpu +1 collected +1 skipped", "unmarked +1 collected +0 skipped"]
    )


def test_any_other_skip_fails_and_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, SUITE + HIDDEN, floor=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*test_that_someone_forgot was skipped: mark it gpu, or let it run"]
    )


def test_fewer_tests_than_the_floor_fail(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, SUITE, floor=3)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["2 tests were collected, fewer than the 3 of floor.txt*"])


def test_the_rules_hold_when_the_tests_run_in_two_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, SUITE + HIDDEN, 4, "-n", "2")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*test_that_someone_forgot was skipped: mark it gpu, or let it run"]
    )
    result.stdout.fnmatch_lines(["3 tests were collected, fewer than the 4 of floor.txt*"])
