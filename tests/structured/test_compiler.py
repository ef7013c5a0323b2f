"""The library, judged by texts: what a schema allows may be written, what it forbids may not."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from whalepod.models.synthetic_tokenizer import train_tokenizer
from whalepod.scheduler.params import Constraint
from whalepod.server.config import EngineConfig
from whalepod.server.structured.interface import Compiler, GrammarError, Matcher
from whalepod.server.structured.llguidance_backend import LlguidanceCompiler
from whalepod.server.structured.schema_rules import RuleSet, SchemaRule, decode_rules, one_of
from whalepod.server.structured.worker import check

VOCAB_SIZE, EOS = 540, 1
CALLS = "<｜tool▁calls▁begin｜>"
NUM_WALKS, MAX_TOKENS = 6, 120

INTEGER = {"type": "integer"}
JUDGED: list[tuple[dict[str, Any], str, str]] = [
    (INTEGER, "-12", "1.5"),
    ({"type": ["string", "null"]}, "null", "1"),
    ({"enum": ['a"b', 1, None]}, r'"a\"b"', "2"),
    ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
    ({"type": "string", "const": 1}, '"a"', "1"),
    ({"type": "string", "enum": ["a", 1]}, '"a"', "1"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"上🙂"', '"abcd"'),
    ({"type": ["string", "null"], "maxLength": 2}, '"ab"', '"abc"'),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    ({"type": "string", "pattern": "^[^b]$"}, '"a"', '"\x01"'),
    ({"type": "string", "pattern": "^a\"b$"}, r'"a\"b"', '"a"b"'),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aa"', '"aaa"'),
    ({"type": "string", "format": "date"}, '"2024-01-01"', '"x"'),
    ({"type": "string", "format": "email", "maxLength": 3}, '"a@b"', '"a@bcd.ef"'),
    ({"type": "string", "format": "no-such"}, '"a"', "1"),
    ({"minLength": 3}, '"abc"', '"a"'),
    ({"type": "number", "minimum": 1.5}, "2.5", "1.2"),
    ({"type": "integer", "exclusiveMinimum": 2, "maximum": 7}, "3", "2"),
    ({"type": "integer", "multipleOf": 3}, "9", "4"),
    ({"type": "number", "multipleOf": 0.5}, "1.5", "1.3"),
    ({"not": {"type": "string"}}, "1", '"x"'),
    ({"if": INTEGER, "then": {"minimum": 3}}, "4", "1"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "4", "1"),
    ({"anyOf": [INTEGER], "minimum": 5}, "6", "1"),
    ({"anyOf": [INTEGER, {"type": "null"}]}, "null", '"x"'),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "1.5", "1"),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, "1", '"a"'),
    ({"$ref": "#/$defs/a", "minimum": 4, "$defs": {"a": INTEGER}}, "5", "1"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1,2]", "[1,1]"),
    ({"type": "array", "contains": {"const": 1}}, "[1]", "[2]"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1]", '["a"]'),
    ({"type": "array", "minItems": 1, "maxItems": 2}, "[1]", "[]"),
    ({"items": INTEGER}, "[1]", '["x"]'),
    ({"properties": {"a": INTEGER}}, '{"a":1}', '{"a":"x"}'),
    ({"type": "object", "required": ["q"]}, '{"q":1}', "{}"),
    ({"type": "object", "additionalProperties": INTEGER}, '{"q":1}', '{"q":"x"}'),
    ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, '{"a":1}', '{"b":1}'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"b":1}', '{"a":1}'),
    ({"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}}, '{"a":1}',
     '{"b":1}'),
]  # fmt: skip
"""Schema, a text that fulfils it, one that does not."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(512)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return LlguidanceCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])


