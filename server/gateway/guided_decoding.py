"""Turns what requests ask of the form of an answer into a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from whalepod.scheduler.params import Constraint
from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.chat_formats.interface import CallOptions, ChatFormat, Start
from whalepod.server.gateway.limits import MAX_FORCED_CALLS, MAX_GRAMMAR_CHARS, MAX_NUM_CHOICE_TEXTS
from whalepod.server.gateway.schema import ChatRequest, ResponseFormat
from whalepod.server.gateway.strict_schemas import closed
from whalepod.server.gateway.tools import Functions, ToolChoice, strict_functions
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, one_of, quoted
from whalepod.server.tokenizer import TextTokenizer

ANY_OBJECT: Final = {"type": "object"}


def of_response_format(response_format: ResponseFormat | None) -> Constraint | None:
    """Return the grammar of `response_format`; None when it asks for text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _of_schema(ANY_OBJECT, "response_format")
    path = "response_format.json_schema"
    if response_format.json_schema is None:
        raise invalid(path, f"{path} is missing")
    schema = response_format.json_schema.get("schema")
    if response_format.json_schema.get("strict") is True and isinstance(schema, dict):
        schema = closed(schema, f"{path}.schema")
    return _of_schema(schema, f"{path}.schema")


def of_structured_outputs(fields: Mapping[str, Any] | None) -> Constraint | None:
    """Return the grammar of vLLM's `structured_outputs`: one of its keys may be given."""
    param = "structured_outputs"
    given = {name: value for name, value in (fields or {}).items() if value not in (None, False)}
    if fields is None:
        return None
    if len(given) != 1:
        kinds = "json, json_object, regex, choice and grammar"
        raise invalid(param, f"structured_outputs needs exactly one of {kinds}")
    ((name, value),) = given.items()
    path = f"{param}.{name}"
    match name, value:
        case "json", str():
            return _of_schema(_parse(value, path), path)
        case "json", _:
            return _of_schema(value, path)
        case "json_object", True:
            return _of_schema(ANY_OBJECT, path)
        case "regex", str():
            return _bounded(Constraint(kind="regex", grammar=value), path)
        case "grammar", str():
            kind: Any = "gbnf" if "::=" in value else "lark"
            return _bounded(Constraint(kind=kind, grammar=value), path)
        case "choice", [str(), *_]:
            return _of_choices(value, path)
    raise invalid(path, f"{path} is not supported, or not in this form")


def either(asked: Constraint | None, formatted: Constraint | None) -> tuple[Constraint | None, str]:
    """Return the one grammar of both fields that may ask for one, and the field that does."""
    if asked is not None and formatted is not None:
        message = "structured_outputs and response_format exclude each other"
        raise invalid("structured_outputs", message)
    return (formatted, "response_format") if asked is None else (asked, "structured_outputs")


def thinking_budget(request: ChatRequest) -> int | None:
    """Return how many tokens the reasoning may have, by either name; None: as many as it likes."""
    if request.thinking_token_budget is not None or not isinstance(request.thinking, dict):
        return request.thinking_token_budget
    budget = request.thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 0):
        path = "thinking.budget_tokens"
        raise invalid(path, f"{path} must be an integer of at least 0, got {budget!r:.40}")
    return budget


