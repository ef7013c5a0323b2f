"""Rule A over random histories: ids and logprobs are bit-equal to those of a lone run without
drafts, whatever the depth, the batch, the chunks, the cache hits and the preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings, strategies as st

from tests.equality import assert_bit_equal
from tests.models.oracle import random_ids
from tests.mtp.speculating import VOCAB_SIZE, Settings, make_engine
from whalepod.mtp.stats import StepRecord
from whalepod.scheduler.params import SamplingParams
from whalepod.server.engine.core import EngineCore
from whalepod.server.messages import SequenceOutput, StepOutputs, Submit
from whalepod.server.outputs import join_outputs

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, logprobs=0, seed=3)
PENALISED = replace(
    SAMPLED, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2, min_tokens=4,
    temperature=1.0, top_k=20,
)  # fmt: skip


class CycledDepth:
    """Takes the depths of a list in turn."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        self._num_steps = 0

    def choose(self) -> int:
        self._num_steps += 1
        return self._depths[self._num_steps % len(self._depths)]

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class Arrival:
    num_shared: int
    num_own: int
    own_seed: int
    params: SamplingParams
    n: int
    num_steps_before: int

    @property
    def prompt(self) -> tuple[int, ...]:
        own = random_ids(self.num_own, VOCAB_SIZE, seed=10 + self.own_seed)
        return tuple(random_ids(200, VOCAB_SIZE)[: self.num_shared] + own)


arrivals = st.builds(
    Arrival,
    num_shared=st.sampled_from([0, 20, 63, 64, 65, 90, 128]),
    num_own=st.sampled_from([1, 7, 30]),
    own_seed=st.integers(0, 2),
    params=st.builds(
        replace,
        st.sampled_from([GREEDY, SAMPLED, PENALISED]),
        max_tokens=st.sampled_from([4, 9, 24]),
        stop_token_ids=st.sampled_from([(), (5, 9, 30, 31)]),
        ignore_eos=st.booleans(),
    ),
    n=st.sampled_from([1, 1, 2, 3]),
    num_steps_before=st.integers(0, 6),
)


_lone_answers: dict[tuple[tuple[int, ...], str, int], SequenceOutput] = {}


def lone_answer(arrival: Arrival, index: int) -> SequenceOutput:
    """Answer a request alone and without drafts; once for each."""
    key = (arrival.prompt, repr(arrival.params), index)
    if key not in _lone_answers:
        core = make_engine(Settings())
        submit(core, "alone", arrival.prompt, arrival.params, index + 1)
        _lone_answers[key] = run(core, {})["alone", index]
    return _lone_answers[key]


def submit(
    core: EngineCore, request_id: str, prompt: tuple[int, ...], params: SamplingParams, n: int
) -> None:
    message = Submit(request_id=request_id, prompt_token_ids=prompt, params=params, num_sequences=n)
    assert core.receive([message]) == []


Answers = dict[tuple[str, int], SequenceOutput]


def collect(answers: Answers, step: StepOutputs | None) -> None:
    for output in step.outputs if step is not None else ():
        key = (output.request_id, output.index)
        answers[key] = join_outputs(answers[key], output) if key in answers else output


def run(core: EngineCore, answers: Answers) -> Answers:
    while core.has_work:
        collect(answers, core.step())
    core.check()
    return answers


@given(
    history=st.lists(arrivals, min_size=1, max_size=5),
    depths=st.sampled_from([(1,), (2,), (3,), (4,), (0, 4), (4, 1, 0, 2)]),
    num_blocks=st.sampled_from([4, 6, 32]),
    chunk=st.sampled_from([6, 29, 64]),
)
@settings(max_examples=max(settings.default.max_examples // 5, 1))
def test_histories_give_the_bits_of_a_lone_run_without_drafts(
    history: list[Arrival], depths: tuple[int, ...], num_blocks: int, chunk: int
) -> None:
    core = make_engine(
        Settings(
            depth=CycledDepth(depths), num_blocks=num_blocks, chunk=chunk, max_num_seqs=4,
            max_model_len=240,
        )
    )  # fmt: skip
    answers: Answers = {}
    for number, arrival in enumerate(history):
        for _ in range(arrival.num_steps_before):
            collect(answers, core.step())
        submit(core, f"r{number}", arrival.prompt, arrival.params, arrival.n)
    run(core, answers)

    for number, arrival in enumerate(history):
        for index in range(arrival.n):
            want, got = lone_answer(arrival, index), answers[f"r{number}", index]
            assert_bit_equal(
                want.token_ids,
                [logprob.logprob for logprob in want.logprobs],
                got.token_ids,
                [logprob.logprob for logprob in got.logprobs],
                f"r{number}/{index}",
            )
            assert got.finish_reason == want.finish_reason
    assert core.stats.num_owned_blocks == 0
