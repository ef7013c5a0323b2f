"""DeepSeek R1: every answer begins with a think part, mostly opened by the prompt; V3's calls."""

from __future__ import annotations

from whalepod.server.gateway.families.call_grammar import v3_call_grammar
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
    return DeepseekParser(options, reasons=True, trims_reasoning=True)


def _recognises(template: str) -> bool:
    # it cuts earlier turns at the tag and never asks whether to think
    return "<｜Assistant｜>" in template and THINK_END in template and "thinking" not in template


DEEPSEEK_R1 = Family(
    name="deepseek_r1",
    reasoning_parser_names=frozenset({"deepseek_r1"}),
    tool_call_parser_names=frozenset({"deepseek_v3", "deepseek_r1"}),
    markers=MARKERS,
    reasoning_start=THINK,
    reasoning_end=THINK_END,
    call_openers=(CALLS, CALL),
    recognises=_recognises,
    start=start_of,
    new_parser=_new_parser,
    call_grammar=v3_call_grammar,
)
