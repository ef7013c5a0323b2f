"""Reads the tables of sentences and words in `tables/`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("tables")


def load(name: str) -> dict[str, Any]:
    """Return the table of `tables/NAME.toml`; what its keys mean stands at its head."""
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
