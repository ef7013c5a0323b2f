"""DeepSeek V3.1: the prompt says whether to think; calls are a name and bare JSON."""

from __future__ import annotations

from whalepod.server.gateway.families.call_grammar import v31_call_grammar
from whalepod.server.gateway.families.deepseek_markup import (
    CALL,
    CALLS,
    MARKERS,
    THINK,
    THINK_END,
    DeepseekParser,
    start_of,
)
from whalepod.server.gateway.families.interface import Family, Parser, ParserOptions


def _new_parser(options: ParserOptions) -> Parser:
    return DeepseekParser(options, reasons=True, trims_reasoning=False)


def _recognises(template: str) -> bool:
    return "<｜Assistant｜>" in template and THINK_END in template and "thinking" in template


DEEPSEEK_V31 = Family(
    name="deepseek_v31",
    reasoning_parser_names=frozenset({"deepseek_v31", "deepseek_v3"}),
    tool_call_parser_names=frozenset({"deepseek_v31"}),
    markers=MARKERS,
    reasoning_start=THINK,
    reasoning_end=THINK_END,
    call_openers=(CALLS, CALL),
    recognises=_recognises,
    start=start_of,
    new_parser=_new_parser,
    call_grammar=v31_call_grammar,
)
