"""Rule A over random histories: text, ids and logprobs are bit-equal to those of a lone run without
drafts, whatever the depth, the drafter, the batch, the chunks, the cache hits, the preemptions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, seed, settings, strategies as st

from tests.equality import assert_bit_equal
from tests.ladders import LadderCompiler
from tests.mtp.histories import (
    RUNGS,
    Answer,
    Arrival,
    Client,
    CycledDepth,
    SteadyDepth,
    arrivals,
)
from tests.mtp.speculating import Settings, make_engine
from whalepod.mtp.depth import Depth
from whalepod.server.engine.grammar import GrammarStore

NUM_HISTORIES = max(settings.default.max_examples // 5, 1)
MAX_HISTORIES_OF_PART = 100
NUM_PARTS = -(-NUM_HISTORIES // MAX_HISTORIES_OF_PART)

_lone_answers: dict[tuple[tuple[int, ...], str, int], Answer] = {}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarStore]:
    store = GrammarStore(lambda: LadderCompiler(RUNGS))
    yield store
    store.close()


def lone_answer(arrival: Arrival, index: int, grammars: GrammarStore) -> Answer:
    """Answer a request alone and without drafts; once for each."""
    key = (arrival.prompt, repr((arrival.params, arrival.stops)), index)
    if key not in _lone_answers:
        client = Client(make_engine(Settings(grammars=grammars)))
        client.submit(arrival.run("alone", index + 1))
        client.finish()
        _lone_answers[key] = client.answers["alone", index]
    return _lone_answers[key]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_histories_give_the_bits_of_a_lone_run_without_drafts(
    grammars: GrammarStore, part: int
) -> None:
    """2,000 histories with the profile `long`, in parts that can be run one by one."""

    @seed(part)
    @settings(max_examples=min(NUM_HISTORIES, MAX_HISTORIES_OF_PART))
    @given(
        history=st.lists(arrivals, min_size=1, max_size=5),
        depths=st.sampled_from([(1,), (2,), (3,), (4,), (0, 4), (4, 1, 0, 2), None]),
        num_blocks=st.sampled_from([4, 6, 32]),
        chunk=st.sampled_from([6, 29, 64]),
        drafters=st.sampled_from([(True, False), (True, True), (False, True)]),
    )
    def check(
        history: list[Arrival],
        depths: tuple[int, ...] | None,
        num_blocks: int,
        chunk: int,
        drafters: tuple[bool, bool],
    ) -> None:
        check_history(grammars, history, depths, num_blocks, chunk, drafters)

    check()


def check_history(
    grammars: GrammarStore,
    history: list[Arrival],
    depths: tuple[int, ...] | None,
    num_blocks: int,
    chunk: int,
    drafters: tuple[bool, bool],
) -> None:
    depth: Depth = SteadyDepth(4) if depths is None else CycledDepth(depths)
    core = make_engine(
        Settings(
            depth=depth, num_blocks=num_blocks, chunk=chunk, max_num_seqs=4, max_model_len=240,
            has_module=drafters[0], with_lookup=drafters[1], grammars=grammars,
        )
    )  # fmt: skip
    client = Client(core)
    for number, arrival in enumerate(history):
        for _ in range(arrival.num_steps_before):
            client.step()
        client.submit(arrival.run(f"r{number}", arrival.n))
    client.finish()

    for number, arrival in enumerate(history):
        for index in range(arrival.n):
            want, got = lone_answer(arrival, index, grammars), client.answers[f"r{number}", index]
            assert_bit_equal(
                want.token_ids, want.logprobs, got.token_ids, got.logprobs, f"r{number}/{index}"
            )
            assert (got.text, got.end) == (want.text, want.end)
    assert core.stats.num_owned_blocks == 0
