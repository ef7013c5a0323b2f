"""The calls of V3.2 and V4: elements whose parameters are text or JSON, each on a line.

A call is `<｜DSML｜invoke name="N">`, then for each parameter
`<｜DSML｜parameter name="k" string="true|false">`, its value and a closer, in a block that V3.2
calls `function_calls` and V4 `tool_calls`. The arguments that clients get are one JSON object,
which is written while the model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.chat_formats.interface import (
    STRUCTURE,
    CallOptions,
    ChatFormat,
    ParserOptions,
)
from whalepod.server.gateway.chat_formats.scanning import Delimiters
from whalepod.server.gateway.chat_formats.text_parser import (
    THINK,
    THINK_END,
    TextParser,
    may_be_name,
    start_of,
)
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, quoted

DSML: Final = "｜DSML｜"
BLOCKS: Final = ("function_calls", "tool_calls")
_MAX_HEAD_CHARS: Final = 400
_PARAMETER_HEAD: Final = re.compile(r'([^"]*)"(?:\s*string="(true|false)")?\s*')
_DEFINITIONS: Final = ("$defs", "definitions")
_TEXT_RULES: Final = ("pattern", "format", "minLength", "maxLength")


class DsmlParser(TextParser):
    """Reads blocks of either name, and calls whose block was never opened or closed."""

    def __init__(self, options: ParserOptions) -> None:
        sign = options.spelled(DSML)
        self._invoke = f'<{sign}invoke name="'
        self._call_ends = (f"</{sign}invoke>", *(f"</{sign}{block}>" for block in BLOCKS))
        self._parameter = f'<{sign}parameter name="'
        self._next_call = Delimiters(self._invoke, *self._call_ends[1:])
        self._in_call = Delimiters(self._parameter, self._invoke, *self._call_ends)
        self._value_end = Delimiters(f"</{sign}parameter>", self._invoke, *self._call_ends)
        self._head_end = Delimiters(">")
        self._head, self._value = "", ""
        self._is_string = False
        self._num_parameters = 0
        openers = [f"<{sign}{block}>" for block in BLOCKS]
        super().__init__(options, (*openers, self._invoke))

    def _enter_calls(self, opener: str) -> Callable[[], bool]:
        self._head = ""
        return self._call_name if opener == self._invoke else self._between_calls

    def _finish_calls(self, *, complete: bool) -> None:
        rest = self._scanner.take_all()
        if self._step in (self._between_parameters, self._parameter_head, self._parameter_value):
            if self._step == self._parameter_value:
                self._grow_value(rest)
            if complete:
                self._end_value()
                self._finish_call()
        else:
            self._give_back_head(self._head + rest, complete=complete)

    def _go_on(self, marker: str) -> None:
        self._head = ""
        if marker == self._invoke:
            self._held += marker
            self._step = self._call_name
        elif marker == self._call_ends[0]:
            self._step = self._between_calls
        else:
            self._end_block()

    def _call_name(self) -> bool:
        text, marker = self._scanner.take_until(self._head_end)
        self._head += text
        name, quote, rest = self._head.partition('"')
        if not may_be_name(name) or rest.strip(" /") or (marker and not (quote and name)):
            self._give_back(self._head + (marker or ""))
            return True
        if marker is None:
            return False
        self._start_call(name.strip())
        self._value, self._num_parameters = "", 0
        if rest.strip() == "/":  # closed at once: no parameters
            self._finish_call()
            self._go_on(self._call_ends[0])
        else:
            self._step = self._between_parameters
        return True

    def _between_parameters(self) -> bool:
        text, marker = self._scanner.take_until(self._in_call)
        self._value += text  # some models write all arguments as one object here
        if marker is None:
            return False
        if marker == self._parameter:
            self._value = self._head = ""
            self._step = self._parameter_head
        else:
            self._finish_call()
            self._go_on(marker)
        return True

    def _parameter_head(self) -> bool:
        text, marker = self._scanner.take_until(self._head_end)
        self._head += text
        if marker is None and len(self._head) <= _MAX_HEAD_CHARS:
            return False
        match = _PARAMETER_HEAD.fullmatch(self._head)
        name, is_string = match.groups() if match else (self._head[:_MAX_HEAD_CHARS], "true")
        self._is_string, self._value = is_string == "true", ""
        separator = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._grow_call(f"{separator}{_as_json(name)}: " + '"' * self._is_string)
        self._step = self._parameter_value
        return True

    def _parameter_value(self) -> bool:
        text, marker = self._scanner.take_until(self._value_end)
        self._grow_value(text)
        if marker is None:
            return False
        self._end_value()
        if marker in (self._invoke, *self._call_ends):
            self._finish_call()
            self._go_on(marker)
        else:
            self._step = self._between_parameters
        return True

    def _grow_value(self, text: str) -> None:
        if self._is_string:
            self._grow_call(_as_json(text.replace(STRUCTURE, ""))[1:-1])
        else:
            self._value += text

    def _end_value(self) -> None:
        """End a value: JSON as it was written, and in quotes what is no JSON."""
        if self._step != self._parameter_value:
            return
        value, self._value = self._value.replace(STRUCTURE, ""), ""
        self._grow_call('"' if self._is_string else value if _is_json(value) else _as_json(value))

    def _finish_call(self) -> None:
        body, self._value = self._value.strip(), ""
        if self._num_parameters:
            self._grow_call("}")
        else:
            self._grow_call(body if body.startswith("{") and _is_json(body) else "{}")
        self._end_call()


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _call_grammar(block: str, options: CallOptions) -> RuleSet:
    """Return the rule `calls`: parameters in the order of the schema, the optional ones maybe."""
    sign = options.marker(DSML)
    begin, end = quoted(f"{block}>\n"), quoted(f"{block}>")
    lines = [
        f'calls: "<" {sign} {begin} call{{1,{options.max_calls}}} "</" {sign} {end}',
        "call: " + " | ".join(f"call_{i}" for i in range(len(options.tools))),
    ]
    schemas: list[SchemaRule] = []
    for i, (name, parameters) in enumerate(options.tools.items()):
        found = dict(parameters or {})
        shared: dict[str, Any] = {key: found[key] for key in _DEFINITIONS if key in found}
        places = []
        for j, (key, schema) in enumerate(found.get("properties", {}).items()):
            rule, is_strict = f"p_{i}_{j}", name in options.strict
            value, is_text = _value_term(f"{rule}_json", name, schema, is_strict=is_strict)
            if not is_text:
                whole = {**shared, **schema} if isinstance(schema, dict) else shared
                schemas.append(SchemaRule(name=value, schema=whole, is_strict=is_strict))
            head = quoted(f'parameter name={_as_json(key)} string="{str(is_text).lower()}">')
            closer = quoted("parameter>\n")
            lines.append(f'{rule}: "<" {sign} {head} {value} "</" {sign} {closer}')
            places.append(rule if key in found.get("required", ()) else f"{rule}{{0,1}}")
        opening, closer = quoted(f"invoke name={_as_json(name)}>\n"), quoted("invoke>\n")
        lines.append(f'call_{i}: "<" {sign} {opening} {" ".join(places)} "</" {sign} {closer}')
    return RuleSet(lark="\n".join(lines), schemas=tuple(schemas))


def _value_term(json_rule: str, function: str, schema: Any, *, is_strict: bool) -> tuple[str, bool]:
    """Return the term of a parameter's value, and whether it is written as text."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return json_rule, False
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return "(" + " | ".join(map(quoted, texts)) + ")", True
    if is_strict and (unheld := [key for key in _TEXT_RULES if key in schema]):
        raise invalid(
            "tools",
            f"tools: {unheld[0]} of a parameter of {function} cannot be enforced, because this "
            "model writes texts without quotes: leave it or strict out",
        )
    return "/[^<]*/", True


def _format(name: str, block: str) -> ChatFormat:
    opener = f"<{DSML}{block}>"
    return ChatFormat(
        name=name,
        reasoning_parser_names=frozenset({name}),
        tool_call_parser_names=frozenset({name}),
        markers=(THINK, THINK_END, DSML),
        reasoning_start=THINK,
        reasoning_end=THINK_END,
        call_openers=(opener,),
        recognises=lambda habits: opener in habits.call,
        describe_tools=None,
        start=start_of,
        new_parser=DsmlParser,
        call_grammar=lambda options: _call_grammar(block, options),
    )


DEEPSEEK_V32: Final = _format("deepseek_v32", "function_calls")
DEEPSEEK_V4: Final = _format("deepseek_v4", "tool_calls")
