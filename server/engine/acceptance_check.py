"""A start-up check that the multi-token-prediction layer guesses at all.

A layer that was loaded wrongly changes no answer, it only never guesses right, which goes unnoticed
(vllm-project/vllm#33497, #43456). So a few prompts are continued, and the guesses counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, StepResult
from whalepod.scheduler.request import Request
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampling_state import SamplingState

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "One, two, three, four, five,",
    "Once upon a time there was a little",
    "Hello! How can I help you",
    '{"name": "Anna", "age": 31, "city":',
    "def add(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
)
MAX_TOKENS = 24
MAX_S, MAX_SUSPECT_S = 0.35, 2.0
"""Large models judge fewer guesses; a layer that is rarely right gets more time to prove itself."""
FEWEST_JUDGED, FEWEST_SUSPECT_JUDGED = 16, 32
RARELY, NEAR_ZERO = 0.3, 0.12
"""Trained layers are right on more than half of all texts. One that sees nothing of the text is
right about once in a vocabulary, and one whose inputs are swapped now and then, where a text
repeats itself."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How many first guesses were judged, and how many of them were right."""

    num_judged: int
    num_right: int

    @property
    def is_near_zero(self) -> bool:
        """Whether too few guesses are right for a layer that was trained."""
        return self.num_judged >= FEWEST_JUDGED and self.num_right < NEAR_ZERO * self.num_judged


def builtin_prompts(folder: Path, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the prompts in the model's tokens; none if the checkpoint has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return []
    tokenizer = Tokenizer.from_file(str(file))
    encoded = [tuple(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    return [ids for ids in encoded if ids and max(ids) < vocab_size]


def check_acceptance(
    runner: Runner,
    limits: SchedulerConfig,
    prompts: Sequence[tuple[int, ...]],
    *,
    num_blocks: int,
    eos_token_ids: frozenset[int],
    layer: int,
) -> None:
    """Continue the prompts, and warn if the layer of this number never guesses right.

    `runner` drafts with the layer alone: looked-up drafts would hide a broken one.
    """
    found = measure_acceptance(
        runner, limits, prompts, num_blocks=num_blocks, eos_token_ids=eos_token_ids
    )
    report_acceptance(found, layer=layer)


def measure_acceptance(
    runner: Runner,
    limits: SchedulerConfig,
    prompts: Sequence[tuple[int, ...]],
    *,
    num_blocks: int,
    eos_token_ids: frozenset[int],
) -> Acceptance:
    """Continue the prompts greedily with one guess a step, for about `MAX_S` seconds, or
    `MAX_SUSPECT_S` if few are right.

    `runner` is idle, and its cache may be written.
    """
    scheduler = Scheduler(
        replace(limits, enable_prefix_caching=False, max_num_queued_reqs=len(prompts)),
        num_blocks=num_blocks,
        eos_token_ids=eos_token_ids,
        block_tokens=BLOCK_TOKENS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=0)
    for number, prompt in enumerate(prompts):
        if len(prompt) + MAX_TOKENS > min(limits.max_model_len, num_blocks * BLOCK_TOKENS):
            continue
        request = Request(request_id=str(number), prompt_token_ids=prompt, params=params)
        scheduler.add(request)
        for sequence in request.sequences:
            state = SamplingState.of_sequence(sequence, eos_token_ids)
            runner.add(sequence.sequence_id, state)
    started_s = time.monotonic()
    num_judged = num_right = 0
    while (plan := scheduler.step(num_drafts=1)) is not None:
        result = runner.run(plan)
        judged, right = _count(plan, result)
        num_judged, num_right = num_judged + judged, num_right + right
        scheduler.finish(result)
        is_suspect = num_right < RARELY * num_judged
        fewest = FEWEST_SUSPECT_JUDGED if is_suspect else FEWEST_JUDGED
        limit_s = MAX_SUSPECT_S if is_suspect else MAX_S
        if time.monotonic() - started_s > limit_s and num_judged >= fewest:
            break
    for sequence_id in range(len(prompts)):
        runner.drop(sequence_id)
    return Acceptance(num_judged=num_judged, num_right=num_right)


def _count(plan: Plan, result: StepResult) -> tuple[int, int]:
    judged = [found for row, found in zip(plan.rows, result.rows, strict=True) if row.num_drafts]
    return len(judged), sum(1 for found in judged if len(found.token_ids) > 1)


def report_acceptance(found: Acceptance, *, layer: int) -> None:
    """Log what was found; loudly where the layer cannot be right."""
    if found.is_near_zero:
        logger.warning(
            "WARNING: multi-token prediction is broken: %d of %d guesses on the built-in prompts "
            "were right, and a trained layer guesses more than half. Answers are not affected, but "
            "guessing only costs time. Likely causes: model.layers.%d.* are missing from the "
            "checkpoint or were never trained; eh_proj was converted with hidden state and "
            "embedding in the other order (it takes [enorm(embedding), hnorm(hidden)]); or the "
            "norms enorm, hnorm and shared_head.norm were mixed up. Mend the checkpoint, or start "
            "with --speculation off",
            found.num_right,
            found.num_judged,
            layer,
        )
    elif found.num_judged >= FEWEST_JUDGED:
        share = 100 * found.num_right / found.num_judged
        logger.info("multi-token prediction: %.0f %% of first guesses are right", share)
