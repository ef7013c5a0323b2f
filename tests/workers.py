"""Divides the tests among workers: by file, and all files that start ranks on one worker.

These wait more than they compute, take longest, and disturb each other: so they come first and take
turns, while the other workers compute.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent


@cache
def starts_ranks(file: Path) -> bool:
    """Tell whether tests of a file are marked `ranks`; the controller does not import them."""
    return "pytest.mark.ranks" in file.read_text(encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not starts_ranks(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "ranks" if starts_ranks(_ROOT / file) else file

    return ByFile(config, log)
