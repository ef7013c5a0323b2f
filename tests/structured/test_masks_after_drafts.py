"""Masks after drafts, with the library itself: nothing of a draft may stay, or be missed.

The library can take tokens back, but llguidance 1.9 then allowed what a grammar forbids; so a
fresh matcher that consumes the text is the twin of each mask.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import whalepod.models
from whalepod.scheduler.params import Constraint
from whalepod.server.engine.grammar import GrammarState
from whalepod.server.gateway.chat_formats.deepseek import v3_call_grammar, v31_call_grammar
from whalepod.server.gateway.chat_formats.interface import CallOptions
from whalepod.server.structured.interface import Compiler, Matcher
from whalepod.server.structured.llguidance_backend import LlguidanceCompiler
from whalepod.server.structured.schema_rules import RuleSet, one_of, quoted

TINY = Path(whalepod.models.__file__).parent / "tiny"
VOCAB_SIZE, EOS = 1536, 1
NUM_PROMPT_TOKENS, MAX_DRAFTS, MAX_TOKENS = 5, 4, 48
SEEDS = (0, 10, 27)
"""With rollbacks of llguidance in place of copies an object, a nested one and a list fail."""

COLORS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1}
PAINT = {
    "type": "object",
    "properties": {"colors": COLORS, "size": {"enum": [1, 2, 10]}, "is_dry": {"type": "boolean"}},
    "required": ["colors"],
    "additionalProperties": False,
}
ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "number": {"type": "integer"}},
    "required": ["city", "number"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"places": {"type": "array", "items": ADDRESS, "maxItems": 3}},
    "required": ["places"],
    "additionalProperties": False,
}
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
PUNCTUATION = frozenset(
    token_id for token, token_id in TOKENIZER.get_vocab().items() if not token.strip('Ġ{}[]":,')
)


def marker_term(marker: str) -> str:
    token_id = TOKENIZER.token_to_id(marker)
    return quoted(marker) if token_id is None else f"<[{token_id}]>"


CALLS = CallOptions(
    tools={"paint": PAINT, "move": ADDRESS},
    strict=frozenset({"paint", "move"}),
    max_calls=3,
    marker=marker_term,
)


def of_calls(rules: RuleSet) -> str:
    return RuleSet(lark=f"start: calls\n{rules.lark}", schemas=rules.schemas).encode()


GRAMMARS = {
    "list": Constraint(kind="json_schema", grammar=json.dumps(COLORS)),
    "object": Constraint(kind="json_schema", grammar=json.dumps(PAINT)),
    "nested": Constraint(kind="json_schema", grammar=json.dumps(NESTED)),
    "any object": Constraint(kind="json_schema", grammar='{"type":"object"}'),
    "regex": Constraint(kind="regex", grammar=r"(ab?|[0-9]{1,3}|\.)+ (x|yz){2,9}"),
    "any list": Constraint(kind="json_schema", grammar='{"type":"array"}'),
    "choice": Constraint(kind="rules", grammar=one_of(["red", "redder", "grown"]).encode()),
    "lark": Constraint(kind="lark", grammar='start: item ("," item)*\nitem: /[a-c]+/ "=" /[0-9]+/'),
    "v3 calls": Constraint(kind="rules", grammar=of_calls(v3_call_grammar(CALLS))),
    "v3.1 calls": Constraint(kind="rules", grammar=of_calls(v31_call_grammar(CALLS))),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return LlguidanceCompiler(TOKENIZER.to_str(), VOCAB_SIZE, [EOS])


class Walk:
    """A seeded walk through a grammar: whatever is drawn is drawn from a fresh matcher's mask."""

    def __init__(self, compiler: Compiler, constraint: Constraint, seed: int) -> None:
        self._compiler, self._constraint = compiler, constraint
        self._draw = random.Random(seed)
        self.path = max((self.continued([], MAX_TOKENS) for _ in range(4)), key=len)

    def matcher_after(self, token_ids: Sequence[int]) -> Matcher:
        """Compile anew and consume a text: no copy, and nothing taken back."""
        matcher = self._compiler.compile(self._constraint)
        for token_id in token_ids:
            assert matcher.consume(token_id)
        return matcher

    def continued(
        self, text: Sequence[int], num_tokens: int, unlike: int | None = None
    ) -> list[int]:
        """Return up to this many tokens that may follow a text; the first is not `unlike`."""
        matcher, more = self.matcher_after(text), list[int]()
        while len(more) < num_tokens:
            may_come = set(np.flatnonzero(matcher.allowed()).tolist()) - {EOS}
            may_come -= set() if more or unlike is None else {unlike}
            if not may_come:
                break
            if self._draw.random() < 0.7:  # else most tokens are letters of strings
                may_come = may_come & PUNCTUATION or may_come
            more.append(self._draw.choice(sorted(may_come)))
            assert matcher.consume(more[-1])
        return more

    def drafts_at(self, position: int) -> list[int]:
        """Return guesses of which the first ones are right, and the rest could have been."""
        num_right = self._draw.randint(0, MAX_DRAFTS)
        right = self.path[position : position + num_right]
        text = self.path[: position + len(right)]
        actual = self.path[len(text)] if len(text) < len(self.path) else None
        return right + self.continued(text, MAX_DRAFTS - len(right), unlike=actual)

    def num_tokens_of_step(self) -> int:
        return self._draw.randint(1, MAX_DRAFTS + 1)

    def flip(self) -> bool:
        return self._draw.random() < 0.3


def new_state(compiler: Compiler, constraint: Constraint) -> GrammarState:
    return GrammarState(
        compiler.compile(constraint),
        constraint,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS],
    )


def test_a_guess_that_opened_an_object_is_forgotten_in_a_list(compiler: Compiler) -> None:
    """Behind a rollback from `[{"` the text `["` was taken for a key: a colon might follow."""
    constraint = GRAMMARS["any list"]
    state = new_state(compiler, constraint)
    bracket, brace, quote, colon = map(TOKENIZER.token_to_id, ("[", "{", '"', '":'))
    space_and_quote = TOKENIZER.token_to_id('Ġ"')

    for num_drafts in range(4):
        assert state.allowed([bracket, brace, quote][:num_drafts]) is not None
    state.observe(NUM_PROMPT_TOKENS, [bracket, space_and_quote])

    allowed_V = state.allowed()
    assert allowed_V is not None
    assert not allowed_V[colon]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_behind_drafts_is_that_of_a_text_with_them(
    compiler: Compiler, name: str, seed: int
) -> None:
    constraint = GRAMMARS[name]
    walk, state = Walk(compiler, constraint, seed), new_state(compiler, constraint)
    position = num_judged = 0
    while position <= len(walk.path):
        text, drafts = walk.path[:position], walk.drafts_at(position)
        expected = [walk.matcher_after(text + drafts[:k]).allowed() for k in range(len(drafts) + 1)]

        for k, expected_V in enumerate(expected):
            assert np.array_equal(state.allowed(drafts[:k]), expected_V), (text, drafts[:k])
        if walk.flip():  # else the text goes on at once, as after a step: asking again may mend
            forbidden = int(np.flatnonzero(~expected[-1])[-1])
            assert state.allowed([*drafts, forbidden]) is None
            assert np.array_equal(state.allowed(), expected[0]), (text, drafts)

        row = walk.path[position : position + walk.num_tokens_of_step()]
        state.observe(NUM_PROMPT_TOKENS + position, row)
        position += max(len(row), 1)
        num_judged += len(drafts)
    assert num_judged
