"""The kinds of facts that passages tell about people (`relations.toml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whalepod.tools.tiny.data.draws import Draw, draw
from whalepod.tools.tiny.data.phrasing import patterns
from whalepod.tools.tiny.data.sample import Patterns
from whalepod.tools.tiny.data.tables import load


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: how it is told, asked and answered. {n} has it, {v} is the answer."""

    told: Patterns
    asked: Patterns
    answer: str
    draw: Draw
    opaque: tuple[str, ...]
    """Sentences whose verb says nothing."""


def _relation(table: Mapping[str, Any]) -> Relation:
    return Relation(
        told=patterns(table["told"]),
        asked=patterns(table["asked"]),
        answer=table["answer"],
        draw=draw(table["values"]),
        opaque=tuple(table.get("opaque", ())),
    )


_TABLES = load("relations")
ALL_RELATIONS = {name: _relation(table) for name, table in _TABLES.items()}
RELATIONS = {name: ALL_RELATIONS[name] for name in _TABLES if "training_only" not in _TABLES[name]}
"""Those that held-out passages tell, too."""
