"""Prints how big the package is; the exit code is 1 where a ceiling is broken.

`--lower` writes what was measured into `pyproject.toml` as the new, lower ceilings.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from whalepod.tools.size.ceilings import lower, problems, read_ceilings
from whalepod.tools.size.count import Source, read_wheel
from whalepod.tools.size.request_path import trace_request
from whalepod.tools.table import format_table

ROOT = Path(__file__).resolve().parents[2]
NUM_LONGEST = 5


def format_folders(
    sources: Sequence[Source], ran: Collection[Path], loaded: Collection[Path]
) -> str:
    """Lay out lines by folder.

    ran     files of the request path
    loaded  files that the processes of a server import
    """
    rows = [["folder", "files", "lines", "code", "request path", "loaded"]]
    for folder in [*sorted({source.folder for source in sources}), "total"]:
        inside = [source for source in sources if folder in (source.folder, "total")]
        counts = [
            len(inside),
            sum(source.num_lines for source in inside),
            sum(source.num_code_lines for source in inside),
            sum(source.num_lines for source in inside if source.path in ran),
            sum(source.num_lines for source in inside if source.path in loaded),
        ]
        rows.append([folder, *(f"{count:,}" for count in counts)])
    return format_table(rows, numeric=True)


def format_functions(sources: Sequence[Source], num_longest: int = NUM_LONGEST) -> str:
    """Lay out the longest functions, and those with most arguments."""
    functions = [function for source in sources for function in source.functions]
    median = statistics.median(function.num_lines for function in functions)
    longest = sorted(functions, key=lambda function: -function.num_lines)[:num_longest]
    widest = sorted(functions, key=lambda function: -function.num_arguments)[:num_longest]
    return "\n".join(
        [
            f"median function: {median:g} lines; longest:",
            *(f"  {f.num_lines:>4}  {f.path}:{f.line} {f.name}" for f in longest),
            "most arguments:",
            *(f"  {f.num_arguments:>4}  {f.path}:{f.line} {f.name}" for f in widest),
        ]
    )


def show(text: str) -> None:
    """Print; a reader that has seen enough, like `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end


def main() -> int:
    """Count, print, compare."""
    project = ROOT / "pyproject.toml"
    sources, ceilings = read_wheel(ROOT), read_ceilings(project)
    path = trace_request(ROOT, [source.path for source in sources])
    ran = [source for source in sources if source.path in path.ran]
    measured = {
        "lines": sum(source.num_lines for source in sources),
        "request_path_lines": sum(source.num_lines for source in ran),
    }
    report = [
        format_folders(sources, path.ran, path.loaded),
        f"\na chat request runs {len(ran)} of {len(path.loaded)} loaded modules",
        format_functions(sources),
    ]
    if "--modules" in sys.argv:
        report[2:2] = [f"{source.num_lines:>5}  {source.path}" for source in ran]
    show("\n".join(report))
    broken = problems(ceilings, sources, measured["request_path_lines"])
    if "--lower" in sys.argv:
        text = project.read_text(encoding="utf-8")
        project.write_text(lower(text, ceilings, measured, broken), encoding="utf-8")
        broken = [sentence for sentence in broken if "take it off" not in sentence]
    for sentence in broken:
        print(f"size: {sentence}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
