"""Grammars behind the sampler: drafts, repeated rows, the end of the reasoning."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from whalepod.models.synthetic_tokenizer import train_tokenizer
from whalepod.scheduler.params import Constraint
from whalepod.server.engine.grammar import GrammarState, GrammarStore
from whalepod.server.structured.interface import Compiler, GrammarError, Matcher
from whalepod.server.structured.llguidance_backend import LlguidanceCompiler

VOCAB_SIZE, NUM_TOKENS, EOS = 540, 512, 1
"""The model's logits are wider than the tokenizer's vocabulary, as real ones are."""
NUM_PROMPT_TOKENS = 3
CALLS = "<｜tool▁calls▁begin｜>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(NUM_TOKENS)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return LlguidanceCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])


def new_state(compiler: Compiler, regex: str, **fields: object) -> GrammarState:
    constraint = Constraint(kind="regex", grammar=regex, **fields)  # type: ignore[arg-type]
    return GrammarState(
        compiler.compile(constraint),
        constraint,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS],
    )


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token for each letter."""
    return [tokenizer.token_to_id(letter) for letter in text]


def allowed(mask_V: NDArray[np.bool_] | None) -> list[int]:
    assert mask_V is not None
    return np.flatnonzero(mask_V).tolist()


def test_only_what_the_grammar_allows_may_come_next(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    state = new_state(compiler, "a[bc]")
    a, b, c = ids(tokenizer, "abc")

    assert a in allowed(state.allowed())
    assert b not in allowed(state.allowed())
    state.observe(NUM_PROMPT_TOKENS, [a])
    assert allowed(state.allowed()) == sorted([b, c])
    state.observe(NUM_PROMPT_TOKENS + 1, [b])
    assert allowed(state.allowed()) == [EOS]


def test_the_prompt_and_repeated_rows_are_not_counted(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """A recomputed sequence brings its whole text again, in other chunks."""
    state, (a, b, c) = new_state(compiler, "abc"), ids(tokenizer, "abc")

    state.observe(0, [7, 7])
    state.observe(2, [7, a])
    state.observe(0, [7, 7, 7, a, b])
    state.observe(3, [a])
    assert allowed(state.allowed()) == [c]


@given(text=st.text("abc", max_size=6), num_observed=st.integers(0, 6))
def test_drafts_leave_no_trace_and_mask_what_follows_them(
    tokenizer: Tokenizer, compiler: Compiler, text: str, num_observed: int
) -> None:
    """The mask behind drafts is that of a state that observed them: the plain twin."""
    observed, drafts = ids(tokenizer, text[:num_observed]), ids(tokenizer, text[num_observed:])
    state, twin = new_state(compiler, "[abc]{0,6}d?"), new_state(compiler, "[abc]{0,6}d?")
    state.observe(NUM_PROMPT_TOKENS, observed)
    twin.observe(NUM_PROMPT_TOKENS, observed)
    before = allowed(state.allowed())

    masks = [allowed(state.allowed(drafts[:k])) for k in range(len(drafts), -1, -1)][::-1]

    assert allowed(state.allowed()) == before
    for k, mask in enumerate(masks):
        assert mask == allowed(twin.allowed())
        twin.observe(NUM_PROMPT_TOKENS + num_observed + k, drafts[k : k + 1])


def test_b049_behind_a_draft_that_is_forbidden_nothing_is_asked(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    state, (a, b, c) = new_state(compiler, "abc"), ids(tokenizer, "abc")

    for drafts in ([b], [a, c], [a, b, c, a], [EOS], [a, EOS, b], [VOCAB_SIZE - 1]):
        assert state.allowed(drafts) is None
    state.observe(NUM_PROMPT_TOKENS, [a])
    assert allowed(state.allowed()) == [b]


def test_behind_an_ignored_end_only_the_end_may_come(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """With ignore_eos a right draft may be the end, and the text goes on behind it."""
    state, (a, b) = new_state(compiler, "ab"), ids(tokenizer, "ab")

    assert allowed(state.allowed([a, b, EOS])) == [EOS]
    assert allowed(state.allowed([a, b, EOS, EOS])) == [EOS]
    state.observe(NUM_PROMPT_TOKENS, [a, b, EOS])
    assert allowed(state.allowed([EOS])) == [EOS]


def test_item_39_the_grammar_begins_at_any_draft_position(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    end, banned = tokenizer.token_to_id("</think>"), tokenizer.token_to_id(CALLS)
    state = new_state(compiler, "ab", starts_after=end, banned_before=(banned,))
    a, b, c = ids(tokenizer, "abc")

    free = allowed(state.allowed())
    assert free == [i for i in range(VOCAB_SIZE) if i not in (EOS, banned)]
    assert allowed(state.allowed([c, b])) == free
    assert a in allowed(state.allowed([c, end]))
    assert allowed(state.allowed([c, end, a])) == [b]
    assert state.allowed([c, end, b]) is None
    state.observe(NUM_PROMPT_TOKENS, [c, end, a])
    assert allowed(state.allowed()) == [b]


def test_b041_after_drafts_that_break_the_grammar_anything_goes(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """What comes after them is not looked at, and the text itself still follows the grammar."""
    state = new_state(compiler, "ab")

    assert state.allowed(ids(tokenizer, "ac")) is None
    assert allowed(state.allowed()) == ids(tokenizer, "a")


@given(text=st.lists(st.sampled_from(["<think>", "</think>", CALLS, "a", "b"]), max_size=9),
       num_observed=st.integers(0, 9), is_open=st.booleans())  # fmt: skip
def test_a_budget_counts_from_the_moment_that_the_reasoning_opens(
    tokenizer: Tokenizer, compiler: Compiler, text: list[str], num_observed: int, is_open: bool
) -> None:
    """What may follow is judged by the text alone, seen or drafted; a call ends it, too."""
    think, end, calls = map(tokenizer.token_to_id, ("<think>", "</think>", CALLS))
    constraint = Constraint(
        kind="any", grammar="", starts_after=end, is_optional=True, max_reasoning_tokens=2,
        reasoning_start=think if is_open else None, reasoning_ends=(end, calls),
    )  # fmt: skip
    state = GrammarState(
        compiler.compile(constraint),
        constraint,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS],
    )
    state.observe(NUM_PROMPT_TOKENS, list(map(tokenizer.token_to_id, text[:num_observed])))

    mask = state.allowed(list(map(tokenizer.token_to_id, text[num_observed:])))

    opened = (text.index("<think>") + 1 if "<think>" in text else None) if is_open else 0
    ends = [i for i, token in enumerate(text) if token in ("</think>", CALLS)]
    if opened is not None and not ends and len(text) - opened >= 2:
        assert allowed(mask) == [end]
    else:
        assert mask is None or mask.all()


class Gated:
    """A compiler that waits for a signal."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.gate = threading.Event()
        self.num_compiled = 0

    def compile(self, constraint: Constraint) -> Matcher:
        assert self.gate.wait(10)
        self.num_compiled += 1
        return self._compiler.compile(constraint)


def test_a_store_compiles_off_the_loop_and_once(compiler: Compiler) -> None:
    gated = Gated(compiler)
    store = GrammarStore(lambda: gated)
    constraint = Constraint(kind="regex", grammar="a")

    first = store.matcher(constraint)
    again = store.matcher(Constraint(kind="regex", grammar="a", starts_after=5))
    broken = store.matcher(Constraint(kind="regex", grammar="("))
    assert not first.done()
    gated.gate.set()

    assert first is again
    assert first.result(10).allowed().any()
    with pytest.raises(GrammarError, match=r"unclosed group|not closed"):
        broken.result(10)
    assert gated.num_compiled == 2
    store.close()


def test_an_optional_grammar_leaves_the_text_before_it_alone(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    x, a, b = ids(tokenizer, "xab")
    state = new_state(compiler, "ab", starts_after=x, is_optional=True)

    assert state.allowed() is None
    assert state.allowed([a, b]) is None
    assert a in allowed(state.allowed([b, x]))
    assert b not in allowed(state.allowed([b, x]))
    state.observe(NUM_PROMPT_TOKENS, [b, x, a])
    assert allowed(state.allowed()) == [b]


def test_an_answer_may_end_before_an_optional_grammar_begins(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    x, y = ids(tokenizer, "xy")
    needed = new_state(compiler, "a", starts_after=x, banned_before=(y,))
    optional = new_state(compiler, "a", starts_after=x, banned_before=(y,), is_optional=True)

    assert EOS not in allowed(needed.allowed())
    assert EOS in allowed(optional.allowed())
    assert y not in allowed(needed.allowed()) + allowed(optional.allowed())
