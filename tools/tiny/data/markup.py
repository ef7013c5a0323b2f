"""DeepSeek-V3.1's tool-call markup as text: writing it and reading it back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from whalepod.tools.tiny.data.sample import Call

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_CALL = re.compile(f"{CALL_BEGIN}(.*?){SEPARATOR}(.*?){CALL_END}", re.DOTALL)


def write_calls(calls: Sequence[Call]) -> str:
    """Write calls as the model must: chained, nothing between them."""
    body = "".join(
        f"{CALL_BEGIN}{name}{SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
        for name, arguments in calls
    )
    return f"{CALLS_BEGIN}{body}{CALLS_END}"


def read_calls(text: str) -> list[Call]:
    """Read the calls out of raw text. Raises ValueError when arguments are not a JSON object."""
    calls: list[Call] = []
    for name, body in _CALL.findall(text):
        arguments = json.loads(body)
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments of {name} must be a JSON object, got {body}")
        calls.append((name, arguments))
    return calls
