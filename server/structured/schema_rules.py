"""Lark grammars with JSON schemas in them: what the gateway writes and the library reads.

The rules use little of Lark: texts in quotes, tokens as `<[id]>`, `|`, groups and `{m,n}`. A rule
that is a JSON schema stands apart, so that its author needs no dialect of a library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRule:
    """A rule that stands for all texts that fulfil a JSON schema."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    """Whether a keyword that cannot be enforced refuses the grammar; else it is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """Lark text, and the rules that it names and does not define."""

    lark: str
    schemas: tuple[SchemaRule, ...] = ()

    def encode(self) -> str:
        """Return the grammar of a `Constraint` of kind "rules"."""
        schemas = [[rule.name, rule.is_strict, rule.schema] for rule in self.schemas]
        return orjson.dumps([self.lark, schemas]).decode()


def decode_rules(text: str) -> RuleSet:
    """Return what `RuleSet.encode` wrote."""
    lark, schemas = orjson.loads(text)
    return RuleSet(
        lark=lark,
        schemas=tuple(
            SchemaRule(name=name, is_strict=is_strict, schema=schema)
            for name, is_strict, schema in schemas
        ),
    )


def one_of(texts: Sequence[str]) -> RuleSet:
    """Return the grammar of a choice between texts."""
    return RuleSet(lark="start: " + " | ".join(quoted(text) for text in texts))


def quoted(text: str) -> str:
    """Return the Lark term of a text."""
    return orjson.dumps(text).decode()
