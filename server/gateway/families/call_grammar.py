"""Grammars of DeepSeek's tool calls, for requests that force one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whalepod.server.gateway.families.deepseek_markup import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
    V3_CALL_TYPE,
)
from whalepod.server.gateway.families.interface import CallOptions
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, quoted

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def v3_call_grammar(options: CallOptions) -> RuleSet:
    """Return the rule `calls` in the form of V3 and R1."""
    head, name_end, end = V3_CALL_TYPE, "\n```json\n", "\n```"
    separator = options.marker(SEPARATOR)
    heads = {n: f"{quoted(head)} {separator} {quoted(n + name_end)}" for n in options.tools}
    return _rules(options, heads, between=f"{quoted(chr(10))} ", end=f"{quoted(end)} ")


def v31_call_grammar(options: CallOptions) -> RuleSet:
    """Return the rule `calls` in the form of V3.1."""
    separator = options.marker(SEPARATOR)
    heads = {name: f"{quoted(name)} {separator}" for name in options.tools}
    return _rules(options, heads)


def _rules(
    options: CallOptions, heads: Mapping[str, str], *, between: str = "", end: str = ""
) -> RuleSet:
    marker = options.marker
    more = options.max_calls - 1
    rest = f"({between}call){{0,{more}}} " if more else ""
    start = "" if options.is_open else f"{marker(CALLS)} "
    lines = [
        f"calls: {start}call {rest}{marker(CALLS_END)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(heads))),
    ]
    schemas = []
    for i, (name, head) in enumerate(heads.items()):
        lines.append(f"call_{i}: {marker(CALL)} {head} arguments_{i} {end}{marker(CALL_END)}")
        schemas.append(
            SchemaRule(
                name=f"arguments_{i}",
                schema=_parameters(options.tools[name]),
                is_strict=name in options.strict,
            )
        )
    return RuleSet(lark="\n".join(lines), schemas=tuple(schemas))


def _parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a schema that only objects fulfil, as far as the schema leaves that open."""
    if not parameters:
        return _NO_PARAMETERS
    return {"type": "object", **parameters} if "properties" in parameters else dict(parameters)
