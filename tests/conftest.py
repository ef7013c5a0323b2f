"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

from whalepod.models.source import compiled_code_folder

# where servers keep compiled kernels, too: the tests compile each once
os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_code_folder()))

pytest_plugins = ["pytester", "tests.ci_rules"]

settings.register_profile(
    "quick",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("quick"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the tests among workers by file, with all files that start ranks on one worker.

    These wait more than they compute, take longest, and disturb each other: so they come first and
    take turns, while the other workers compute.
    """
    starts_ranks = {item.path for item in items if item.get_closest_marker("ranks")}
    for item in items:
        group = "ranks" if item.path in starts_ranks else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path not in starts_ranks)
