"""Families of tools: spellings, arguments with their values, requests, results (`tools.toml`)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whalepod.tools.tiny.data import draws
from whalepod.tools.tiny.data.phrasing import patterns
from whalepod.tools.tiny.data.sample import Patterns
from whalepod.tools.tiny.data.tables import load


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: spellings of its name by split, its JSON type and its values."""

    names: Patterns
    draw: draws.Draw
    json_type: str


@dataclass(frozen=True, slots=True)
class Family:
    """Tools of one purpose. Requests use the keys of `arguments` as fields."""

    names: Patterns
    descriptions: tuple[str, ...]
    requests: Patterns
    arguments: dict[str, Argument]
    results: dict[str, draws.Result]
    answer: str

    def result(self, rng: random.Random, slots: dict[str, Any]) -> dict[str, Any]:
        """Draw what the tool gives back to a call with `slots`."""
        return {key: drawn(rng, slots) for key, drawn in self.results.items()}


def _family(table: Mapping[str, Any]) -> Family:
    results = {key: draws.result(name) for key, name in table.get("result", {}).items()}
    return Family(
        names=patterns(table["names"]),
        descriptions=tuple(table["descriptions"]),
        requests=patterns(table["requests"]),
        arguments={key: _argument(item) for key, item in table.get("arguments", {}).items()},
        results=results or {"status": lambda rng, slots: "ok"},
        answer=table.get("answer", "Done."),
    )


def _argument(table: Mapping[str, Any]) -> Argument:
    names = table["names"]
    if isinstance(names, list):
        names = {"train": names, "dev": names[:1], "test": names[:1]}
    return Argument(patterns(names), draws.draw(table["values"]), table.get("type", "string"))


_TABLES = load("tools")
FAMILIES = {key: _family(table) for key, table in _TABLES.items() if "training_only" not in table}
MORE_FAMILIES = {key: _family(table) for key, table in _TABLES.items() if "training_only" in table}
"""For training alone."""
