"""`whalepod bench decode` and `bench prefill`: an engine in this process, without HTTP around it.

Settings that are compared take turns, so that all see the same minutes of the machine; a rate is
the median of its turns.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from whalepod.mtp.config import MAX_DRAFT_TOKENS
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
Prompts = Sequence[Sequence[int]]


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
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_prompts", "max_tokens", "rounds", "batch_sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """What is measured."""

    lengths: Annotated[tuple[int, ...], "tokens of a prompt, one run for each"] = (256, 2048)
    rounds: Annotated[int, "runs of each length; the rate is their median"] = 5
    json: Annotated[bool, "print one JSON object instead of tables"] = False

    def __post_init__(self) -> None:
        require_positive(self, "lengths", "rounds")


@dataclass(slots=True, kw_only=True)
class Turn:
    """One setting, once."""

    num_tokens: int
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
    core = _engine(engine, speculation="adaptive", num_speculative_tokens=MAX_DRAFT_TOKENS)
    info = core.info
    if max(config.batch_sizes) > info.max_num_seqs:
        raise StartupError(
            f"batch size {max(config.batch_sizes)} is over --max-num-seqs ({info.max_num_seqs})"
        )
    prompts = read_prompts(engine, config.prompts, info.vocab_size)
    results = [
        result
        for batch_size in config.batch_sizes
        for result in compare_depths(core, config, prompts, batch_size)
    ]
    core.close()
    if config.json:
        head = {"model": engine.source.model, **asdict(info)}
        print(json.dumps(head | {"results": [asdict(result) for result in results]}))
    else:
        print(f"{engine.source.model}: {info.dtype}, {info.kernels} kernels, {info.speculation}\n")
        print(_decode_table(results))
    return 0


def bench_prefill(engine: EngineConfig, config: PrefillConfig) -> int:
    """Measure in this process how long prompts take until their first token.

    MODEL is a checkpoint folder, a preset or a Hugging Face id. No server is needed.
    """
    core = _engine(engine, speculation="off")
    info, rng, results = core.info, random.Random(0), []
    if max(config.lengths) >= info.max_model_len:
        raise StartupError(
            f"length {max(config.lengths)} leaves no room for a token in --max-model-len "
            f"({info.max_model_len})"
        )
    for length in config.lengths:
        prompt = _random_prompt(rng, length, info.vocab_size)
        turns = [
            _play(core, [prompt], 1, max_tokens=1, ignore_eos=True)
            for _ in range(1 + config.rounds)  # the first warms up
        ]
        seconds = median(turn.wall_s for turn in turns[1:])
        results.append(
            {"num_tokens": length, "ttft_ms": 1e3 * seconds, "tokens_per_s": length / seconds}
        )
    core.close()
    if config.json:
        head = {"model": engine.source.model, "kernels": info.kernels}
        print(json.dumps(head | {"results": results}))
    else:
        rows = [["tokens", "first token after ms", "tok/s"]]
        rows += [[f"{value:,.{i > 0:d}f}" for i, value in enumerate(r.values())] for r in results]
        print(f"{engine.source.model}: {info.dtype}, {info.kernels} kernels\n")
        print(format_table(rows, numeric=True))
    return 0


def _engine(engine: EngineConfig, **drafts: Any) -> EngineCore:
    """Start an engine in which no turn finds the prefixes of an earlier one."""
    from whalepod.server.build import build_engine

    speculation = replace(engine.speculation, **drafts)
    scheduler = replace(engine.scheduler, enable_prefix_caching=False)
    return build_engine(replace(engine, speculation=speculation, scheduler=scheduler))


def compare_depths(
    core: EngineCore, config: DecodeConfig, prompts: Prompts, batch_size: int
) -> list[Result]:
    """Run all depths in turns at one batch size."""
    from whalepod.mtp.depth import AdaptiveDepth, FixedDepth

    settings: dict[str, FixedDepth | AdaptiveDepth] = {
        str(k): FixedDepth(k) for k in range(MAX_DRAFT_TOKENS + 1)
    }
    settings["adaptive"] = AdaptiveDepth(MAX_DRAFT_TOKENS)
    turns: dict[str, list[Turn]] = {name: [] for name in settings}
    chosen = [prompts[i % len(prompts)] for i in range(config.num_prompts * batch_size)]
    for number in range(-1, config.rounds):  # the first turn warms up
        for name, depth in settings.items():
            core.depth = depth
            turn = _play(core, chosen, batch_size, config.max_tokens, config.ignore_eos)
            if number >= 0:
                turns[name].append(turn)
    results = [_result(batch_size, name, found) for name, found in turns.items()]
    for result in results:
        result.speedup = result.tokens_per_s / results[0].tokens_per_s
        result.cpu_speedup = result.tokens_per_cpu_s / results[0].tokens_per_cpu_s
    return results


def _play(
    core: EngineCore, prompts: Prompts, batch_size: int, max_tokens: int, ignore_eos: bool
) -> Turn:
    """Answer all prompts, `batch_size` at once: greedy, so that every setting writes the same."""
    from whalepod.scheduler.params import SamplingParams
    from whalepod.server.messages import Submit

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
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
    after, earlier = core.stats, before.num_accepted_by_position
    return Turn(
        num_tokens=after.generation_tokens - before.generation_tokens,
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
    by_position = zip_longest(*(turn.accepted_by_position for turn in turns), fillvalue=0)
    accepted = [sum(counts) for counts in by_position]
    num_forwards = sum(turn.num_tokens for turn in turns) - sum(accepted)
    num_drafts = sum(turn.num_drafts for turn in turns)
    return Result(
        batch_size=batch_size,
        depth=depth,
        tokens_per_s=median(turn.num_tokens / turn.wall_s for turn in turns),
        tokens_per_cpu_s=median(turn.num_tokens / turn.cpu_s for turn in turns),
        tokens_per_forward=1 + sum(accepted) / num_forwards,
        mean_depth=sum(turn.num_draft_tokens for turn in turns) / num_forwards,
        acceptance_by_position=[count / num_drafts for count in accepted if num_drafts and count],
        turns=turns,
    )


def _decode_table(results: Sequence[Result]) -> str:
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
    if tokenizer.has_chat_template:
        return list(tokenizer.encode_chat(messages, tools=record.get("tools")))
    return list(tokenizer.encode(messages[-1]["content"]))
