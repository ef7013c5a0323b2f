"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import orjson
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import GrammarError, Matcher
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, decode_rules

WHITE_SPACE: Final = r"( |\r?\n( {0,16}|\t{0,8}))?"
"""Between two tokens of JSON: a blank, or a new line with its indentation. A model that likes
spaces must come to an end."""

_ESCAPE_OR_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_REPEAT: Final = re.compile(r"[*+?}]\*")


class LlguidanceCompiler:
    """A `Compiler`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the vocabulary of a `tokenizer.json`.

        vocab_size     width of the model's logits, which may exceed the tokenizer's vocabulary
        eos_token_ids  tokens that end a text; allowed wherever the grammar may end
        """
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._vocab_size = vocab_size

    def compile(self, constraint: Constraint) -> Matcher:
        if constraint.kind == "any":
            return Unconstrained(self._vocab_size)
        matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
        if matcher.is_error():
            raise GrammarError(_explain(matcher.get_error()))
        return LlguidanceMatcher(matcher, self._vocab_size)


class LlguidanceMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]))

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_explain(self._matcher.get_error()))
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def copy(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._vocab_size)


class Unconstrained:
    """A `Matcher` that allows every token: only the reasoning of its text has a bound."""

    def __init__(self, vocab_size: int) -> None:
        self._all_V = np.ones(vocab_size, np.bool_)

    def consume(self, token_id: int) -> bool:
        return True

    def allowed(self) -> NDArray[np.bool_]:
        return self._all_V

    def copy(self) -> Self:
        return self  # it has no place in a grammar


def _grammar(constraint: Constraint) -> str:
    """Return llguidance's own form of a grammar."""
    text = constraint.grammar
    try:
        match constraint.kind:
            case "json_schema":
                return str(
                    LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITE_SPACE})
                )
            case "regex":
                _refuse_repeated_repeat(text)
                return str(LLMatcher.grammar_from_regex(text))
            case "lark":
                return str(LLMatcher.grammar_from_lark(text))
            case "rules":
                return str(LLMatcher.grammar_from_lark(_with_schemas(decode_rules(text))))
            case "gbnf":
                return str(LLMatcher.grammar_from_lark(gbnf_to_lark(text)))
            case "any":
                raise GrammarError("without a grammar there is nothing to convert")
    except GrammarError:
        raise
    except Exception as error:  # the converters raise whatever they stumble over
        raise GrammarError(_explain(str(error))) from error


def _with_schemas(rules: RuleSet) -> str:
    """Return Lark in which the rules of JSON schemas are written out."""
    return "\n".join([rules.lark, *(f"{rule.name}: {_json_term(rule)}" for rule in rules.schemas)])


def _json_term(rule: SchemaRule) -> str:
    schema = rule.schema if rule.is_strict else enforceable(rule.schema)
    return _term_of(schema, is_strict=rule.is_strict)


def _term_of(schema: object, *, is_strict: bool) -> str:
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    guidance = {"whitespace_pattern": WHITE_SPACE, "lenient": not is_strict}
    return "%json " + orjson.dumps({**schema, "x-guidance": guidance}).decode()


def enforceable(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what can be enforced of a schema that need not be: a part that cannot is passed over.

    First patterns that the library cannot read, then whole properties. What is no schema at all
    stays one that is refused.
    """
    if _is_enforceable(schema):
        return schema
    loose = _without_odd_patterns(schema)
    assert isinstance(loose, dict)
    if _is_enforceable(loose):
        return loose
    shared = {key: value for key, value in loose.items() if key in ("$defs", "definitions")}
    properties = loose.get("properties")
    if isinstance(properties, dict):
        checked = {
            name: part if _is_enforceable({"allOf": [part]} | shared) else {}
            for name, part in properties.items()
        }
        loose = {**loose, "properties": checked}
    return loose


def _is_enforceable(schema: Mapping[str, Any]) -> bool:
    try:
        grammar = LLMatcher.grammar_from_lark(f"start: x\nx: {_term_of(schema, is_strict=False)}")
        return not LLMatcher.validate_grammar(grammar)
    except Exception:  # the converters raise whatever they stumble over
        return False


def _without_odd_patterns(schema: object) -> object:
    """Return a schema without the regular expressions that the library cannot read."""
    if isinstance(schema, list):
        return [_without_odd_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {key: _without_odd_patterns(value) for key, value in schema.items()}
    if isinstance(pattern := whole.get("pattern"), str) and not _is_readable(pattern):
        del whole["pattern"]
    if isinstance(patterns := whole.get("patternProperties"), dict):
        whole["patternProperties"] = {key: patterns[key] for key in patterns if _is_readable(key)}
    return whole


def _is_readable(pattern: str) -> bool:
    return _is_enforceable({"type": "string", "pattern": pattern})


def _refuse_repeated_repeat(pattern: str) -> None:
    """The library reads `a**` as `(a*)*`; everyone else calls it a mistake."""
    if _REPEATED_REPEAT.search(_ESCAPE_OR_CLASS.sub("x", pattern)):
        raise GrammarError(f"multiple repeat in the regular expression {pattern[:80]!r}")


def _explain(text: str) -> str:
    """Return what a library's message says: a picture of the place and a dump of state follow."""
    if "NoExtensionBias" in text:
        return "no text fulfils it"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *reasons[:1]])[:300]
