"""`whalepod config check` and `whalepod flags`: what can be set, and where a value comes from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from cyclopts import App

from whalepod.tools.flags import Flag
from whalepod.tools.table import format_table

SECRETS = frozenset({"api_key", "admin_key"})
"""Fields whose values are counted and never shown."""
KINDS = {"cli": "command line", "env": "environment"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    json: Annotated[bool, "print JSON"] = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagsOptions:
    word: Annotated[str, "part of a flag's name, help or group; none: all flags"] = ""
    json: Annotated[bool, "print JSON"] = False


class Sources:
    """Notes where each value came from: a reader of configuration that adds none.

    It comes after those that read the environment and the file.
    """

    def __init__(self) -> None:
        self._by_field: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: Any) -> None:
        self._by_field = {
            argument.field_info.name: argument.tokens[0].source
            for argument in arguments
            if argument.tokens
        }

    def of(self, flag: Flag) -> str:
        """Say for people where the value of a flag comes from."""
        source = self._by_field.get(flag.field, "default")
        return f"environment ({flag.env})" if source == "env" else KINDS.get(source, source)


def check(
    flags: Mapping[str, Flag], configs: Iterable[object], sources: Sources, options: CheckOptions
) -> int:
    """Print each value of a configuration that was read without a fault, and its source."""
    values = {name: value for config in configs for name, value in _values(config)}
    rows = [
        {"flag": f"--{flag.name}", "value": _shown(name, values[name]), "source": sources.of(flag)}
        for name, flag in flags.items()
        if name in values
    ]
    _print(rows, as_json=options.json)
    return 0


def list_flags(flags: Iterable[Flag], options: FlagsOptions) -> int:
    """Print the flags of `serve` that have to do with a word; exit code 1 when none has."""
    word = options.word.lower()
    rows = [
        {
            "flag": f"--{flag.name}",
            "environment": flag.env,
            "group": flag.group,
            "meaning": flag.help,
        }
        for flag in flags
        if word in f"{flag.name} {flag.env} {flag.group} {flag.help}".lower()
    ]
    _print(rows, as_json=options.json)
    return 0 if rows else 1


def _values(config: object) -> Iterable[tuple[str, object]]:
    assert dataclasses.is_dataclass(config), type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value)
        else:
            yield field.name, value


def _shown(name: str, value: object) -> object:
    if name in SECRETS:
        assert isinstance(value, tuple), name
        return f"({len(value)} secret)"
    return list(value) if isinstance(value, tuple) else value


def _print(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    if rows:
        print(format_table([list(rows[0]), *([_text(v) for v in row.values()] for row in rows)]))


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
