"""Random histories of requests, and what the gateway makes of an engine's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

import whalepod.models
from tests.ladders import Rungs
from tests.models.oracle import random_ids
from tests.mtp.speculating import EOS, VOCAB_SIZE
from whalepod.mtp.depth import AdaptiveDepth
from whalepod.mtp.stats import StepRecord
from whalepod.scheduler.params import Constraint, SamplingParams
from whalepod.server.engine.core import EngineCore
from whalepod.server.gateway.events import Delta, Finished
from whalepod.server.gateway.generation import ChoiceDecoder, PromptRun
from whalepod.server.messages import Abort, StepOutputs, Submit
from whalepod.server.tokenizer import TextTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, logprobs=0, seed=3)
PENALISED = replace(
    SAMPLED, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2, temperature=1.0,
    top_k=20, logit_bias={40: 1.5},
)  # fmt: skip
PATIENT = replace(PENALISED, min_tokens=4, min_p=0.05)
# few tokens, so that texts repeat themselves and lookup has something to find
NARROW = replace(SAMPLED, logit_bias=dict.fromkeys((20, 55, 70), 40.0), frequency_penalty=0.2)
RUNGS = Rungs(first=3, num_rungs=3, end=VOCAB_SIZE, vocab_size=VOCAB_SIZE, eos=EOS)
ON_A_LADDER = replace(SAMPLED, constraint=Constraint(kind="lark", grammar="17"))


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


class SteadyDepth(AdaptiveDepth):
    """The adaptive choice with times that depend on the step alone, so that a run repeats."""

    def observe(self, record: StepRecord) -> None:
        draft_us = 30 * record.num_passes
        step_us = 100 + 5 * record.num_tokens + draft_us
        super().observe(replace(record, step_time_us=step_us, draft_time_us=draft_us))


@dataclass(frozen=True)
class Arrival:
    """One request; its prompt begins like others'."""

    num_shared: int
    num_own: int
    own_seed: int
    params: SamplingParams
    n: int
    stops: tuple[str, ...]
    num_steps_before: int

    @property
    def prompt(self) -> tuple[int, ...]:
        own = random_ids(self.num_own, VOCAB_SIZE, seed=10 + self.own_seed)
        return tuple(random_ids(200, VOCAB_SIZE)[: self.num_shared] + own)

    def run(self, request_id: str, n: int) -> PromptRun:
        submit = Submit(
            request_id=request_id,
            prompt_token_ids=self.prompt,
            params=self.params,
            num_sequences=n,
        )
        return PromptRun(submit=submit, stops=self.stops, skip_special_tokens=False)


arrivals = st.builds(
    Arrival,
    num_shared=st.sampled_from([0, 20, 63, 64, 65, 90, 128]),
    num_own=st.sampled_from([1, 7, 30]),
    own_seed=st.integers(0, 2),
    params=st.builds(
        replace,
        st.sampled_from([GREEDY, SAMPLED, PENALISED, PATIENT, NARROW, ON_A_LADDER]),
        max_tokens=st.sampled_from([4, 9, 24]),
        stop_token_ids=st.sampled_from([(), (5, 9, 30, 31)]),
        ignore_eos=st.booleans(),
        num_speculative_tokens=st.sampled_from([None, None, None, 0, 1, 3]),
    ),
    n=st.sampled_from([1, 1, 2, 3]),
    stops=st.sampled_from([(), (), ("C", "g"), ("<｜", "5", "=")]),
    num_steps_before=st.integers(0, 6),
)


@cache
def _tokenizer() -> TextTokenizer:
    """The embedded model's: its first tokens are special ones and printable characters."""
    return TextTokenizer.from_folder(Path(whalepod.models.__file__).parent / "tiny")


@dataclass
class Answer:
    """What a client gets of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: tuple[str, str | int | None] | None = None


class Client:
    """Sends requests and reads the answers as the gateway does: text is cut at stop strings, and
    the request is cancelled when all its choices ended."""

    def __init__(self, core: EngineCore) -> None:
        self.answers: dict[tuple[str, int], Answer] = {}
        self._core = core
        self._decoders: dict[tuple[str, int], ChoiceDecoder] = {}

    def submit(self, run: PromptRun) -> None:
        request_id = run.submit.request_id
        for index in range(run.submit.num_sequences):
            self.answers[request_id, index] = Answer()
            self._decoders[request_id, index] = ChoiceDecoder(run, index, _tokenizer())
        assert self._core.receive([run.submit]) == []

    def step(self) -> None:
        self._read(self._core.step())

    def finish(self) -> None:
        while self._core.has_work:
            self.step()
        self._core.check()

    def _read(self, step: StepOutputs | None) -> None:
        for output in step.outputs if step is not None else ():
            key = (output.request_id, output.index)
            answer, decoder = self.answers[key], self._decoders[key]
            if decoder.done:
                continue
            for event in decoder.push(output, ()):
                if isinstance(event, Delta):
                    answer.text += event.text
                    answer.token_ids += event.token_ids
                    answer.logprobs += [p.logprob for p in event.logprobs if p is not None]
                elif isinstance(event, Finished):
                    answer.end = (event.reason, event.stop_reason)
            mine = [d for (name, _), d in self._decoders.items() if name == output.request_id]
            if all(d.done for d in mine):
                self._core.receive([Abort(request_id=output.request_id)])
