from __future__ import annotations

from pathlib import Path

from whalepod.tools.size import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    format_sizes,
    over_budget,
    read_sources,
)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_lines_are_counted_by_folder_and_docstrings_are_no_body(tmp_path: Path) -> None:
    write(tmp_path, "__init__.py", "x = 1\n")
    write(
        tmp_path,
        "server/a.py",
        'def f() -> int:\n    """Say.\n\n    More.\n    """\n    return 1\n',
    )
    write(tmp_path, "tests/b.py", "y = 1\n")
    sources = read_sources(tmp_path)
    assert [(str(s.path), s.num_lines) for s in sources] == [("__init__.py", 1), ("server/a.py", 6)]
    assert [f.num_lines for s in sources for f in s.functions] == [1]
    assert over_budget(sources) == []
    assert "7 of 25,000" in format_sizes(sources)


def test_long_files_and_functions_are_named(tmp_path: Path) -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES + 1)
    write(tmp_path, "models/long.py", f"def f() -> None:\n{body}" + "y = 1\n" * MAX_FILE_LINES)
    problems = over_budget(read_sources(tmp_path))
    assert len(problems) == 2
    assert problems[0].startswith("models/long.py: 462 lines")
    assert problems[1].startswith("models/long.py:1 f: 61 lines")
