"""DeepSeek's chat formats up to V3.1: how to tell them, and grammars of their tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from whalepod.server.gateway.chat_formats.deepseek_parser import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    MARKERS,
    SEPARATOR,
    TOOL_MARKERS,
    V3_CALL_TYPE,
    DeepseekParser,
)
from whalepod.server.gateway.chat_formats.interface import CallOptions, ChatFormat
from whalepod.server.gateway.chat_formats.text_parser import THINK, THINK_END, start_of
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, quoted

_V3_HEAD: Final = V3_CALL_TYPE + SEPARATOR

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


def describe_v3_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return V3.1's description with the calls of V3, of which nothing else is published."""
    call = f"{CALL}{_V3_HEAD}tool_call_name\n```json\ntool_call_arguments\n```{CALL_END}"
    return _describe(tools, call, "with a newline as separator")


def describe_v31_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the description of tools that V3.1's model card asks for in the system prompt."""
    call = f"{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}"
    return _describe(tools, call, "directly without separators or spaces")


def _describe(tools: Sequence[Mapping[str, Any]], call: str, chained: str) -> str:
    listed = [
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}"
        for function in (tool["function"] for tool in tools)
    ]
    rules = (
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        f"{CALLS}{call}{{additional_tool_calls}}{CALLS_END}\n\n"
        "Where:\n- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
        f"Schema\n- For multiple tool calls, chain them {chained}"
    )
    heading = "## Tools\nYou have access to the following tools:"
    return "\n\n".join((heading, *listed, rules))


DEEPSEEK_R1: Final = ChatFormat(
    name="deepseek_r1",
    reasoning_parser_names=frozenset({"deepseek_r1"}),
    tool_call_parser_names=frozenset({"deepseek_v3", "deepseek_r1"}),
    markers=MARKERS,
    reasoning_start=THINK,
    reasoning_end=THINK_END,
    call_openers=(CALLS, CALL),
    recognises=lambda habits: _V3_HEAD in habits.call and habits.drops_thought,
    describe_tools=describe_v3_tools,
    start=start_of,
    new_parser=partial(DeepseekParser, reasons=True, trims_reasoning=True),
    call_grammar=v3_call_grammar,
)
"""Every answer begins with a think part, mostly opened by the prompt; V3's calls."""

DEEPSEEK_V3: Final = replace(
    DEEPSEEK_R1,
    name="deepseek_v3",
    reasoning_parser_names=frozenset(),
    tool_call_parser_names=frozenset({"deepseek_v3"}),
    markers=TOOL_MARKERS,
    reasoning_start=None,
    reasoning_end=None,
    recognises=lambda habits: _V3_HEAD in habits.call and not habits.drops_thought,
    new_parser=partial(DeepseekParser, reasons=False, trims_reasoning=False),
)
"""Answers without thinking; calls with their arguments in a JSON code fence."""

DEEPSEEK_V31: Final = replace(
    DEEPSEEK_R1,
    name="deepseek_v31",
    reasoning_parser_names=frozenset({"deepseek_v31", "deepseek_v3"}),
    tool_call_parser_names=frozenset({"deepseek_v31"}),
    recognises=lambda habits: SEPARATOR in habits.call and _V3_HEAD not in habits.call,
    describe_tools=describe_v31_tools,
    new_parser=partial(DeepseekParser, reasons=True, trims_reasoning=False),
    call_grammar=v31_call_grammar,
)
"""The prompt says whether to think; calls are a name and bare JSON."""
