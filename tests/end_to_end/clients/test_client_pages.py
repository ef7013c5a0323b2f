"""The index of the pages is true, and what they install is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

from tests.end_to_end.clients.pages import DOCS, REQUIREMENTS, blocks, installed_packages

_ROW = re.compile(r"\]\((?P<page>[\w-]+)\.md\) \| (?P<tested>yes|no) \|")
_LISTS = ("clients.txt", "clients-instructor.txt", "clients-npm.txt")


def rows() -> dict[str, bool]:
    """Return the pages of the index, with what it says about their tests."""
    found = _ROW.finditer((DOCS / "README.md").read_text(encoding="utf-8"))
    return {row["page"]: row["tested"] == "yes" for row in found}


def pinned_packages() -> set[str]:
    lines = [line for name in _LISTS for line in (REQUIREMENTS / name).read_text().splitlines()]
    return {re.split(r"==|(?<=.)@", line)[0] for line in lines if not line.startswith("#")}


def test_the_index_lists_every_page() -> None:
    linked = re.findall(r"\]\(([\w-]+)\.md\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    assert set(rows()) < set(linked) == {file.stem for file in DOCS.glob("*.md")} - {"README"}


def test_pages_without_a_test_say_so() -> None:
    for page, tested in rows().items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert ("Not run by the tests." in text) != tested, page
        test = Path(__file__).with_name(f"test_client_{page.replace('-', '_')}.py")
        assert test.exists() == tested, page


def test_pages_install_what_is_tested() -> None:
    for page, tested in rows().items():
        if tested:
            assert set(installed_packages(page)) <= pinned_packages(), page
            assert "whalepod serve\n" in blocks(page, "sh")[0], page
