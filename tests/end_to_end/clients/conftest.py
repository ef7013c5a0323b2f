"""Clients as their users have them: their own packages, a real server, the pages of `docs/`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import write_script
from tests.end_to_end.conftest import serve


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve `tiny`; the questions of the pages have scripted answers."""
    script = write_script(tmp_path_factory.mktemp("script") / "turns.jsonl")
    with serve("--enable-test-hooks", "--test-script", str(script)) as address:
        yield address


@pytest.fixture
def reader(tiny_server: str, tmp_path: Path) -> Reader:
    return Reader(tiny_server, tmp_path)
