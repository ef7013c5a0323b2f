"""Picks the format of a checkpoint by its chat template."""

from __future__ import annotations

from typing import Final

from whalepod.server.chat_template import ChatTemplate
from whalepod.server.errors import StartupError
from whalepod.server.gateway.chat_formats.deepseek import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31
from whalepod.server.gateway.chat_formats.dsml import DEEPSEEK_V4, DEEPSEEK_V32
from whalepod.server.gateway.chat_formats.interface import ChatFormat

CHAT_FORMATS: Final = (DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4)

AUTO: Final = "auto"


def choose_chat_format(
    template: ChatTemplate | None, *, reasoning_parser: str = AUTO, tool_call_parser: str = AUTO
) -> ChatFormat | None:
    """Return the format of the calls that a template renders, or the one that both names select.

    None: no format has such calls and no name was given, so answers are plain text. Raises
    StartupError for an unknown name, and for one that the template contradicts.
    """
    recognised = [each for each in CHAT_FORMATS if template and each.recognises(template.habits)]
    is_named = reasoning_parser != AUTO or tool_call_parser != AUTO
    if not recognised and not is_named:
        return None
    candidates = recognised or list(CHAT_FORMATS)
    for flag, name in (("reasoning", reasoning_parser), ("tool-call", tool_call_parser)):
        fitting = [each for each in candidates if name in _accepted_names(each, flag)]
        if not fitting:
            raise StartupError(_explain(flag, name, candidates[0], bool(recognised)))
        candidates = fitting
    return candidates[0]


def _accepted_names(chat_format: ChatFormat, flag: str) -> frozenset[str]:
    if flag == "reasoning":
        return chat_format.reasoning_parser_names | {AUTO}
    return chat_format.tool_call_parser_names | {AUTO}


def _explain(flag: str, name: str, chat_format: ChatFormat, recognised: bool) -> str:
    known = sorted(frozenset[str]().union(*(_accepted_names(f, flag) for f in CHAT_FORMATS)))
    if name not in known:
        return f"--{flag}-parser must be one of {', '.join(known)}; got {name!r}"
    if not recognised:
        return f"--{flag}-parser {name} does not go with the other parser flag: give only one"
    return (
        f"--{flag}-parser {name} does not fit this checkpoint, whose chat template is "
        f"{chat_format.name}'s: leave the flag out, or replace the template with --chat-template"
    )
