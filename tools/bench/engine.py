"""`whalepod bench decode` and `prefill`: an engine in this process, without HTTP around it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.tools.flags import require_positive
from whalepod.tools.table import format_table

if TYPE_CHECKING:
    from whalepod.server.engine.core import EngineCore

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
_TITLES = {
    "batch_size": "batch",
    "depth": "drafts",
    "num_tokens": "tokens",
    "ttft_ms": "first token, ms",
    "tokens_per_s": "tok/s",
    "speedup": "speed-up",
    "tokens_per_cpu_s": "tok/CPU s",
    "cpu_speedup": "speed-up",
    "tokens_per_forward": "tok/forward",
    "mean_depth": "mean depth",
    "acceptance_by_position": "accepted by position",
}
"""Headings of what is shown, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """What is measured."""

    prompts: Annotated[
        Path | None, "JSON lines with a `prompt` (text or token ids) or `messages`; default: a few"
    ] = None
    batch_sizes: Annotated[tuple[int, ...], "requests at once, one run for each"] = (1, 16)
    num_prompts: Annotated[int, "requests of a turn for each request at once"] = 8
    max_tokens: Annotated[int, "most tokens of an answer"] = 96
    rounds: Annotated[int, "turns of each batch size; the rate is their median"] = 3
    ignore_eos: Annotated[bool, "answers have their full length"] = False
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_prompts", "max_tokens", "rounds", "batch_sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """What is measured."""

    lengths: Annotated[tuple[int, ...], "tokens of a prompt, one run for each"] = (256, 2048)
    rounds: Annotated[int, "runs of each length; the rate is their median"] = 5
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "lengths", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an engine did to answer a number of prompts."""

    num_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    accepted_by_position: tuple[int, ...]
    wall_s: float
    cpu_s: float


def bench_decode(engine: EngineConfig, config: DecodeConfig) -> int:
    """Measure in this process how fast answers are written: greedy, with the drafts of the flags.

    MODEL is a checkpoint folder, a preset or a Hugging Face id. No server is needed.
    """
    core = start_engine(engine, config.batch_sizes)
    prompts = read_prompts(engine, config.prompts, core.info.vocab_size)
    results = []
    for batch_size in config.batch_sizes:
        turns = [play(core, config, prompts, batch_size) for _ in range(1 + config.rounds)]
        results.append({"batch_size": batch_size, **decode_figures(turns[1:])})
    show(core, engine, results, as_json=config.json)
    core.close()
    return 0


def bench_prefill(engine: EngineConfig, config: PrefillConfig) -> int:
    """Measure in this process how long prompts take until their first token.

    MODEL is a checkpoint folder, a preset or a Hugging Face id. No server is needed.
    """
    core = start_engine(engine)
    longest, limit = max(config.lengths), core.info.max_model_len
    if longest >= limit:
        raise StartupError(
            f"length {longest} leaves no room for a token in --max-model-len ({limit})"
        )
    one, rng, results = DecodeConfig(num_prompts=1, max_tokens=1), random.Random(0), []
    for length in config.lengths:
        prompt = _random_prompt(rng, length, core.info.vocab_size)
        turns = [play(core, one, [prompt], 1) for _ in range(1 + config.rounds)]
        seconds = median(turn.wall_s for turn in turns[1:])
        results.append(
            {"num_tokens": length, "ttft_ms": 1e3 * seconds, "tokens_per_s": length / seconds}
        )
    show(core, engine, results, as_json=config.json)
    core.close()
    return 0


def start_engine(
    engine: EngineConfig, batch_sizes: Sequence[int] = (), **drafts: Any
) -> EngineCore:
    """Start an engine in which no turn finds the prefixes of an earlier one.

    batch_sizes  that must fit
    drafts       other values of the flags of speculation
    """
    from whalepod.server.build import build_engine

    speculation = replace(engine.speculation, **drafts)
    scheduler = replace(engine.scheduler, enable_prefix_caching=False)
    core = build_engine(replace(engine, speculation=speculation, scheduler=scheduler))
    largest, limit = max(batch_sizes, default=0), core.info.max_num_seqs
    if largest > limit:
        core.close()
        raise StartupError(f"batch size {largest} is over --max-num-seqs ({limit})")
    return core


def play(
    core: EngineCore, config: DecodeConfig, prompts: Sequence[Sequence[int]], batch_size: int
) -> Turn:
    """Answer the prompts of a turn, `batch_size` at once: greedy, so that turns write the same."""
    from whalepod.scheduler.params import SamplingParams
    from whalepod.server.messages import Submit

    params = SamplingParams(
        temperature=0.0, max_tokens=config.max_tokens, ignore_eos=config.ignore_eos
    )
    waiting = [
        Submit(request_id=f"{i}", prompt_token_ids=tuple(prompts[i % len(prompts)]), params=params)
        for i in reversed(range(config.num_prompts * batch_size))
    ]
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
    counts = zip_longest(
        after.num_accepted_by_position, before.num_accepted_by_position, fillvalue=0
    )
    return Turn(
        num_tokens=after.generation_tokens - before.generation_tokens,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_by_position=tuple([now - earlier for now, earlier in counts]),
        wall_s=ended[0] - started[0],
        cpu_s=ended[1] - started[1],
    )


def decode_figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Fold turns of one setting: median rates, and how much drafts brought.

    tokens_per_forward      tokens that a request gains in a step
    acceptance_by_position  share of runs whose first, second, ... draft was right, all before too
    """
    by_position = zip_longest(*(turn.accepted_by_position for turn in turns), fillvalue=0)
    accepted = [sum(counts) for counts in by_position]
    num_tokens, num_drafts = (
        sum(getattr(turn, name) for turn in turns) for name in ("num_tokens", "num_drafts")
    )
    num_forwards = num_tokens - sum(turn.num_accepted for turn in turns)
    return {
        "tokens_per_s": median(turn.num_tokens / turn.wall_s for turn in turns),
        "tokens_per_cpu_s": median(turn.num_tokens / turn.cpu_s for turn in turns),
        "tokens_per_forward": num_tokens / num_forwards,
        "mean_depth": sum(turn.num_draft_tokens for turn in turns) / num_forwards,
        "acceptance_by_position": [n / num_drafts for n in accepted if num_drafts and n],
        "turns": [asdict(turn) for turn in turns],
    }


