"""`measure steps`: an engine's step by stage: scheduler, batch, model, sampler, wire, the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

from whalepod.scheduler.params import SamplingParams
from whalepod.server.build import build_engine
from whalepod.server.codec import Encoder
from whalepod.server.config import EngineConfig
from whalepod.server.engine.core import EngineCore
from whalepod.server.messages import Submit
from whalepod.tools.bench.engine import read_prompts
from whalepod.tools.flags import require_positive
from whalepod.tools.table import format_table

MODEL = "model"
_FIRST_STEPS = 4
"""Steps of a turn that are not counted: prompts, and what is recorded when it comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Microseconds of a decoding step by stage: the median of many steps, and the least.

    The stages do not overlap; the last one is the engine's loop itself, with all that no other
    names.
    """

    batch_size: int
    num_steps: int
    median_us: dict[str, float]
    least_us: dict[str, float]

    @property
    def overhead_us(self) -> float:
        """Return the sum of the medians of everything but the model."""
        return sum(us for stage, us in self.median_us.items() if stage != MODEL)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "overhead_us": self.overhead_us}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsConfig:
    """What is measured."""

    prompts: Annotated[
        Path | None, "JSON lines with a `prompt` (text or token ids) or `messages`; default: a few"
    ] = None
    batch_sizes: Annotated[tuple[int, ...], "requests at once, one run for each"] = (1, 16)
    rounds: Annotated[int, "turns of each size; one more warms up"] = 3
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "batch_sizes", "rounds")


def measure_steps(engine: EngineConfig, config: StepsConfig) -> int:
    """Measure the stages of decoding steps, in an engine that does not draft.

    MODEL is a checkpoint folder, a preset or a Hugging Face id.
    """
    off = replace(engine.speculation, speculation="off")
    core = build_engine(replace(engine, speculation=off))
    prompts = read_prompts(engine, config.prompts, core.info.vocab_size)
    steps = [time_steps(core, prompts, size, 1 + config.rounds) for size in config.batch_sizes]
    core.close()
    if config.json:
        results = [step.as_json() for step in steps]
        print(json.dumps({"model": engine.source.model, "results": results}))
    else:
        print(f"{engine.source.model}:\n{format_steps(steps)}")
    return 0


class _Stopwatch:
    """Adds up the time spent in methods of objects while it watches them."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}

    @contextmanager
    def watching(self, watched: Sequence[tuple[str, Any, str]]) -> Iterator[None]:
        """Replace methods, given as (stage, object, name), by timed ones for a while."""
        for stage, owner, name in watched:
            setattr(owner, name, self._timed(stage, getattr(owner, name)))
        try:
            yield
        finally:
            for _, owner, name in watched:
                delattr(owner, name)  # the method of the class is there again

    def _timed(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent_ns[stage] = self.spent_ns.get(stage, 0) + perf_counter_ns() - started

        return timed


def time_steps(
    core: EngineCore, prompts: Sequence[Sequence[int]], batch_size: int, num_turns: int = 4
) -> StepTimes:
    """Decode `batch_size` greedy answers at once, again and again, with a stopwatch.

    The engine should not draft: drafts would count as part of the loop.
    """
    runner, scheduler = core.runner, core.scheduler
    watch, encoder, steps = _Stopwatch(), Encoder(), []
    watched = [
        ("scheduler", scheduler, "note_clock"),
        ("scheduler", scheduler, "step"),
        ("scheduler", scheduler, "finish"),
        ("batch", runner.batches, "build"),
        (MODEL, runner.model, "forward"),
        (MODEL, runner.model, "logits"),
        ("sampler", runner.sampler, "sample"),
    ]
    with watch.watching(watched):
        for turn in range(num_turns):
            _submit(core, prompts, batch_size, turn)
            for number in range(1 << 30):
                if not core.has_work:
                    break
                watch.spent_ns = {}
                started = perf_counter_ns()
                outputs = core.step()
                stepped = perf_counter_ns()
                assert outputs is not None
                encoder.encode(outputs)
                ended = perf_counter_ns()
                rest = stepped - started - sum(watch.spent_ns.values())
                if turn and number >= _FIRST_STEPS and len(outputs.outputs) == batch_size:
                    steps.append(watch.spent_ns | {"wire": ended - stepped, "loop": rest})
    times = {stage: sorted(step[stage] / 1000 for step in steps) for stage in steps[0]}
    return StepTimes(
        batch_size=batch_size,
        num_steps=len(steps),
        median_us={stage: median(found) for stage, found in times.items()},
        least_us={stage: found[0] for stage, found in times.items()},
    )


def _submit(core: EngineCore, prompts: Sequence[Sequence[int]], batch_size: int, turn: int) -> None:
    chosen = [tuple(prompts[i % len(prompts)]) for i in range(batch_size)]
    room = core.info.max_model_len - max(map(len, chosen))
    params = SamplingParams(temperature=0.0, max_tokens=min(256, room), ignore_eos=True)
    refusals = core.receive([
        Submit(request_id=f"step-{turn}-{i}", prompt_token_ids=prompt, params=params)
        for i, prompt in enumerate(chosen)
    ])  # fmt: skip
    assert not refusals, refusals


def format_steps(steps: Sequence[StepTimes]) -> str:
    """Return a table: a line for each stage, two columns for each batch size."""
    head = ["us per step"]
    for one in steps:
        head += [f"batch {one.batch_size}, median", "least"]
    rows = [head]
    for stage in steps[0].median_us:
        row = [stage]
        for one in steps:
            row += [f"{one.median_us[stage]:.1f}", f"{one.least_us[stage]:.1f}"]
        rows.append(row)
    last = ["all but the model"]
    for one in steps:
        least_us = sum(us for stage, us in one.least_us.items() if stage != MODEL)
        last += [f"{one.overhead_us:.1f}", f"{least_us:.1f}"]
    return format_table([*rows, last], numeric=True)