def of_schema(compiler: Compiler, schema: dict[str, Any]) -> Matcher:
    return compiler.compile(Constraint(kind="json_schema", grammar=json.dumps(schema)))


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a matcher lets a text be written, token by token, and end there."""
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        allowed_V = matcher.allowed()
        assert matcher.consume(token_id) == allowed_V[token_id], (text, token_id)
        if not allowed_V[token_id]:
            return False
    return bool(matcher.allowed()[EOS])


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: json.dumps(case[0])[:60])
def test_a_keyword_is_enforced_or_refused_by_name(
    compiler: Compiler, tokenizer: Tokenizer, case: tuple[dict[str, Any], str, str]
) -> None:
    schema, good, bad = case
    try:
        matcher = of_schema(compiler, schema)
    except GrammarError as error:
        said = str(error)
    else:
        assert not accepts(matcher.copy(), tokenizer, bad)
        assert accepts(matcher, tokenizer, good)
        return
    assert any(
        word in said
        for word in ("nsupported", "not supported", "nimplemented", "nknown", "nsatisfi")
    ), said


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}, "b": INTEGER},
         "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"enum": ["x\n", 'y"', None]}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "string", "pattern": "^[^x]{1,3}$"}, {"type": "boolean"}]},
        {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 2},
    ],
)  # fmt: skip
def test_whatever_is_chosen_of_what_is_allowed_fulfils_the_schema(
    compiler: Compiler, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    table = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    matcher, num_whole = of_schema(compiler, schema), 0

    for seed in range(NUM_WALKS):
        walk, token_ids, draw = matcher.copy(), [], random.Random(seed)
        while len(token_ids) < MAX_TOKENS:
            token_id = draw.choice(np.flatnonzero(walk.allowed()).tolist())
            if token_id == EOS:
                text = tokenizer.decode(token_ids, skip_special_tokens=False)
                jsonschema.validate(json.loads(text), schema)
                num_whole += 1
                break
            assert token_id < len(table)
            assert walk.consume(token_id)
            token_ids.append(token_id)
    assert num_whole


@pytest.mark.parametrize(
    ("kind", "grammar", "good", "bad"),
    [
        ("regex", "a[bc]{2}", "abc", "abd"),
        ("lark", 'start: "x" item\nitem: /[0-9]{2}/', "x12", "x1"),
        ("gbnf", 'root ::= "x" item\nitem ::= [0-9] [0-9]', "x12", "x1"),
        ("rules", one_of(['a "b"\n', "上"]).encode(), 'a "b"\n', "a"),
    ],
)
def test_dialects(
    compiler: Compiler, tokenizer: Tokenizer, kind: Any, grammar: str, good: str, bad: str
) -> None:
    matcher = compiler.compile(Constraint(kind=kind, grammar=grammar))

    assert not accepts(matcher.copy(), tokenizer, bad)
    assert accepts(matcher, tokenizer, good)


def test_rules_name_tokens_and_schemas(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """A marker's text, spelled out, is not its token."""
    marker = tokenizer.token_to_id(CALLS)
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    rule = SchemaRule(name="arguments", schema=schema, is_strict=True)
    rules = RuleSet(lark=f"start: <[{marker}]> arguments", schemas=(rule,))
    matcher = compiler.compile(Constraint(kind="rules", grammar=rules.encode()))

    assert np.flatnonzero(matcher.allowed()).tolist() == [marker]
    assert accepts(matcher.copy(), tokenizer, f'{CALLS}{{"a": 1}}')
    assert not accepts(matcher, tokenizer, f'{CALLS}{{"b":1}}')
    assert decode_rules(rules.encode()) == rules


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_schema_is_refused_for_what_cannot_be_enforced_only_if_it_is_strict(
    compiler: Compiler, tokenizer: Tokenizer, is_strict: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}
    rule = SchemaRule(name="answer", schema=schema, is_strict=is_strict)
    constraint = Constraint(
        kind="rules", grammar=RuleSet(lark="start: answer", schemas=(rule,)).encode()
    )

    if is_strict:
        with pytest.raises(GrammarError, match="not"):
            compiler.compile(constraint)
    else:
        assert accepts(compiler.compile(constraint), tokenizer, '{"a":"b"}')


def test_properties_come_in_the_schemas_order(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """A schema that asks for reasons before the answer means it."""
    schema = {
        "type": "object", "properties": {"why": INTEGER, "answer": INTEGER},
        "required": ["why", "answer"], "additionalProperties": False,
    }  # fmt: skip
    matcher = of_schema(compiler, schema)

    assert accepts(matcher.copy(), tokenizer, '{"why":1,"answer":2}')
    assert not accepts(matcher, tokenizer, '{"answer":2,"why":1}')


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("regex", "foo**"),
        ("regex", "(foo"),
        ("lark", "start: nothing"),
        ("gbnf", "root ::= nothing"),
        ("json_schema", '{"type":"objekt"}'),
        ("json_schema", '{"$ref":"#/$defs/x"}'),
        ("json_schema", '{"enum":[]}'),
    ],
)
def test_mistakes_are_explained_in_one_line(compiler: Compiler, kind: Any, grammar: str) -> None:
    said = check(compiler, Constraint(kind=kind, grammar=grammar))

    assert said is not None
    assert 5 < len(said) <= 320
    assert "\n" not in said


def test_control_characters_are_never_part_of_a_string(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    for bounds in ({}, {"maxLength": 4}, {"minLength": 1}, {"pattern": "^.*$"}):
        matcher = of_schema(compiler, {"type": "string", **bounds})
        assert matcher.consume(tokenizer.token_to_id('"'))
        for byte in range(0x20):
            (token_id,) = tokenizer.encode(chr(byte), add_special_tokens=False).ids
            assert not matcher.allowed()[token_id], (bounds, byte)


def test_another_library_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"structured_outputs_backend \(xgrammar\) must be"):
        EngineConfig(structured_outputs_backend="xgrammar")
