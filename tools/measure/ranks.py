"""`measure ranks`: decoding spread over ranks, beside one engine with all the threads.

Both are loaded and answer the same prompts in turns, so that they see the same minutes of the
machine; the one that is not measured sleeps. A rate is that of the time in which all requests of
the batch decode: from the last first token to the first end. Figures are medians of the turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Protocol

from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.tools.flags import require_positive
from whalepod.tools.table import format_table

if TYPE_CHECKING:
    from whalepod.scheduler.plan import SequenceOutput
    from whalepod.server.messages import Submit

_LEAST_TOKEN, _MOST_TOKEN = 3, 250
"""Prompts are random ids; every model knows these."""
_SCHEDULER_CLOCK = 2
"""Linux: the clock of a process's CPU time is its inverted number, shifted, and this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """What is measured."""

    batch_size: Annotated[int, "requests at once, over all ranks"] = 16
    prompt_tokens: Annotated[int, "random tokens of a prompt"] = 16
    max_tokens: Annotated[int, "tokens of an answer"] = 64
    rounds: Annotated[int, "turns of each engine; one more warms up"] = 5
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "prompt_tokens", "rounds")
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens must be at least 4, got {self.max_tokens}")


class EngineClient(Protocol):
    """What answers requests: a channel, or the router of a group."""

    def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One batch of answers on one engine."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    """Of the whole turn, prompts included; waiting for other ranks counts, too."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An engine, the processes that it runs in, and its turns."""

    name: str
    upstream: EngineClient
    pids: Sequence[int]
    turns: list[Turn] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return median(turn.tokens_per_s for turn in self.turns)

    @property
    def tokens_per_cpu_s(self) -> float:
        return median(turn.tokens_per_cpu_s for turn in self.turns)


def measure_ranks(engine: EngineConfig, config: RanksConfig) -> int:
    """Measure decoding with --expert-parallel-size beside one engine with all threads.

    MODEL is loaded by both, and both answer the same prompts in turns. No server is needed.
    """
    num_ranks = engine.parallel.expert_parallel_size
    if num_ranks < 2:
        raise StartupError("--expert-parallel-size must be at least 2: they are compared with one")
    one, group = asyncio.run(_measure(engine, config))
    ratio = group.tokens_per_s / one.tokens_per_s
    if config.json:
        print(json.dumps({
            "model": engine.source.model,
            "num_ranks": num_ranks,
            "settings": asdict(config),
            "ratio": ratio,
            "results": [
                {"name": m.name, "tokens_per_s": m.tokens_per_s,
                 "tokens_per_cpu_s": m.tokens_per_cpu_s, "turns": [asdict(t) for t in m.turns]}
                for m in (one, group)
            ],
        }))  # fmt: skip
    else:
        print(
            f"{engine.source.model}: {config.batch_size} requests decode at once\n\n"
            f"{_table([one, group])}\n\nthe group decodes {ratio:.2f} times as fast as one engine"
        )
    return 0


async def _measure(engine: EngineConfig, config: RanksConfig) -> tuple[Measured, Measured]:
    from whalepod.server.cluster.rank_group import RankGroup
    from whalepod.server.engine_launcher import EngineProcess

    alone = replace(engine, parallel=replace(engine.parallel, expert_parallel_size=1))
    async with AsyncExitStack() as stack:
        process = stack.enter_context(EngineProcess(alone))
        group = stack.enter_context(RankGroup(engine))
        one = Measured(
            "one engine", await stack.enter_async_context(process.channel()), [process.pid]
        )
        many = Measured(
            f"{group.num_ranks} ranks",
            await stack.enter_async_context(group.channel()),
            [group.pid(rank) for rank in range(group.num_ranks)],
        )
        for number in range(-1, config.rounds):
            for measured in (one, many) if number % 2 else (many, one):
                turn = await _play(measured, config, number)
                if number >= 0:
                    measured.turns.append(turn)
    return one, many


async def _play(measured: Measured, config: RanksConfig, number: int) -> Turn:
    """Answer one batch: greedy, each prompt new, so that nothing of it is cached."""
    from whalepod.scheduler.params import SamplingParams
    from whalepod.server.messages import Submit

    rng = random.Random(number)
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens, ignore_eos=True)
    submits = [
        Submit(
            request_id=f"{number}-{i}",
            prompt_token_ids=tuple(
                [rng.randint(_LEAST_TOKEN, _MOST_TOKEN) for _ in range(config.prompt_tokens)]
            ),
            params=params,
        )
        for i in range(config.batch_size)
    ]
    cpu_s = _cpu_seconds(measured.pids)
    answers = await asyncio.gather(*(_read(measured.upstream, submit) for submit in submits))
    cpu_s = _cpu_seconds(measured.pids) - cpu_s
    began, ended = max(answer[0][0] for answer in answers), min(a[-1][0] for a in answers)
    if ended <= began:
        raise StartupError("a request ended before all had begun: raise --max-tokens")
    events = [event for answer in answers for event in answer]
    num_tokens = sum(count for when, count in events if began < when <= ended)
    return Turn(
        tokens_per_s=num_tokens / (ended - began),
        tokens_per_cpu_s=sum(count for _, count in events) / cpu_s,
    )


async def _read(upstream: EngineClient, submit: Submit) -> list[tuple[float, int]]:
    """Return when tokens came, and how many."""
    events = []
    async for output in upstream.submit(submit):
        if output.error:
            raise StartupError(f"a request failed: {output.error}")
        events.append((time.perf_counter(), len(output.token_ids)))
    return events


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes so far, finer than the ticks of /proc."""
    return sum(time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK) for pid in pids)


def _table(engines: Sequence[Measured]) -> str:
    rows = [["", "tok/s", "slowest", "fastest", "tok/CPU s"]]
    for engine in engines:
        rates = [turn.tokens_per_s for turn in engine.turns]
        rows.append([
            engine.name, f"{engine.tokens_per_s:.1f}", f"{min(rates):.1f}", f"{max(rates):.1f}",
            f"{engine.tokens_per_cpu_s:.1f}",
        ])  # fmt: skip
    return format_table(rows, numeric=True)
