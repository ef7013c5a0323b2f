"""What xgrammar enforces of a JSON schema. It passes over the rest, at best with a warning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from whalepod.server.structured.interface import GrammarError

_NUMBER: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_BY_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": _NUMBER,
    "integer": _NUMBER | {"multipleOf"},
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "object": frozenset(["properties", "required", "additionalProperties", "minProperties"])
    | {"maxProperties"},
    "boolean": frozenset(),
    "null": frozenset(),
}
_OTHER_ASSERTIONS: Final = frozenset(
    ["oneOf", "not", "if", "then", "else", "contains", "minContains", "maxContains"]
) | {
    *("uniqueItems", "additionalItems", "unevaluatedItems", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
}
"""What JSON Schema may ask of a text beside; all further keywords are notes."""

_IMPLIES: Final = {"properties": "object", "additionalProperties": "object", "items": "array"}
"""A schema that has one of them and no type is taken for this type's."""

_FORMATS: Final = frozenset(
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_SCHEMAS: Final = ("items", "additionalProperties")
_LISTS_OF_SCHEMAS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS_OF_SCHEMAS: Final = ("properties", "$defs", "definitions")

_ALONE: Final = ("$ref", "anyOf", "allOf", "const", "enum")
"""Keywords beside which the library looks at nothing else."""

_ASSERTIONS: Final = _OTHER_ASSERTIONS.union({"type"}, _ALONE, *_BY_TYPE.values())

_PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "null": (type(None),),
}


def refuse_what_is_not_enforced(schema: object) -> None:
    """Raise GrammarError, with its name, for a keyword that texts could break."""
    if isinstance(schema, Mapping):
        _check(schema)
        for child in _children(schema):
            refuse_what_is_not_enforced(child)


def adapted(schema: Any) -> Any:
    """Return a schema with the same texts, in words that the library reads rightly.

    Of a string with a bound on its length it allows control characters, which JSON does not.
    """
    if not isinstance(schema, Mapping):
        return schema
    new = {name: _adapted_value(name, value) for name, value in schema.items()}
    if new.keys() & {"minLength", "maxLength"} and not new.keys() & {"pattern", "format"}:
        shortest, longest = new.pop("minLength", 0), new.pop("maxLength", "")
        new["pattern"] = f"^.{{{shortest},{longest}}}$"
    return new


def _adapted_value(name: str, value: Any) -> Any:
    if name in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
        return {key: adapted(child) for key, child in value.items()}
    if name in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [adapted(child) for child in value]
    return adapted(value) if name in _SCHEMAS else value


def _children(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that a schema holds."""
    children = [schema.get(name) for name in _SCHEMAS]
    for name in _LISTS_OF_SCHEMAS:
        value = schema.get(name)
        children += value if isinstance(value, list) else []
    for name in _MAPS_OF_SCHEMAS:
        value = schema.get(name)
        children += value.values() if isinstance(value, Mapping) else []
    return children


def _check(schema: Mapping[str, Any]) -> None:
    asked = [name for name in schema if name in _ASSERTIONS]
    for alone in _ALONE:
        if alone in schema:
            _check_alone(schema, alone, [name for name in asked if name != alone])
            return
    types = _types(schema)
    known = frozenset[str]().union(*(_BY_TYPE.get(t, frozenset()) for t in types)) | {"type"}
    for name in asked:
        if name not in known:
            _refuse(name, f"beside type {' or '.join(types)}" if types else "without a type")
    if "multipleOf" in asked and ("number" in types or schema["multipleOf"] not in range(1, 1025)):
        _refuse("multipleOf", "but for integers, and up to 1024,")
    _check_string(schema)
    _check_object(schema)


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    value = schema.get("type")
    if value is None:
        return sorted({_IMPLIES[name] for name in schema if name in _IMPLIES})
    return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]


def _check_alone(schema: Mapping[str, Any], name: str, others: Sequence[str]) -> None:
    value = schema[name]
    if name in ("const", "enum") and others == ["type"]:
        values = value if name == "enum" and isinstance(value, list) else [value]
        if all(any(_is_of(entry, t) for t in _types(schema)) for entry in values):
            return
    if name == "allOf" and isinstance(value, list) and len(value) > 1:
        _refuse("allOf", "of several schemas")
    if others:
        _refuse(others[0], f"beside {name}")


def _is_of(value: object, type_name: str) -> bool:
    is_of = isinstance(value, _PYTHON_TYPES.get(type_name, ()))
    return is_of and (type_name == "boolean" or not isinstance(value, bool))


def _check_string(schema: Mapping[str, Any]) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and ('"' in pattern or "\\\\" in pattern):
        _refuse("pattern", "with a quote or a backslash to match")
    has_length = "minLength" in schema or "maxLength" in schema
    asked = [name for name in ("format", "pattern") if name in schema]
    if len(asked) + has_length > 1:
        _refuse(asked[-1], "beside another bound of the same string")
    if "format" in asked and schema["format"] not in _FORMATS:
        _refuse("format", f"with the value {str(schema['format'])[:40]!r}")


def _check_object(schema: Mapping[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list):
        return
    for name in required:
        if not isinstance(properties, Mapping) or name not in properties:
            _refuse("required", f"for {str(name)[:40]!r}, which is no property")


def _refuse(name: str, where: str) -> NoReturn:
    raise GrammarError(f"{name} {where} is not supported")
