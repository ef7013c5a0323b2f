"""docs/pi.md: a coding agent that reads a file with its own tool."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import NOTED, NOTES


def test_the_pi_page_runs(reader: Reader) -> None:
    (reader.home / "notes.txt").write_text(f"{NOTES}\n", encoding="utf-8")

    # the answer is scripted for a tool's result with the text of the file: pi has read it
    assert reader.run_shell("pi") == [NOTED]
