"""The composition root: puts the parts of an engine together.

Read `build_core` first; `build_model` and `cache_memory` are its parts, and `choices` has all
choices between backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.cache import LatentCache
from whalepod.models.checkpoint_files import CheckpointFiles
from whalepod.mtp.config import SpeculationConfig
from whalepod.mtp.depth import AdaptiveDepth, Depth, FixedDepth
from whalepod.mtp.drafter import Drafter
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.journal import RecordedScheduler
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.build_model import (
    Checkpoint,
    LoadedModel,
    eos_token_ids_of,
    load_model,
    read_checkpoint,
    startup_errors,
)
from whalepod.server.cache_memory import new_cache
from whalepod.server.choices import wants_lookup
from whalepod.server.config import EngineConfig
from whalepod.server.engine.acceptance_check import builtin_prompts, check_acceptance
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.sampling_state import SamplingState
from whalepod.server.engine.speculation import Speculator
from whalepod.server.errors import StartupError
from whalepod.server.journal_file import open_journal
from whalepod.server.messages import EngineInfo
from whalepod.server.structured.interface import Compiler


def build_engine(config: EngineConfig) -> EngineCore:
    """Load the model and put an engine around it, warmed up and ready.

    Raises StartupError, one sentence, for what a user can fix.
    """
    if config.parallel.expert_parallel_size > 1:
        raise StartupError(
            f"expert_parallel_size is {config.parallel.expert_parallel_size}, and this is one "
            "engine: ranks are started by `whalepod serve`"
        )
    if config.eplb.enable_eplb:
        raise StartupError(
            "--enable-eplb moves experts between ranks, and this is one engine: add "
            "--expert-parallel-size, or leave it out"
        )
    with startup_errors():
        return build_core(read_checkpoint(config))


def build_core(checkpoint: Checkpoint, placement: ExpertPlacement | None = None) -> EngineCore:
    """Load a checkpoint's weights and put an engine around the model; see `build_engine`.

    placement  where the routed experts are; None: all of them here
    """
    loaded, config = load_model(checkpoint, placement), checkpoint.engine_config
    eos_token_ids = eos_token_ids_of(checkpoint)
    new_sampler, new_core = _choose_classes(checkpoint, eos_token_ids)
    runners = _Runners(checkpoint, loaded, new_sampler)
    runner = runners.new(config.speculation)
    num_drafts = config.speculation.max_depth if runner.makes_drafts else 0
    if not warm_up(runner, config.scheduler, num_drafts):
        _refuse_bad_weights(checkpoint)
    # a rank of a group has not all experts before the others are there: its guesses mean nothing
    if loaded.mtp is not None and placement is None and config.source.load_format != "dummy":
        check_acceptance(
            runners.new(SpeculationConfig(speculation_method="mtp")),
            config.scheduler,
            builtin_prompts(checkpoint.folder, checkpoint.config.vocab_size),
            num_blocks=runners.num_blocks,
            eos_token_ids=eos_token_ids,
            layer=checkpoint.config.num_layers,
        )
    journal = open_journal(config.record)  # last: a start that fails leaves no file behind
    return new_core(
        _new_scheduler(checkpoint, loaded, runners.num_blocks, eos_token_ids, journal),
        runner,
        _describe(checkpoint, loaded, runners.cache, eos_token_ids, runner.draft_makers),
        depth=new_depth(config.speculation) if runner.makes_drafts else None,
        seed=config.source.seed,
        grammars=_new_grammars(checkpoint, eos_token_ids),
        journal=journal,
    )


def _choose_classes(
    checkpoint: Checkpoint, eos_token_ids: frozenset[int]
) -> tuple[Callable[..., Sampler], Callable[..., EngineCore]]:
    """Return what makes the sampler and the engine: scripted ones with `--test-script`."""
    path = checkpoint.engine_config.test_script
    if path is None:
        return Sampler, EngineCore
    if not eos_token_ids:
        raise StartupError("test_script needs a model with an end-of-sequence token")
    from whalepod.server.engine.scripted import ScriptedEngine, ScriptedSampler, load_scripts

    find = load_scripts(checkpoint.folder, Path(path), min(eos_token_ids))
    return partial(ScriptedSampler, find), partial(ScriptedEngine, find)


# -- the runner ---------------------------------------------------------------------------------


class _Runners:
    """Makes runners of one model, which share its cache, its sampler and its batches."""

    def __init__(
        self, checkpoint: Checkpoint, loaded: LoadedModel, new_sampler: Callable[..., Sampler]
    ) -> None:
        config, limits = checkpoint.engine_config, checkpoint.engine_config.scheduler
        self._model, self._mtp = loaded.model, loaded.mtp
        self.cache = new_cache(
            config,
            num_layers=checkpoint.config.num_layers + (loaded.mtp is not None),
            row_width=checkpoint.config.cache_row_width,
            dtype=checkpoint.dtype,
        )
        self.num_blocks = self.cache.rows_LPBC.shape[1]
        self._sampler = new_sampler(checkpoint.kernels)
        self._batches = BatchBuilder(
            max_tokens=limits.max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )

    def new(self, speculation: SpeculationConfig) -> Runner:
        """Return a runner whose drafts `speculation` makes."""
        drafter = None
        if self._mtp is not None:
            hidden_size = self._model.config.hidden_size
            drafter = Drafter(self._mtp, self.cache, self._batches.build, hidden_size=hidden_size)
        with_lookup = wants_lookup(speculation, has_mtp=drafter is not None)
        speculator = None
        if drafter is not None or with_lookup:
            speculator = Speculator(drafter, self._sampler, with_lookup=with_lookup)
        return Runner(self._model, self.cache, self._sampler, self._batches, speculator)


def warm_up(runner: Runner, limits: SchedulerConfig, num_drafts: int = 0) -> bool:
    """Run one step of each kind, so that the first request does not wait for a compiler.

    Its rows go to the first block of the cache, which no sequence has yet. Returns whether all
    logits were finite.
    """
    num_places = min(BLOCK_TOKENS, limits.max_model_len)
    is_finite = True
    for params in (SamplingParams(temperature=0, logprobs=1), SamplingParams(top_p=0.9, seed=0)):
        runner.add(0, SamplingState(params, [0], 0))
        for num_tokens in (1, 2, min(BLOCK_TOKENS, limits.max_num_batched_tokens)):
            num_tokens = min(num_tokens, num_places)
            row = Row(
                sequence_id=0,
                token_ids=(0,) * num_tokens,
                start=0,
                block_ids=(0,),
                sample=True,
                num_drafts_wanted=min(num_drafts, num_places - num_tokens),
            )
            result = runner.run(Plan(step=0, rows=(row,)))
            is_finite &= result.rows[0].error is None
        runner.drop(0)
    return is_finite


def _refuse_bad_weights(checkpoint: Checkpoint) -> None:
    """Raise StartupError that names the tensor which is not finite, if one is."""
    if checkpoint.engine_config.source.load_format == "dummy":
        return
    found = CheckpointFiles(checkpoint.folder).first_not_finite()
    if found is not None:
        raise StartupError(
            f"{found} holds a NaN or an infinity, so no answer can be computed: download it again"
        )


# -- what stands around it ----------------------------------------------------------------------


def new_depth(speculation: SpeculationConfig) -> Depth:
    """Return what chooses the number of drafts of each step."""
    if speculation.is_fixed:
        return FixedDepth(speculation.max_depth)
    return AdaptiveDepth(speculation.max_depth)


def _new_scheduler(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    num_blocks: int,
    eos_token_ids: frozenset[int],
    journal: BinaryIO | None,
) -> Scheduler:
    config = checkpoint.engine_config
    new = Scheduler if journal is None else partial(RecordedScheduler, file=journal)
    return new(
        config.scheduler,
        num_blocks=num_blocks,
        eos_token_ids=eos_token_ids,
        prefix_seed=f"{checkpoint.folder}/{config.source}".encode(),
        block_tokens=BLOCK_TOKENS,
        num_lookback_tokens=int(loaded.mtp is not None),
    )


def _new_grammars(checkpoint: Checkpoint, eos_token_ids: frozenset[int]) -> GrammarStore | None:
    file, vocab_size = checkpoint.folder / "tokenizer.json", checkpoint.config.vocab_size
    if not file.exists() or not eos_token_ids:
        return None

    def load() -> Compiler:
        from whalepod.server.structured.llguidance_backend import LlguidanceCompiler

        text = file.read_text(encoding="utf-8")
        return LlguidanceCompiler(text, vocab_size, sorted(eos_token_ids))

    return GrammarStore(load)


def _describe(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    cache: LatentCache,
    eos_token_ids: frozenset[int],
    draft_makers: tuple[str, ...],
) -> EngineInfo:
    """Return what the engine is, for the start-up report and the page."""
    config, limits = checkpoint.engine_config, checkpoint.engine_config.scheduler
    return EngineInfo(
        model_type=checkpoint.config.model_type,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        kernels=checkpoint.kernels.name,
        max_model_len=limits.max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        num_blocks=cache.rows_LPBC.shape[1],
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        weights_bytes=loaded.weights_bytes,
        kv_bytes_per_token=cache.rows_LPBC[:, 0].nbytes // BLOCK_TOKENS,
        load_seconds=time.monotonic() - checkpoint.started_s,
        expert_bytes=loaded.expert_bytes,
        num_ranks=config.parallel.expert_parallel_size,
        speculation=_describe_speculation(config.speculation, draft_makers),
        structured_outputs_backend=config.structured_outputs_backend,
    )


def _describe_speculation(speculation: SpeculationConfig, makers: tuple[str, ...]) -> str:
    """Return for people what drafts how many tokens: "mtp, adaptive up to 4"."""
    if not makers:
        return "off"
    kind = "fixed at" if speculation.is_fixed else "adaptive up to"
    return f"{' + '.join(makers)}, {kind} {speculation.max_depth}"
