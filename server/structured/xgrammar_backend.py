"""Grammars by xgrammar: JSON schemas, regular expressions, Lark and GBNF."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from xgrammar import (
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
)

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import GrammarError, Matcher
from whalepod.server.structured.schema_rules import RuleSet, decode_rules
from whalepod.server.structured.unconstrained import Unconstrained
from whalepod.server.structured.xgrammar_schema import adapted, refuse_what_is_not_enforced
from whalepod.server.token_bytes import bytes_of_tokens

MAX_WHITE_SPACE: Final = 8
"""Between two tokens of JSON: a model that likes spaces must come to an end."""

NO_TEXT: Final = b"\xff"
"""Begins nothing in UTF-8, so only a grammar that names a special token by its id allows it."""

_PLACE_IN_SOURCE: Final = re.compile(r"\[[\d:]+\] \S+?:\d+: ")
"""What the library puts before its messages: a time, a file and a line of its own."""


class XgrammarCompiler:
    """A `Compiler`; its arguments are `new_compiler`'s."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        vocabulary = bytes_of_tokens(tokenizer_json, special_prefix=NO_TEXT)[:vocab_size]
        info = TokenizerInfo(
            vocabulary, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        # we keep what was compiled; a thread of ours compiles
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size

    def compile(self, constraint: Constraint) -> Matcher:
        if constraint.kind == "any":
            return Unconstrained(self._vocab_size)
        try:
            compiled = self._compile(constraint)
            return XgrammarMatcher(GrammarMatcher(compiled), self._vocab_size)
        except GrammarError:
            raise
        except Exception as error:  # the library raises whatever it stumbles over
            raise GrammarError(_explain(str(error))) from error

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        text = constraint.grammar
        match constraint.kind:
            case "json_schema":
                return self._compiler.compile_grammar(_of_schema(orjson.loads(text)))
            case "regex":
                return self._compiler.compile_regex(text)
            case "lark":
                return self._compiler.compile_lark(text)
            case "rules":
                return self._of_rules(decode_rules(text))
            case "gbnf":
                return self._compiler.compile_grammar(text)
            case "any":
                raise GrammarError("without a grammar there is nothing to compile")

    def _of_rules(self, rules: RuleSet) -> CompiledGrammar:
        names = [f"{rule.name}: @{rule.name}" for rule in rules.schemas]
        grammars: dict[str, Grammar | str] = {
            r.name: _of_schema(r.schema, is_strict=r.is_strict) for r in rules.schemas
        }
        return self._compiler.compile_lark("\n".join([rules.lark, *names]), named_grammars=grammars)


class XgrammarMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def allowed(self) -> NDArray[np.bool_]:
        try:
            self._matcher.fill_next_token_bitmask(self._bits)
        except RuntimeError as error:
            raise GrammarError(_explain(str(error))) from error
        bits = self._bits.view(np.uint8).ravel()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def copy(self) -> Self:
        return type(self)(self._matcher.fork(), self._vocab_size)


def _of_schema(schema: Mapping[str, Any], *, is_strict: bool = True) -> Grammar:
    if is_strict:
        refuse_what_is_not_enforced(schema)
    return Grammar.from_json_schema(
        orjson.dumps(adapted(schema)).decode(),
        any_whitespace=True,
        max_whitespace_cnt=MAX_WHITE_SPACE,
        strict_mode=False,  # a schema that does not close its objects leaves them open
    )


def _explain(text: str) -> str:
    """Return what a library's message says; a picture of the place follows."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return _PLACE_IN_SOURCE.sub("", lines[0])[:300]
