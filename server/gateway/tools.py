"""What a chat request says about functions: their definitions, the choice, and earlier calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.limits import MAX_FUNCTION_NAME_CHARS, MAX_NUM_TOOLS

Functions = dict[str, Mapping[str, Any] | None]
"""Parameter schemas by function name; None: the definition has none."""

_NAME: Final = re.compile(r"[^\s<>{}\"'`]+")
"""Anything that no markup needs."""


def is_function_name(name: str) -> bool:
    """Return whether a function can be called so."""
    return len(name) <= MAX_FUNCTION_NAME_CHARS and _NAME.fullmatch(name) is not None


def read_functions(tools: Sequence[dict[str, Any]] | None) -> Functions:
    """Return the functions of a request; ApiError names the definition that is wrong."""
    if len(tools or ()) > MAX_NUM_TOOLS:
        raise invalid("tools", f"at most {MAX_NUM_TOOLS} tools are allowed, got {len(tools or ())}")
    functions: Functions = {}
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool.get("type"), str):
            raise invalid(f"tools[{i}].type", f"tools[{i}].type must be a string")
        if tool["type"] != "function":
            continue
        path = f"tools[{i}].function"
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(path, f"{path} must be an object")
        name = _read_name(function.get("name"), path)
        if name in functions:
            raise invalid(f"{path}.name", f"{path}.name: {name!r} is defined twice")
        functions[name] = _read_parameters(function.get("parameters"), path)
    return functions


def strict_functions(tools: Sequence[dict[str, Any]] | None) -> frozenset[str]:
    """Return the names of the functions whose arguments must fulfil their schemas."""
    names = set()
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool["type"] != "function" or not isinstance(function, dict):
            continue
        strict = function.get("strict")
        if not isinstance(strict, bool | None):
            path = f"tools[{i}].function.strict"
            raise invalid(path, f"{path} must be true or false")
        if strict:
            names.add(function["name"])
    return frozenset(names)


def _read_name(name: object, path: str) -> str:
    path = f"{path}.name"
    if not isinstance(name, str):
        raise invalid(path, f"{path} must be a string")
    if not is_function_name(name):
        allowed = f"1 to {MAX_FUNCTION_NAME_CHARS} characters without spaces, quotes and brackets"
        raise invalid(path, f"{path} must have {allowed}, got {name[:80]!r}")
    return name


def _read_parameters(parameters: object, path: str) -> Mapping[str, Any] | None:
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{path}.parameters", f"{path}.parameters must be a JSON schema (an object)")
    return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the answer may, must or must not call a function, and which."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """The function of mode "named"."""

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


def read_choice(choice: str | Mapping[str, Any] | None, functions: Functions) -> ToolChoice:
    """Return what a request chooses; ApiError for what its tools cannot fulfil."""
    param = "tool_choice"
    match choice:
        case None | "none" | "auto":
            return ToolChoice(mode="none" if choice == "none" or not functions else "auto")
        case "required":
            if not functions:
                raise invalid(param, "tool_choice required needs tools of type function")
            return ToolChoice(mode="required")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in functions:
                known = ", ".join(functions) or "none"
                message = f"tool_choice names {name[:80]!r}, which is none of the tools: {known}"
                raise invalid(param, message)
            return ToolChoice(mode="named", name=name)
    named = '{"type": "function", "function": {"name": ...}}'
    raise invalid(param, f"tool_choice must be auto, none, required or {named}")
