"""Every known report of a bug, of whichever server, has a test that carries its id."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line.split()
    for line in (TESTS / "case_ids.txt").read_text().splitlines()
    if not line.startswith("#")
]
_ID = re.compile(r"(?<=_)([bB]\d{3}|[ABC]\d|[NI]\d{2,3}|item_\d+)(?=_|$)")


def ids_in(name: str) -> set[str]:
    """Return the ids that a test's name carries, in the spelling of the list."""
    return {i if i.startswith("item") else i.upper() for i in _ID.findall(name)}


def names_of_tests() -> Iterator[str]:
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name


def test_every_row_has_a_test() -> None:
    tested = set[str]().union(*(ids_in(name) for name in names_of_tests() if name[:5] == "test_"))

    missing = [row[0] for row in ROWS if row[0] not in tested and "later" not in row]
    assert not missing, f"no test carries {', '.join(missing)}: see tests/case_ids.txt"


def test_rows_are_listed_once_and_in_order() -> None:
    assert len(ROWS) == 132
    listed = [row[0] for row in ROWS]
    assert listed == sorted(set(listed))
    assert all(len(row) == 2 or row[2:] == ["later"] for row in ROWS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_B003_b005_exactly_one", {"B003", "B005"}),
        ("test_item_30_a_block", {"item_30"}),
        ("test_B1_N024_i21_ids_of_reviews", {"B1", "N024"}),
        ("test_a_sub003_b12_item", set()),
    ],
)
def test_ids_are_found_in_names(name: str, expected: set[str]) -> None:
    assert ids_in(name) == expected
