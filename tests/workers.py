"""Divides the tests among workers: by file, and the files with groups of ranks on one worker.

Groups of ranks have deadlines, wait more than they compute, and would disturb each other: so they
take turns on one worker while the others compute. Files that start processes take longest and come
first: xdist's own order, most tests first, would leave them for the end.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent
_GROUPS_OF_RANKS = (
    "tests/cluster/test_rank_processes.py",
    "tests/end_to_end/test_machines.py",
    "tests/end_to_end/test_serving_ranks.py",
    "tests/ep_comm/test_kill_matrix.py",
)


@cache
def _place(file: Path) -> int:
    """Return when a file's turn comes: 0 groups of ranks, 1 other processes, 2 the rest."""
    if file in [_ROOT / name for name in _GROUPS_OF_RANKS]:
        return 0
    return 1 if "pytest.mark.ranks" in file.read_text(encoding="utf-8") else 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "groups of ranks" if _place(_ROOT / file) == 0 else file

    return ByFile(config, log)
