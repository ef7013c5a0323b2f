"""`whalepod bench decode`: how much speculation speeds up decoding, in this process.

One engine answers the same prompts with 0, 1, ... drafts and with the adaptive depth, in turns, so
that all settings see the same minutes of the machine; a rate is the median of its turns. With
`--model-only` there is no engine: forward passes and logits, as other engines' benchmarks count.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from whalepod.mtp.config import MAX_DRAFT_TOKENS
from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.tools.bench.roofline import Roof, format_roofs, measure_roof
from whalepod.tools.bench.stages import StepTimes, format_steps, measure_steps
from whalepod.tools.flags import require_positive
from whalepod.tools.table import format_table

if TYPE_CHECKING:
    from whalepod.server.engine.core import EngineCore

ADAPTIVE = "adaptive"
_QUESTIONS = (
    "What is 12 + 35?",
    "Tell me a short story about a cat.",
    "Anna lives in Paris and works in a bakery. Where does Anna live?",
    "Hello! Who are you?",
    "Give me a JSON object with a name and a count.",
    "What is 77 + 88?",
    "Repeat this line: the red boat and the green boat left on Monday",
    "Tell me a story about two friends and a lost key.",
)
_RANDOM_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """What is measured."""

    prompts: Annotated[
        Path | None, "JSON lines with a `prompt` (text or token ids) or `messages`; default: a few"
    ] = None
    batch_sizes: Annotated[tuple[int, ...], "requests at once, one run for each"] = (1, 16)
    num_prompts: Annotated[int, "requests of a turn for each request at once"] = 8
    max_tokens: Annotated[int, "most tokens of an answer"] = 96
    rounds: Annotated[int, "turns of each setting"] = 3
    ignore_eos: Annotated[bool, "answers have their full length"] = False
    context: Annotated[int, "tokens before the one that is computed, against the limits"] = 64
    model_only: Annotated[bool, "only the model against the limits: no engine, no drafts"] = False
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_prompts", "max_tokens", "rounds", "batch_sizes")


@dataclass(slots=True, kw_only=True)
class Turn:
    """One setting, once."""

    num_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    accepted_by_position: tuple[int, ...]
    wall_s: float
    cpu_s: float


@dataclass(slots=True, kw_only=True)
class Result:
    """One setting at one batch size."""

    batch_size: int
    depth: str
    tokens_per_s: float
    tokens_per_cpu_s: float
    tokens_per_forward: float
    """Tokens that a request gains in a step."""
    mean_depth: float
    acceptance_by_position: list[float]
    """Share of runs whose first, second, ... draft was right, with all before it."""
    speedup: float = 1.0
    cpu_speedup: float = 1.0
    turns: list[Turn] = field(default_factory=list)


def bench_decode(engine: EngineConfig, config: DecodeConfig) -> int:
    """Measure in this process what speculation brings: rates, tokens per forward, acceptance.

    MODEL answers the same prompts with 0 to 4 drafts and with the adaptive depth, in turns.
    """
    from whalepod.server.build import build_engine

    if config.model_only:
        return _bench_model(engine, config)
    core = build_engine(_with_drafts(engine))
    info = core.info
    prompts = _prompts(engine, config, core.info.vocab_size)
    results = []
    for batch_size in config.batch_sizes:
        if batch_size > core.info.max_num_seqs:
            raise StartupError(
                f"batch size {batch_size} is over --max-num-seqs ({core.info.max_num_seqs})"
            )
        results += measure(core, config, prompts, batch_size)
    core.close()
    del core
    roofs = _roofs(engine, config)
    steps = _steps(engine, config, prompts)
    head = {"model": engine.source.model, **asdict(info)}
    if config.json:
        print(json.dumps(head | {
            "results": [asdict(result) for result in results],
            "roofs": [roof.as_json() for roof in roofs],
            "steps": [step.as_json() for step in steps],
        }))  # fmt: skip
    else:
        print(f"{engine.source.model}: {info.dtype}, {info.kernels} kernels, "
              f"{info.speculation}\n\n{_table(results)}\n\n"
              f"The model alone, without drafts:\n{format_roofs(roofs)}\n\n"
              f"The engine's steps, without drafts:\n{format_steps(steps)}")  # fmt: skip
    return 0


def _bench_model(engine: EngineConfig, config: DecodeConfig) -> int:
    roofs = _roofs(engine, config)
    if config.json:
        found = [roof.as_json() for roof in roofs]
        print(json.dumps({"model": engine.source.model, "results": [], "roofs": found}))
    else:
        print(f"{engine.source.model}:\n{format_roofs(roofs)}")
    return 0


def _roofs(engine: EngineConfig, config: DecodeConfig) -> list[Roof]:
    """Measure steps of one token per request against the limits of the machine."""
    from whalepod.server.build_model import load_model_for_bench

    model, kernels = load_model_for_bench(engine, config.context + 1)
    return [
        measure_roof(model, kernels, batch_size, 1, config.context, rounds=20 * config.rounds)
        for batch_size in config.batch_sizes
    ]


def _steps(
    engine: EngineConfig, config: DecodeConfig, prompts: Sequence[Sequence[int]]
) -> list[StepTimes]:
    """Measure the stages of decoding steps, in an engine that does not draft."""
    from whalepod.server.build import build_engine

    off = replace(engine.speculation, speculation="off")
    core = build_engine(replace(engine, speculation=off))
    steps = [
        measure_steps(core, prompts, batch_size, 1 + config.rounds)
        for batch_size in config.batch_sizes
    ]
    core.close()
    return steps


def _with_drafts(engine: EngineConfig) -> EngineConfig:
    """Ask for an engine that can draft, and for no prefix hits, which would favour later turns."""
    return replace(
        engine,
        speculation=replace(
            engine.speculation, speculation="adaptive", num_speculative_tokens=MAX_DRAFT_TOKENS
        ),
        scheduler=replace(engine.scheduler, enable_prefix_caching=False),
    )


def measure(
    core: EngineCore, config: DecodeConfig, prompts: Sequence[Sequence[int]], batch_size: int
) -> list[Result]:
    """Run all settings in turns at one batch size."""
    from whalepod.mtp.depth import AdaptiveDepth, FixedDepth

    depths = {str(k): FixedDepth(k) for k in range(MAX_DRAFT_TOKENS + 1)}
    settings = depths | {ADAPTIVE: AdaptiveDepth(MAX_DRAFT_TOKENS)}
    turns: dict[str, list[Turn]] = {name: [] for name in settings}
    num_prompts = config.num_prompts * batch_size
    chosen = [prompts[i % len(prompts)] for i in range(num_prompts)]
    for number in range(-1, config.rounds):  # the first turn warms up
        for name, depth in settings.items():
            core.depth = depth
            turn = _play(core, config, chosen, batch_size)
            if number >= 0:
                turns[name].append(turn)
    results = [_result(batch_size, name, found) for name, found in turns.items()]
    for result in results:
        result.speedup = result.tokens_per_s / results[0].tokens_per_s
        result.cpu_speedup = result.tokens_per_cpu_s / results[0].tokens_per_cpu_s
    return results


def _play(
    core: EngineCore, config: DecodeConfig, prompts: Sequence[Sequence[int]], batch_size: int
) -> Turn:
    """Answer all prompts, `batch_size` at once: greedy, so that every setting writes the same."""
    from whalepod.scheduler.params import SamplingParams
    from whalepod.server.messages import Submit

    params = SamplingParams(
        temperature=0.0, max_tokens=config.max_tokens, ignore_eos=config.ignore_eos
    )
    waiting = [
        Submit(request_id=f"{i}", prompt_token_ids=tuple(prompt), params=params)
        for i, prompt in enumerate(prompts)
    ]
    waiting.reverse()
    before, num_running = core.stats, 0
    started = time.perf_counter(), time.process_time()
    while waiting or core.has_work:
        while waiting and num_running < batch_size:
            core.receive([waiting.pop()])
            num_running += 1
        step = core.step()
        for output in step.outputs if step is not None else ():
            num_running -= output.finish_reason is not None
    ended = time.perf_counter(), time.process_time()
    after = core.stats
    earlier = before.num_accepted_by_position
    return Turn(
        num_tokens=after.generation_tokens - before.generation_tokens,
        num_steps=after.num_steps - before.num_steps,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_by_position=tuple(
            count - (earlier[i] if i < len(earlier) else 0)
            for i, count in enumerate(after.num_accepted_by_position)
        ),
        wall_s=ended[0] - started[0],
        cpu_s=ended[1] - started[1],
    )


def _result(batch_size: int, depth: str, turns: list[Turn]) -> Result:
    num_tokens = sum(turn.num_tokens for turn in turns)
    num_forwards = num_tokens - sum(turn.num_accepted for turn in turns)
    num_drafts = sum(turn.num_drafts for turn in turns)
    positions = max(len(turn.accepted_by_position) for turn in turns)
    accepted = [
        sum(turn.accepted_by_position[i] for turn in turns if i < len(turn.accepted_by_position))
        for i in range(positions)
    ]
    return Result(
        batch_size=batch_size,
        depth=depth,
        tokens_per_s=median(turn.num_tokens / turn.wall_s for turn in turns),
        tokens_per_cpu_s=median(turn.num_tokens / turn.cpu_s for turn in turns),
        tokens_per_forward=num_tokens / num_forwards,
        mean_depth=sum(turn.num_draft_tokens for turn in turns) / num_forwards,
        acceptance_by_position=[count / num_drafts for count in accepted if num_drafts and count],
        turns=turns,
    )


def _table(results: Sequence[Result]) -> str:
    rows = [
        ["batch, depth", "tok/s", "speed-up", "tok/CPU s", "speed-up", "tok/forward", "mean depth",
         "accepted by position"]
    ]  # fmt: skip
    for r in results:
        shares = " ".join(f"{share:.2f}" for share in r.acceptance_by_position)
        rows.append([
            f"{r.batch_size}, {r.depth}", f"{r.tokens_per_s:.1f}", f"{r.speedup:.2f}",
            f"{r.tokens_per_cpu_s:.1f}", f"{r.cpu_speedup:.2f}", f"{r.tokens_per_forward:.2f}",
            f"{r.mean_depth:.2f}", shares,
        ])  # fmt: skip
    return format_table(rows, numeric=True)


# -- prompts ------------------------------------------------------------------------------------


def _prompts(engine: EngineConfig, config: DecodeConfig, vocab_size: int) -> list[list[int]]:
    """Return the prompts as token ids; random ones for a model without a tokenizer."""
    from whalepod.models.source import resolve_model
    from whalepod.server.tokenizer import TextTokenizer

    source = engine.source
    folder = resolve_model(
        source.model, source.revision, with_weights=source.load_format != "dummy"
    )
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}]} for question in _QUESTIONS
    ]
    if config.prompts is not None:
        lines = config.prompts.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    elif source.load_format == "dummy" or not (folder / "tokenizer.json").exists():
        rng = random.Random(0)
        return [
            [rng.randrange(3, vocab_size) for _ in range(_RANDOM_PROMPT_TOKENS)] for _ in range(8)
        ]
    tokenizer = TextTokenizer.from_folder(folder)
    return [_encode(tokenizer, record) for record in records]


def _encode(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    messages = record["messages"]
    if tokenizer.has_chat_template:
        return list(tokenizer.encode_chat(messages, tools=record.get("tools")))
    return list(tokenizer.encode(messages[-1]["content"]))
