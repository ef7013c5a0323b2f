"""`whalepod serve`: an engine process, and the gateway in this one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    config: Annotated[Path | None, "TOML file whose keys are these flags' names"] = None


def serve(engine: object, gateway: object) -> int:
    """Placeholder."""
    return 0
