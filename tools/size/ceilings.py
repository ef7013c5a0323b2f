"""Compares what was counted with the ceilings of `pyproject.toml`, which only fall."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalepod.tools.size.count import Function, Source

SLACK = 0.02
"""A ceiling further above what is measured than this share is lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The table `[tool.whalepod.size]`; what each key means stands there."""

    lines: int
    request_path_lines: int
    file_lines: int
    function_lines: int
    function_arguments: int
    kernel_folders: tuple[str, ...]
    kernel_function_lines: int
    kernel_function_arguments: int
    long_functions: tuple[str, ...]
    many_arguments: tuple[str, ...]

    def is_kernel(self, function: Function) -> bool:
        return any(function.path.is_relative_to(folder) for folder in self.kernel_folders)

    def most_lines(self, function: Function) -> int:
        return self.kernel_function_lines if self.is_kernel(function) else self.function_lines

    def most_arguments(self, function: Function) -> int:
        if self.is_kernel(function):
            return self.kernel_function_arguments
        return self.function_arguments


def read_ceilings(project: Path) -> Ceilings:
    """Read the ceilings of a `pyproject.toml`."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["whalepod"]["size"]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return Ceilings(**values)


def problems(
    ceilings: Ceilings, sources: Sequence[Source], request_path_lines: int | None
) -> list[str]:
    """Return one sentence per broken ceiling, and per exception that is needed no longer."""
    found = []
    totals = {"lines": sum(source.num_lines for source in sources)}
    if request_path_lines is not None:
        totals["request_path_lines"] = request_path_lines
    for name, measured in totals.items():
        if measured > getattr(ceilings, name):
            found.append(f"{name}: {measured:,} are over the ceiling, {getattr(ceilings, name):,}")
    for source in sources:
        if source.num_lines > ceilings.file_lines:
            found.append(f"{source.path}: {source.num_lines} lines, at most {ceilings.file_lines}")
    functions = [function for source in sources for function in source.functions]
    long = {
        f.key: f"{f.num_lines} lines, at most {ceilings.most_lines(f)}"
        for f in functions
        if f.num_lines > ceilings.most_lines(f)
    }
    wide = {
        f.key: f"{f.num_arguments} arguments, at most {ceilings.most_arguments(f)}"
        for f in functions
        if f.num_arguments > ceilings.most_arguments(f)
    }
    found += _unlisted(long, ceilings.long_functions, "long_functions")
    found += _unlisted(wide, ceilings.many_arguments, "many_arguments")
    return found


def _unlisted(over: dict[str, str], listed: Iterable[str], name: str) -> list[str]:
    return [
        *(f"{key}: {over[key]}" for key in sorted(over.keys() - set(listed))),
        *(f"{key} is within the ceiling: take it off {name}" for key in listed if key not in over),
    ]


def lower(text: str, ceilings: Ceilings, measured: dict[str, int], broken: Sequence[str]) -> str:
    """Return the text of a `pyproject.toml` with its totals lowered to what was measured.

    measured  totals by the name of their ceiling
    broken    what `problems` returned; exceptions that it calls needless are dropped
    """
    for name, value in measured.items():
        if value < getattr(ceilings, name):
            text = re.sub(rf"(?m)^{name} = [\d_]+", f"{name} = {value:_}", text)
    for sentence in broken:
        if "take it off" in sentence:
            text = text.replace(f'    "{sentence.split()[0]}",\n', "")
    return text
