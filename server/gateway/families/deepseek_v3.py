"""DeepSeek V3: answers without thinking; calls with their arguments in a JSON code fence."""

from __future__ import annotations

from whalepod.server.gateway.families.call_grammar import v3_call_grammar
from whalepod.server.gateway.families.deepseek_markup import (
    CALL,
    CALLS,
    THINK_END,
    TOOL_MARKERS,
    DeepseekParser,
    start_of,
)
from whalepod.server.gateway.families.interface import Family, Parser, ParserOptions


def _new_parser(options: ParserOptions) -> Parser:
    return DeepseekParser(options, reasons=False, trims_reasoning=False)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    reasoning_parser_names=frozenset(),
    tool_call_parser_names=frozenset({"deepseek_v3"}),
    markers=TOOL_MARKERS,
    reasoning_start=None,
    reasoning_end=None,
    call_openers=(CALLS, CALL),
    recognises=lambda template: "<｜Assistant｜>" in template and THINK_END not in template,
    start=start_of,
    new_parser=_new_parser,
    call_grammar=v3_call_grammar,
)
