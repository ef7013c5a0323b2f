"""Schemas of what is `strict`: their objects have the named properties, each once, and no other.

A grammar cannot know which of any keys have been used; only closed objects have no key twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whalepod.server.gateway.api_errors import invalid

_SCHEMAS_BY_NAME: Final = ("properties", "$defs", "definitions")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")


def closed(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema with all objects closed; ApiError for one that is meant to be open.

    `path` names the schema in errors.
    """
    if len(schema.get("allOf") or ()) > 1 and isinstance(schema["allOf"], list):
        raise _refused(path, "allOf of several schemas cannot be closed")
    whole = {key: _closed_below(key, value, path) for key, value in schema.items()}
    if not _is_of_objects(schema):
        return whole
    if schema.get("additionalProperties", False) is not False:
        raise _refused(path, "additionalProperties must be false")
    if schema.get("patternProperties"):
        raise _refused(path, "patternProperties is not supported")
    return {**whole, "additionalProperties": False}


def _closed_below(key: str, value: object, path: str) -> object:
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _closed_if_schema(part, path) for name, part in value.items()}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_closed_if_schema(part, path) for part in value]
    return _closed_if_schema(value, path) if key == "items" else value


def _closed_if_schema(part: object, path: str) -> object:
    return closed(part, path) if isinstance(part, dict) else part


def _is_of_objects(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return "object" in kinds or "properties" in schema


def _refused(path: str, why: str) -> Exception:
    return invalid(path.partition(":")[0], f"{path}: with strict, {why}")
