"""Counts lines, functions and arguments of the modules that enter the wheel."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_CODE = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    path: Path
    name: str
    line: int
    num_lines: int
    """Of its body, without the docstring."""
    num_arguments: int
    """Without `self` and `cls`."""

    @property
    def key(self) -> str:
        """The name by which a list of exceptions knows this function."""
        return f"{self.path}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    path: Path
    """Relative to the root of the repository."""
    num_lines: int
    num_code_lines: int
    """Without blank lines, comments and docstrings."""
    functions: tuple[Function, ...]

    @property
    def folder(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else "."


def read_wheel(root: Path) -> list[Source]:
    """Read every Python file of the packages that `pyproject.toml` lists."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders = [
        root.joinpath(*package.split(".")[1:])
        for package in settings["tool"]["setuptools"]["packages"]
    ]
    return [
        read_source(root, file)
        for folder in sorted(folders)
        for file in sorted(folder.glob("*.py"))
    ]


def read_source(root: Path, file: Path) -> Source:
    """Count the lines of one file and of its functions."""
    text = file.read_text(encoding="utf-8")
    path, tree = file.relative_to(root), ast.parse(text)
    return Source(
        path=path,
        num_lines=len(text.splitlines()),
        num_code_lines=len(_code_lines(text) - _docstring_lines(tree)),
        functions=tuple(_functions(path, tree)),
    )


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that stand alone: docstrings of fields included."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _functions(path: Path, tree: ast.AST, prefix: str = "") -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = prefix + node.name
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield Function(
                path=path,
                name=name,
                line=node.lineno,
                num_lines=(body[-1].end_lineno or 0) - body[0].lineno + 1,
                num_arguments=_count_arguments(node.args),
            )
            yield from _functions(path, node, f"{name}.")
        else:
            inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            yield from _functions(path, node, inner)


def _count_arguments(arguments: ast.arguments) -> int:
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    own = 1 if names and names[0] in ("self", "cls") else 0
    rest = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(names) - own + len(arguments.kwonlyargs) + rest