def show(
    core: EngineCore, engine: EngineConfig, results: Sequence[Mapping[str, Any]], *, as_json: bool
) -> None:
    """Print results as JSON, or what has a title as a table."""
    name, info = engine.source.model, core.info
    if as_json:
        print(json.dumps({"model": name, **asdict(info), "results": results}))
        return
    keys = [key for key in _TITLES if key in results[0]]
    rows = [[_TITLES[key] for key in keys]]
    rows += [[_cell(result[key]) for key in keys] for result in results]
    print(f"{name}: {info.dtype}, {info.kernels} kernels, {info.speculation}\n")
    print(format_table(rows, numeric=True))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def read_prompts(engine: EngineConfig, file: Path | None, vocab_size: int) -> list[list[int]]:
    """Return prompts as token ids: of a file, or a few; random without a tokenizer."""
    from whalepod.models.source import resolve_model
    from whalepod.server.tokenizer import TextTokenizer

    source = engine.source
    is_random = source.load_format == "dummy"
    folder = resolve_model(source.model, source.revision, with_weights=not is_random)
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}]} for question in _QUESTIONS
    ]
    if file is not None:
        lines = file.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    elif is_random or not (folder / "tokenizer.json").exists():
        rng = random.Random(0)
        return [_random_prompt(rng, _RANDOM_PROMPT_TOKENS, vocab_size) for _ in range(8)]
    tokenizer = TextTokenizer.from_folder(folder)
    return [_encode(tokenizer, record) for record in records]


def _random_prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(num_tokens)]


def _encode(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    messages = record["messages"]
    if tokenizer.template is not None:
        return list(tokenizer.encode_chat(messages, tools=record.get("tools")))
    return list(tokenizer.encode(messages[-1]["content"]))
