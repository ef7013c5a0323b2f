"""Scripted answers for clients that cannot send `test_steps` themselves (`--test-script FILE`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from whalepod.server.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """What to answer to requests of one kind."""

    route: str
    """A path like `/v1/chat/completions`."""
    steps: Annotated[list[str], Field(min_length=1)]
    """The pieces, as in `test_steps`."""
    last_role: str | None = None
    """Role of the last message; None: any, and requests without messages."""
    contains: str = ""
    """Text that the last message, or the prompt, must contain."""

    def fits(self, route: str, role: str | None, text: str) -> bool:
        return self.route == route and self.last_role in (None, role) and self.contains in text


_LINE = TypeAdapter(ScriptedTurn)


def read_script(path: Path) -> list[ScriptedTurn]:
    """Read a JSONL file of turns; StartupError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--test-script {path} cannot be read: {error}") from error
    turns = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            turns.append(_LINE.validate_json(line, strict=True, extra="forbid"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise StartupError(f"{path}, line {number}: {where}: {first['msg']}") from None
    return turns


def steps_for(
    turns: Sequence[ScriptedTurn], route: str, role: str | None, text: str
) -> list[str] | None:
    """Return the steps of the first turn that fits; None when none does."""
    return next((turn.steps for turn in turns if turn.fits(route, role, text)), None)
