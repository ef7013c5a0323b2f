"""The rules of CI, switched on by `--ci`: no silent skips, and no silent loss of tests.

CI has no GPU, so a test marked `gpu` may be skipped there; any other skip hides something. And a
broken import or a wrong pattern must not make tests vanish: `tests/floor.txt` holds how many there
are at least. Raise it when tests are added.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

FLOOR = Path(__file__).with_name("floor.txt")
_MARKERS = ("gpu", "ranks", "slow", "long")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ci",
        action="store_true",
        help="fail on skips not marked gpu, and below the floor of tests",
    )
    parser.addoption("--chaos-seconds", default="600", help="how long test_chaos.py runs")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ci"):
        config.pluginmanager.register(CiRules(int(FLOOR.read_text(encoding="utf-8"))), "ci-rules")


class CiRules:
    """Counts what ran and what was skipped, and turns the run red when a rule is broken.

    It goes by the reports alone: where tests run in several processes, only these come here.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._markers: dict[str, list[str]] = {}
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = [name for name in _MARKERS if name in report.keywords]
        self._markers[report.nodeid] = found or ["unmarked"]
        if report.skipped:
            self._skipped.append(report.nodeid)

    def broken_rules(self) -> list[str]:
        """Say which rules are broken, a sentence each."""
        broken = [
            f"{name} was skipped: mark it gpu, or let it run"
            for name in self._skipped
            if "gpu" not in self._markers[name]
        ]
        if len(self._markers) < self._floor:
            broken.append(
                f"{len(self._markers)} tests were collected, fewer than the {self._floor} of "
                f"{FLOOR.name}: find the lost ones, or lower the number with a reason"
            )
        return broken

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.broken_rules() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        collected = Counter(name for names in self._markers.values() for name in names)
        skipped = Counter(name for test in self._skipped for name in self._markers[test])
        terminalreporter.section("rules of CI")
        for name in (*_MARKERS, "unmarked"):
            terminalreporter.line(
                f"{name:10} {collected[name]:6} collected {skipped[name]:4} skipped"
            )
        for sentence in self.broken_rules():
            terminalreporter.line(sentence, red=True)
