"""JSON schemas inside of Lark grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

WHITE_SPACE: Final = r"[ \t\r\n]{0,8}"
"""Between two tokens of JSON: a model that likes spaces must come to an end."""


def json_term(schema: Mapping[str, Any]) -> str:
    """Return the Lark term of a text that fulfils a JSON schema."""
    # unknown keywords of a tool's schema must not refuse the tool; those known are enforced
    guidance = {"whitespace_pattern": WHITE_SPACE, "lenient": True}
    return "%json " + orjson.dumps({**schema, "x-guidance": guidance}).decode()
