"""`whalepod doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    model: Annotated[str | None, "checkpoint folder or its config.json; none: the machine only"] = (
        None
    )
    port: Annotated[int, "port that `whalepod serve` shall use"] = 8000
    json: Annotated[bool, "print JSON"] = False
