"""Requests with grammars in the engine: whatever is scheduled how, no token breaks the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.fakes import EOS, VOCAB_SIZE, FakeMtp, make_core, run_to_end
from tests.ladders import LadderCompiler, Rungs
from whalepod.mtp.depth import FixedDepth
from whalepod.scheduler.params import Constraint, SamplingParams
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.grammar_queue import MAX_COMPILING
from whalepod.server.messages import Abort, Rejected, Submit
from whalepod.server.structured.interface import GrammarError, Matcher

THINK, THINK_END = 48, 49
RULE = Constraint(kind="lark", grammar="12")
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, constraint=RULE)


@pytest.fixture
def compiler() -> LadderCompiler:
    return LadderCompiler(
        Rungs(first=1, num_rungs=7, end=THINK_END, vocab_size=VOCAB_SIZE, eos=EOS)
    )


@pytest.fixture
def grammars(compiler: LadderCompiler) -> Iterator[GrammarStore]:
    store = GrammarStore(lambda: compiler)
    yield store
    compiler.gate.set()
    store.close()


def submit(request_id: str, params: SamplingParams = PARAMS, **fields: object) -> Submit:
    prompt = tuple(range(1, 40))
    return Submit(request_id=request_id, prompt_token_ids=prompt, params=params, **fields)  # type: ignore[arg-type]


def is_ladder(token_ids: tuple[int, ...]) -> bool:
    *steps, last = token_ids
    return last == EOS and all(t % 7 == (1 + i % 7) % 7 for i, t in enumerate(steps))


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 1}, {"num_blocks": 3}]
)
@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"logit_bias": {2: 100.0}}])
def test_every_text_keeps_to_its_grammar(
    grammars: GrammarStore, limits: dict[str, int], changes: dict[str, object]
) -> None:
    core = make_core(grammars=grammars, **limits)
    params = replace(PARAMS, **changes)  # type: ignore[arg-type]
    plain = replace(params, constraint=None)

    assert core.receive([submit("a", params), submit("b", params, num_sequences=2)]) == []
    assert core.receive([submit("free", plain)]) == []
    answers = run_to_end(core)

    for key in (("a", 0), ("b", 0), ("b", 1)):
        assert is_ladder(answers[key].token_ids)
        assert len(answers[key].token_ids) == 13
    assert answers["free", 0].token_ids[:12] != answers["a", 0].token_ids[:12]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}])
def test_every_draft_position_keeps_to_the_grammar(
    grammars: GrammarStore, changes: dict[str, object]
) -> None:
    """The fake draft model guesses wrong for every third text: runs of all lengths are accepted."""
    core = make_core(
        grammars=grammars,
        mtp=FakeMtp(),
        depth=FixedDepth(4),
    )
    rule = replace(RULE, starts_after=THINK_END)
    thinking = replace(PARAMS, constraint=rule, max_tokens=300, logit_bias={THINK_END: 2.0})
    plain = make_core(grammars=grammars)
    for engine in (core, plain):
        engine.receive([submit("a", replace(PARAMS, **changes)), submit("b", thinking)])  # type: ignore[arg-type]

    answers, expected = run_to_end(core), run_to_end(plain)

    assert core.stats.num_accepted_tokens > 0
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in expected.items()
    }
    assert is_ladder(answers["a", 0].token_ids)
    answer = answers["b", 0].token_ids
    assert is_ladder(answer[answer.index(THINK_END) + 1 :])


def test_the_reasoning_is_free_but_may_not_end_the_text(grammars: GrammarStore) -> None:
    core = make_core(grammars=grammars)
    rule = replace(RULE, starts_after=THINK_END, banned_before=(5,))
    params = replace(PARAMS, constraint=rule, max_tokens=400, logit_bias={THINK_END: 2.0})

    core.receive([submit("a", params)])
    answer = list(run_to_end(core)["a", 0].token_ids)

    at = answer.index(THINK_END)
    assert not {EOS, 5} & set(answer[:at])
    assert is_ladder(tuple(answer[at + 1 :]))


@pytest.mark.parametrize("budget", [0, 3])
def test_a_reasoning_that_the_model_opens_is_closed_when_its_budget_is_spent(
    grammars: GrammarStore, budget: int
) -> None:
    """The bias keeps the model from closing it, and all guesses in an answer may be right."""
    rule = Constraint(
        kind="lark", grammar="90", starts_after=THINK_END, is_optional=True,
        reasoning_start=THINK, reasoning_ends=(THINK_END,), max_reasoning_tokens=budget,
    )  # fmt: skip
    params = replace(PARAMS, logit_bias={THINK: 2.0, THINK_END: -100.0}, max_tokens=60)
    drafting = make_core(grammars=grammars, mtp=FakeMtp(), depth=FixedDepth(4))
    plain = make_core(grammars=grammars)
    for core in (drafting, plain):
        core.receive([
            submit(str(seed), replace(params, seed=seed, ignore_eos=True, constraint=rule))
            for seed in range(6)
        ])  # fmt: skip

    answers, expected = run_to_end(drafting), run_to_end(plain)

    assert drafting.stats.num_accepted_tokens > 0
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in expected.items()
    }
    texts = [list(answer.token_ids) for answer in answers.values()]
    thinking = [text for text in texts if THINK in text[: 59 - budget]]
    assert len(thinking) > 2
    for text in texts:
        opened = text.index(THINK) + 1 if text in thinking else 60
        closed = [opened + budget] if text in thinking else []
        assert [i for i, token_id in enumerate(text) if token_id == THINK_END] == closed


def test_a_grammar_that_becomes_too_complex_ends_its_text(grammars: GrammarStore) -> None:
    core = make_core(grammars=grammars)
    rule = replace(RULE, grammar="200")

    core.receive([submit("a", replace(PARAMS, constraint=rule, max_tokens=300))])

    answer = run_to_end(core)["a", 0]
    assert is_ladder(answer.token_ids)
    assert len(answer.token_ids) == 102


def test_others_run_while_a_grammar_is_compiled(
    compiler: LadderCompiler, grammars: GrammarStore
) -> None:
    core = make_core(grammars=grammars)
    compiler.gate.clear()
    core.receive([submit("a"), submit("free", replace(PARAMS, constraint=None))])

    finished: set[str] = set()
    while "free" not in finished:
        step = core.step()
        assert step is not None
        finished |= {o.request_id for o in step.outputs if o.finish_reason}
    assert core.has_work
    core.check()
    compiler.gate.set()

    assert is_ladder(run_to_end(core)["a", 0].token_ids)


def test_a_request_whose_grammar_is_compiled_has_its_place_in_the_queue(
    compiler: LadderCompiler, grammars: GrammarStore
) -> None:
    """Refused behind the compiler it would be an error of the engine: 500, not 429."""
    core = make_core(grammars=grammars, max_num_queued_reqs=2)
    compiler.gate.clear()
    plain = replace(PARAMS, constraint=None)

    assert core.receive([submit("a"), submit("b")]) == []
    assert core.num_waiting == 2
    assert (core.stats.num_waiting, core.stats.num_compiling) == (2, 2)
    assert refusal(core, submit("c")).startswith("queue_full")
    assert refusal(core, submit("d", plain)).startswith("queue_full")
    assert "in use" in refusal(core, submit("a"))
    compiler.gate.set()
    answers = run_to_end(core)

    assert {key: answer.error for key, answer in answers.items()} == {
        ("a", 0): None,
        ("b", 0): None,
    }
    assert core.receive([submit("c")]) == []
    run_to_end(core)


def test_a_prompt_that_is_too_long_is_refused_before_its_grammar_is_compiled(
    compiler: LadderCompiler, grammars: GrammarStore
) -> None:
    core = make_core(grammars=grammars, max_model_len=32)
    compiler.gate.clear()

    said = refusal(core, submit("a"))

    assert said.startswith("context_length_exceeded")
    assert not core.has_work


def test_a_compiler_that_fails_ends_the_requests_that_need_it() -> None:
    def broken() -> LadderCompiler:
        raise RuntimeError("no such vocabulary")

    core = make_core(grammars=GrammarStore(broken))

    core.receive([submit("a"), submit("b", replace(PARAMS, constraint=None))])
    answers = run_to_end(core)

    assert answers["a", 0].error == "the grammar compiler failed; the server's log says why"
    assert answers["b", 0].error is None
    core.close()


def test_a_request_that_leaves_while_its_grammar_is_compiled_is_forgotten(
    compiler: LadderCompiler, grammars: GrammarStore
) -> None:
    core = make_core(grammars=grammars)
    compiler.gate.clear()
    core.receive([submit("a")])

    core.receive([Abort(request_id="a")])

    assert not core.has_work
    core.check()


def refusal(core: EngineCore, message: Submit) -> str:
    (reply,) = core.receive([message])
    assert isinstance(reply, Rejected)
    return f"{reply.code}: {reply.message}"


def test_bad_grammars_fail_their_own_request_only(grammars: GrammarStore) -> None:
    core = make_core(grammars=grammars)
    core.receive([submit("bad", replace(PARAMS, constraint=replace(RULE, grammar="x")))])
    core.receive([submit("good")])

    answers = run_to_end(core)

    assert (answers["bad", 0].finish_reason, answers["bad", 0].error) == ("error", "x is no number")
    assert is_ladder(answers["good", 0].token_ids)


def test_what_cannot_be_constrained_is_refused(
    compiler: LadderCompiler, grammars: GrammarStore
) -> None:
    assert "no tokenizer" in refusal(make_core(), submit("a"))
    core = make_core(grammars=grammars)
    for request_id, rule in (
        ("a", replace(RULE, starts_after=VOCAB_SIZE)),
        ("b", replace(RULE, banned_before=(-1,))),
    ):
        core.receive([submit("warm")])
        run_to_end(core)  # the grammar is compiled: the answer comes at once
        assert "constraint holds token" in refusal(
            core, submit(request_id, replace(PARAMS, constraint=rule))
        )
    compiler.gate.clear()
    waiting = replace(PARAMS, constraint=replace(RULE, grammar="7"))
    for i in range(MAX_COMPILING):
        assert core.receive([submit(f"w{i}", waiting)]) == []
    assert refusal(core, submit("one more", waiting)).startswith("queue_full")
    core.receive([Abort(request_id=f"w{i}") for i in range(MAX_COMPILING)])
    core.check()


def test_B4_compiled_grammars_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalepod.server.engine.grammar.MAX_CACHED_BYTES", 1_000_000)
    store = GrammarStore(FailingCompiler)
    for i in range(50):
        store.matcher(Constraint(kind="regex", grammar=f"{i}" + "x" * 1000))
        assert store._num_bytes <= 1_000_000 or len(store._matchers) == 1
    assert 1 < len(store._matchers) < 10
    store.matcher(Constraint(kind="regex", grammar="y" * 100_000))
    assert len(store._matchers) == 1  # the newest one in any case
    store.matcher(Constraint(kind="regex", grammar="z"))
    assert len(store._matchers) == 1
    store.close()


class FailingCompiler:
    def compile(self, constraint: Constraint) -> Matcher:
        raise GrammarError("none")
