"""`python -m whalepod.tools.size`: lines per folder, and the longest files and functions."""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whalepod.tools.table import format_table

BUDGET_LINES = 25_000
"""All of it; DESIGN's limit for what one person can read."""
REQUEST_PATH_BUDGET_LINES = 10_000
REQUEST_PATH = ("models", "kernels", "scheduler", "mtp", "server", "ep_comm")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 8
FOLDERS = (*REQUEST_PATH, "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    place: str
    num_lines: int
    """Of its body, without docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    path: Path
    num_lines: int
    functions: tuple[Function, ...]


def read_sources(root: Path) -> list[Source]:
    """Read every Python file of the package below `root`."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    return [read_source(root, file) for file in [*sorted(root.glob("*.py")), *files]]


def read_source(root: Path, file: Path) -> Source:
    """Count the lines of one file and of its functions."""
    text = file.read_text(encoding="utf-8")
    path = file.relative_to(root)
    return Source(
        path=path,
        num_lines=len(text.splitlines()),
        functions=tuple(_functions(path, ast.parse(text))),
    )


def _functions(path: Path, tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
            yield Function(place=f"{path}:{node.lineno} {node.name}", num_lines=lines)


def over_budget(sources: list[Source]) -> list[str]:
    """Say what is too long."""
    by_folder = _lines_by_folder(sources)
    total = sum(by_folder.values())
    request_path = sum(by_folder[folder] for folder in REQUEST_PATH)
    problems = []
    if total > BUDGET_LINES:
        problems.append(f"{total:,} lines are over the budget of {BUDGET_LINES:,}")
    if request_path > REQUEST_PATH_BUDGET_LINES:
        problems.append(
            f"{request_path:,} lines on a request's path are over the budget of "
            f"{REQUEST_PATH_BUDGET_LINES:,}"
        )
    for source in sources:
        if source.num_lines > MAX_FILE_LINES:
            problems.append(f"{source.path}: {source.num_lines} lines, at most {MAX_FILE_LINES}")
        for function in source.functions:
            if function.num_lines > MAX_FUNCTION_LINES:
                problems.append(
                    f"{function.place}: {function.num_lines} lines, at most {MAX_FUNCTION_LINES}"
                )
    return problems


def format_sizes(sources: list[Source], num_longest: int = 5) -> str:
    """Lay out the figures for a person."""
    by_folder = _lines_by_folder(sources)
    functions = [function for source in sources for function in source.functions]
    rows = [["folder", "lines"], *([name, f"{n:,}"] for name, n in sorted(by_folder.items()))]
    rows.append(["total", f"{sum(by_folder.values()):,} of {BUDGET_LINES:,}"])
    median = statistics.median(function.num_lines for function in functions) if functions else 0
    files = sorted(sources, key=lambda source: -source.num_lines)[:num_longest]
    longest = sorted(functions, key=lambda function: -function.num_lines)[:num_longest]
    return "\n".join(
        [
            format_table(rows, numeric=True),
            f"\nmedian function: {median:g} lines (wanted: {MEDIAN_FUNCTION_LINES})",
            "longest files",
            *(f"  {source.num_lines:>4}  {source.path}" for source in files),
            "longest functions",
            *(f"  {function.num_lines:>4}  {function.place}" for function in longest),
        ]
    )


def _lines_by_folder(sources: list[Source]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for source in sources:
        lines[source.path.parts[0] if len(source.path.parts) > 1 else "."] += source.num_lines
    return lines


def main() -> int:
    """Print the sizes; the exit code is 1 if something is over its budget."""
    sources = read_sources(Path(__file__).resolve().parent.parent)
    print(format_sizes(sources))
    problems = over_budget(sources)
    for problem in problems:
        print(f"OVER BUDGET: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
