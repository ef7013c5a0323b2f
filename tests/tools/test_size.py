from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.closed_pipe import run_without_reader
from whalepod.tools.size.__main__ import format_folders, format_functions
from whalepod.tools.size.ceilings import SLACK, Ceilings, lower, problems, read_ceilings
from whalepod.tools.size.count import Source, read_source, read_wheel
from whalepod.tools.size.request_path import trace_request

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
[tool.setuptools]
packages = ["whalepod", "whalepod.server"]
[tool.whalepod.size]
lines = 30 # all
request_path_lines = 10
file_lines = 20
function_lines = 2
function_arguments = 1
kernel_folders = ["server/kernels"]
kernel_function_lines = 3
kernel_function_arguments = 2
long_functions = [
    "server/a.py:f",
]
many_arguments = []
"""


def write(root: Path, path: str, text: str) -> Source:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return read_source(root, file)


@pytest.fixture
def ceilings(tmp_path: Path) -> Ceilings:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return read_ceilings(tmp_path / "pyproject.toml")


def test_only_modules_of_listed_packages_are_counted(tmp_path: Path, ceilings: Ceilings) -> None:
    write(tmp_path, "__init__.py", "x = 1\n")
    write(tmp_path, "server/a.py", "# why\n\nx = 1\n")
    write(tmp_path, "server/dev/b.py", "x = 1\n")
    write(tmp_path, "tests/c.py", "x = 1\n")
    sources = read_wheel(tmp_path)
    assert [(str(s.path), s.num_lines) for s in sources] == [("__init__.py", 1), ("server/a.py", 3)]
    table = format_folders(sources, {Path("server/a.py")}, {Path("server/a.py")}).splitlines()
    assert table[-1].split() == ["total", "2", "4", "2", "3", "3"]


def test_docstrings_and_comments_are_no_code_and_no_body(tmp_path: Path) -> None:
    text = (
        'def f(self, a, *, b):\n    """Say.\n\n    More.\n    """\n    # why\n'
        '    return """\n\n"""\n\n\nclass C:\n    x: int\n    """Field."""\n\n'
        "    def g(self, *c, **d):\n        def h(e): ...\n"
    )
    source = write(tmp_path, "a.py", text)
    assert (source.num_lines, source.num_code_lines) == (17, 8)
    found = [(f.name, f.num_lines, f.num_arguments) for f in source.functions]
    assert found == [("f", 3, 2), ("C.g", 1, 2), ("C.g.h", 1, 1)]
    assert "2  a.py:16 C.g" in format_functions([source])


def test_every_ceiling_is_held(tmp_path: Path, ceilings: Ceilings) -> None:
    long = "def f(a, b):\n" + "    x = 1\n" * 4
    sources = [
        write(tmp_path, "server/b.py", long + "\n" * 20),
        write(tmp_path, "server/kernels/c.py", long.replace("    x = 1\n", "", 1)),
    ]
    assert problems(ceilings, sources, 11) == [
        "request_path_lines: 11 are over the ceiling, 10",
        "server/b.py: 25 lines, at most 20",
        "server/b.py:f: 4 lines, at most 2",
        "server/a.py:f is within the ceiling: take it off long_functions",
        "server/b.py:f: 2 arguments, at most 1",
    ]


def test_listed_functions_may_be_long_until_they_are_cut(
    tmp_path: Path, ceilings: Ceilings
) -> None:
    long = write(tmp_path, "server/a.py", "def f():\n" + "    x = 1\n" * 3)
    assert problems(ceilings, [long], None) == []
    cut = write(tmp_path, "server/a.py", "def f():\n    x = 1\n")
    broken = problems(ceilings, [cut], None)
    measured = {"lines": 2, "request_path_lines": 12}
    text = lower(PROJECT, ceilings, measured, broken)
    (tmp_path / "pyproject.toml").write_text(text)
    assert read_ceilings(tmp_path / "pyproject.toml") == replace(
        ceilings, lines=2, long_functions=()
    )
    assert "lines = 2 # all" in text


def test_a_reader_may_leave_before_the_end_of_the_report() -> None:
    program = "from whalepod.tools.size.__main__ import show; show('line' * 100_000)"
    assert run_without_reader(program) == (0, "")


def test_the_request_path_is_what_a_server_runs() -> None:
    sources = read_wheel(ROOT)
    path = trace_request(ROOT, [source.path for source in sources])
    ran = {str(file) for file in path.ran}
    assert {"server/engine/core.py", "scheduler/scheduler.py", "kernels/interface.py"} <= ran
    assert any(file.startswith("server/gateway/") for file in ran)
    assert not any(file.startswith("tools/bench/") for file in ran)
    assert path.ran <= path.loaded
    check_ceilings(sum(source.num_lines for source in sources if source.path in path.ran))


def check_ceilings(request_path_lines: int) -> None:
    """Compare the ceilings with what they bound and with what the changelog says of them."""
    sources, ceilings = read_wheel(ROOT), read_ceilings(ROOT / "pyproject.toml")
    assert problems(ceilings, sources, request_path_lines) == []
    assert ceilings.request_path_lines <= request_path_lines * (1 + SLACK), "run it with --lower"
    assert ceilings.lines <= sum(s.num_lines for s in sources) * (1 + SLACK), "run it with --lower"
    told = re.search(
        r"at most ([\d,]+) lines in the wheel, at most ([\d,]+) in the request path",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    )
    assert told is not None
    most_lines, most_in_path = (int(figure.replace(",", "")) for figure in told.groups())
    assert ceilings.lines <= most_lines, "CHANGELOG.md says why a ceiling rises"
    assert ceilings.request_path_lines <= most_in_path, "CHANGELOG.md says why a ceiling rises"