class GuidedDecoding:
    """Builds the grammars of chats, which may call functions and reason first."""

    def __init__(self, chat_format: ChatFormat | None, tokenizer: TextTokenizer) -> None:
        self._format = chat_format
        self._tokenizer = tokenizer

    def of_chat(
        self, request: ChatRequest, functions: Functions, choice: ToolChoice, start: Start
    ) -> tuple[Constraint | None, str]:
        """Return the grammar of a chat's answer, if it needs one, and the field that asks for it.

        Raises ApiError for wishes that exclude each other, or that the model's format cannot have.
        """
        constraint, param = self._of_answer(request, functions, choice, start)
        budget, chat_format = thinking_budget(request), self._format
        if budget is None or start == "content" or not (chat_format and chat_format.reasoning_end):
            return constraint, param
        if start == "open" and constraint is not None and constraint.starts_after is None:
            return constraint, param  # its grammar begins at once and knows no reasoning
        opening, end = None, self._marker_id(chat_format.reasoning_end)
        if start == "open" and chat_format.reasoning_start is not None:
            opening = self._marker_id(chat_format.reasoning_start)
        # parsers, too, take a call for the end of the reasoning
        calls = self._tokenizer.ids_of(chat_format.call_openers if choice.mode != "none" else ())
        if constraint is None:
            param = "thinking_token_budget"
            constraint = Constraint(kind="any", grammar="", starts_after=end, is_optional=True)
        bounded = replace(
            constraint,
            reasoning_start=opening,
            reasoning_ends=(end, *sorted(calls)),
            max_reasoning_tokens=budget,
        )
        return bounded, param

    def _of_answer(
        self, request: ChatRequest, functions: Functions, choice: ToolChoice, start: Start
    ) -> tuple[Constraint | None, str]:
        """Return the grammar of an answer whose reasoning has no bound."""
        asked = of_structured_outputs(request.structured_outputs)
        formatted = of_response_format(request.response_format)
        parallel = request.parallel_tool_calls is not False
        strict = strict_functions(request.tools)
        _, param = either(asked, formatted)
        if choice.is_forced:
            if asked is not None:
                raise invalid(
                    param, f"structured_outputs and tool_choice {choice.mode} exclude each other"
                )
            calls = self._calls(functions, strict, choice, parallel=parallel)
            asked, param = _start_with("calls", calls), "tools"
        elif formatted is not None:
            asked = formatted
            if choice.mode == "auto" and self._format is not None:
                calls = self._calls(functions, strict, choice, parallel=parallel)
                asked = _or_calls(formatted, calls)
        elif asked is None and choice.mode == "auto":
            self._known_format("tools need", "tools")
            return self._strict_calls(functions, strict, parallel=parallel), "tools"
        if asked is None:
            return None, param
        return self._after_reasoning(_bounded(asked, param), choice, start), param

    def _strict_calls(
        self, functions: Functions, strict: frozenset[str], *, parallel: bool
    ) -> Constraint | None:
        """Return a grammar that begins with a block of calls, if the model begins one.

        Arguments of functions that are not strict may be any object. None: no function is strict.
        Raises ApiError if the model has no token that opens a block: nothing could hold it there.
        """
        if not strict:
            return None
        chat_format = self._known_format("strict functions need", "tools")
        block, *single = chat_format.call_openers
        opener = self._tokenizer.ids_of([block])
        if not opener:
            raise invalid(
                "tools",
                f"tools: {block} is no token of this model, so strict arguments cannot be "
                "enforced: leave strict out, or force the call with tool_choice",
            )
        options = CallOptions(
            tools={
                name: _closed_parameters(functions, name) if name in strict else ANY_OBJECT
                for name in functions
            },
            strict=strict,
            max_calls=MAX_FORCED_CALLS if parallel else 1,
            marker=self._marker_term,
            is_open=True,
        )
        constraint = replace(
            _start_with("calls", chat_format.call_grammar(options)),
            starts_after=min(opener),
            is_optional=True,
            banned_before=tuple(sorted(self._tokenizer.ids_of(single))),
        )
        return _bounded(constraint, "tools")

    def _known_format(self, who_needs: str, param: str) -> ChatFormat:
        if self._format is None:
            raise invalid(
                param,
                f"{who_needs} a chat template whose tool calls are known; this model's is not: "
                "start the server with --tool-call-parser",
            )
        return self._format

    def _calls(
        self, functions: Functions, strict: frozenset[str], choice: ToolChoice, *, parallel: bool
    ) -> RuleSet:
        chat_format = self._known_format(f"tool_choice {choice.mode} needs", "tool_choice")
        is_named = choice.name is not None
        options = CallOptions(
            tools={
                name: _closed_parameters(functions, name) if name in strict else functions[name]
                for name in functions
                if choice.name in (None, name)
            },
            strict=strict,
            max_calls=MAX_FORCED_CALLS if parallel and not is_named else 1,
            marker=self._marker_term,
        )
        return chat_format.call_grammar(options)

    def _marker_term(self, marker: str) -> str:
        """Return the Lark term of a marker: the token that it is, or else its text."""
        ids = self._tokenizer.ids_of([marker])
        return f"<[{min(ids)}]>" if ids else quoted(marker)

    def _after_reasoning(
        self, constraint: Constraint, choice: ToolChoice, start: Start
    ) -> Constraint:
        """Let the model think before the grammar begins, but not act."""
        chat_format = self._format
        if chat_format is None or chat_format.reasoning_end is None or start != "reasoning":
            return constraint
        end = self._marker_id(chat_format.reasoning_end)
        acts = choice.mode != "none"  # a call there would end the reasoning without its tag
        banned = self._tokenizer.ids_of(chat_format.markers) - {end} if acts else ()
        return replace(constraint, starts_after=end, banned_before=tuple(sorted(banned)))

    def _marker_id(self, marker: str) -> int:
        """Return the token of a marker around the reasoning."""
        ids = self._tokenizer.ids_of([marker])
        if not ids:
            raise invalid("thinking", f"{marker} is no token of this model: turn thinking off")
        return min(ids)


def _closed_parameters(functions: Functions, name: str) -> Mapping[str, Any]:
    return closed(functions[name] or ANY_OBJECT, f"tools: the strict parameters of {name}")


def _or_calls(constraint: Constraint, calls: RuleSet) -> Constraint:
    """Return the grammar of an answer that fulfils a JSON schema, or calls functions instead."""
    schema = orjson.loads(constraint.grammar)
    answer = SchemaRule(name="answer", schema=schema, is_strict=True)
    return _start_with("answer | calls", replace(calls, schemas=(answer, *calls.schemas)))


def _start_with(what: str, rules: RuleSet) -> Constraint:
    rules = replace(rules, lark=f"start: {what}\n{rules.lark}")
    return Constraint(kind="rules", grammar=rules.encode())


def _of_schema(schema: object, path: str) -> Constraint:
    if not isinstance(schema, dict):
        raise invalid(path, f"{path} must be a JSON schema (an object)")
    schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    try:
        text = orjson.dumps(schema).decode()  # properties come in the schema's order
    except TypeError as error:
        raise invalid(path, f"{path}: {error}") from error
    return _bounded(Constraint(kind="json_schema", grammar=text), path)


def _of_choices(choices: list[Any], path: str) -> Constraint:
    if len(choices) > MAX_NUM_CHOICE_TEXTS or not all(isinstance(c, str) and c for c in choices):
        allowed = f"1 to {MAX_NUM_CHOICE_TEXTS} texts that are not empty"
        raise invalid(path, f"{path} must be a list of {allowed}")
    return _bounded(Constraint(kind="rules", grammar=one_of(choices).encode()), path)


def _bounded(constraint: Constraint, path: str) -> Constraint:
    num_chars = len(constraint.grammar)
    if num_chars > MAX_GRAMMAR_CHARS:
        raise invalid(
            path, f"{path} has {num_chars} characters, at most {MAX_GRAMMAR_CHARS} allowed"
        )
    return constraint


def _parse(text: str, path: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(path, f"{path} is not valid JSON: {error}") from None
