"""Settings that every test shares."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

from whalepod.models.source import compiled_code_folder

# where servers keep compiled kernels, too: the tests compile each once
os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_code_folder()))

pytest_plugins = ["pytester", "tests.ci_rules", "tests.workers"]

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
