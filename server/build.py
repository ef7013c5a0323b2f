"""The composition root: the only place that chooses backends and puts the parts together."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from whalepod.ep_comm.interface import ExpertPlacement
from whalepod.kernels.cpu import CpuKernels, Int8CpuKernels
from whalepod.kernels.interface import BLOCK_TOKENS, Kernels
from whalepod.kernels.reference import ReferenceKernels
from whalepod.models.cache import LatentCache
from whalepod.models.canary import NotInvariantError, canary
from whalepod.models.config import ConfigError, ModelConfig, load_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.packed_files import PackedFiles, fingerprint
from whalepod.models.source import (
    EMBEDDED_MODEL,
    SourceError,
    compiled_code_folder,
    default_cache_folder,
    resolve_model,
)
from whalepod.models.weights import CheckpointWeights, DummyWeights, Weights, WeightsError
from whalepod.mtp.config import SpeculationConfig
from whalepod.mtp.module import MtpModule
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.journal import RecordedScheduler
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.build_speculation import (
    check_acceptance,
    describe_speculation,
    load_mtp,
    new_depth,
    new_speculator,
    wants_mtp,
)
from whalepod.server.cache_memory import new_cache, settle_length
from whalepod.server.config import EngineConfig, ModelSource
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.core import EngineCore, TestHooks
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.runner import Runner, RunnerSequence
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.sampling_state import SamplingState
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineInfo
from whalepod.server.progress import reporter
from whalepod.server.structured.backends import is_installed, new_compiler
from whalepod.server.structured.interface import Compiler

ANY_CHUNK = 2**31
"""Batch-invariant mode attends in one way only, absorbed, however long a chunk is."""
CANARY_POSITIONS = 2 * BLOCK_TOKENS
"""The canary's text needs so many, however short the requests may be."""
SMALLEST_KEPT_BYTES = 256 << 20
"""Checkpoints below it are packed at each start."""

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, new_placement: NewPlacement | None = None) -> EngineCore:
    """Load the model and put an engine around it, warmed up and ready.

    new_placement  says which experts to load, once the model's configuration is known; None: all

    Raises StartupError, one sentence, for what a user can mend.
    """
    try:
        return _build_engine(config, new_placement)
    except (ConfigError, SourceError, WeightsError, NotInvariantError) as error:
        raise StartupError(str(error)) from error
    except MemoryError as error:
        raise StartupError(f"not enough memory for the model: {error}") from error


def _build_engine(config: EngineConfig, new_placement: NewPlacement | None) -> EngineCore:
    started = time.monotonic()
    if new_placement is None and config.parallel.expert_parallel_size > 1:
        raise StartupError(
            f"expert_parallel_size is {config.parallel.expert_parallel_size}, and this is one "
            "engine: ranks are started by `whalepod serve`"
        )
    if not is_installed(config.structured_outputs_backend):
        name = config.structured_outputs_backend
        raise StartupError(
            f"--structured-outputs-backend {name}: the package {name} is not installed; "
            f"pip install 'whalepod[{name}]', or leave the flag out"
        )
    if config.device.num_threads:
        torch.set_num_threads(config.device.num_threads)
    loaded = load_model(config, new_placement)
    config = loaded.engine_config
    model_config, limits = loaded.config, config.scheduler
    cache = new_cache(
        config,
        num_layers=loaded.num_cache_layers,
        row_width=model_config.cache_row_width,
        dtype=loaded.model.dtype,
    )
    num_blocks = cache.rows_LPBC.shape[1]
    eos_token_ids = _eos_token_ids(loaded)
    journal = _open_journal(config.record)
    sampler = Sampler(
        loaded.kernels, by_rejection=config.speculation.speculation_acceptance == "rejection"
    )
    batches = BatchBuilder(
        max_tokens=limits.max_num_batched_tokens,
        max_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    speculator = new_speculator(
        config.speculation,
        loaded.mtp,
        cache,
        batches,
        sampler,
        hidden_size=model_config.hidden_size,
    )
    runner = Runner(loaded.model, cache, sampler, batches, speculator)
    max_depth = config.speculation.max_depth if speculator else 0
    warm_up(runner, limits, max_depth)
    # a rank of a group has not all experts before the others are there: its guesses mean nothing
    is_whole = new_placement is None and config.source.load_format != "dummy"
    if loaded.mtp and is_whole:
        only_mtp = new_speculator(
            SpeculationConfig(speculation_method="mtp"),
            loaded.mtp,
            cache,
            batches,
            sampler,
            hidden_size=model_config.hidden_size,
        )
        check_acceptance(
            Runner(loaded.model, cache, sampler, batches, only_mtp),
            limits,
            model_config,
            loaded.folder,
            num_blocks=num_blocks,
            eos_token_ids=eos_token_ids,
        )
    speculation = describe_speculation(config.speculation, speculator)
    info = _describe(loaded, cache, speculation, time.monotonic() - started)
    return EngineCore(
        _new_scheduler(config, num_blocks, eos_token_ids, loaded, journal),
        runner,
        info,
        depth=new_depth(config.speculation) if speculator else None,
        seed=config.source.seed,
        hooks=_new_hooks(config, loaded.folder, eos_token_ids),
        grammars=_new_grammars(config, loaded, eos_token_ids),
        journal=journal,
    )


def _describe(
    loaded: LoadedModel, cache: LatentCache, speculation: str, load_seconds: float
) -> EngineInfo:
    """Say what the engine is, for the start-up report and the board."""
    config, limits = loaded.engine_config, loaded.engine_config.scheduler
    return EngineInfo(
        model_type=loaded.config.model_type,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        kernels=loaded.kernels.name,
        max_model_len=limits.max_model_len,
        vocab_size=loaded.config.vocab_size,
        num_blocks=cache.rows_LPBC.shape[1],
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        weights_bytes=loaded.weights_bytes,
        kv_bytes_per_token=cache.rows_LPBC[:, 0].nbytes // BLOCK_TOKENS,
        load_seconds=load_seconds,
        expert_bytes=loaded.expert_bytes,
        num_ranks=config.parallel.expert_parallel_size,
        speculation=speculation,
        structured_outputs_backend=config.structured_outputs_backend,
    )


# -- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, what it was read from, and the kernels that it runs on."""

    model: DeepseekV3
    config: ModelConfig
    engine_config: EngineConfig
    """What was asked for, with the model's own limits in place of zeros."""
    kernels: Kernels
    folder: Path
    weights_bytes: int
    mtp: tuple[MtpModule, ...] = ()
    """The layers that draft, if speculation uses them."""

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the routed experts that are loaded here."""
        return self.model.expert_bytes + sum(module.expert_bytes for module in self.mtp)

    @property
    def num_cache_layers(self) -> int:
        return self.config.num_layers + len(self.mtp)


class NewPlacement(Protocol):
    """Says where the routed experts live, once it is known how many there are.

    `limits` are settled. Raises StartupError if they cannot be spread.
    """

    def __call__(
        self, config: ModelConfig, limits: SchedulerConfig, kernels: Kernels, dtype: torch.dtype
    ) -> ExpertPlacement: ...


def load_model(config: EngineConfig, new_placement: NewPlacement | None = None) -> LoadedModel:
    """Read or make the weights that the configuration names."""
    source, is_dummy = config.source, config.source.load_format == "dummy"
    folder = resolve_model(source.model, source.revision, with_weights=not is_dummy)
    model_config = load_config(folder)
    config = replace(config, scheduler=settle_length(config.scheduler, model_config))
    dtype = _choose_dtype(source, model_config)
    kernels = choose_kernels(config, dtype)
    placement = None
    if new_placement is not None:
        placement = new_placement(model_config, config.scheduler, kernels, dtype)
    weights: Weights
    if is_dummy:
        weights = DummyWeights(model_config, dtype=dtype, seed=source.seed)
    else:
        weights = CheckpointWeights(
            folder,
            model_config,
            dtype=dtype,
            progress=reporter("weights", "MiB", 1 << 20),
            packed_files=_packed_files(folder, kernels, dtype, placement),
        )
    model = DeepseekV3(
        model_config,
        weights,
        kernels,
        max_positions=max(config.scheduler.max_model_len, CANARY_POSITIONS),
        absorbed_max_query_tokens=_absorbed_max_query_tokens(config),
        placement=placement,
    )
    mtp: tuple[MtpModule, ...] = ()
    if wants_mtp(config.speculation, model_config):
        mtp = load_mtp(model, weights, kernels, config.speculation.max_depth, placement)
    if isinstance(weights, CheckpointWeights):
        weights.save_packed()
    if config.device.batch_invariant:
        canary(model)
    return LoadedModel(
        model=model,
        config=model_config,
        engine_config=config,
        kernels=kernels,
        folder=folder,
        weights_bytes=weights.bytes_read,
        mtp=mtp,
    )


def load_model_for_bench(config: EngineConfig, num_positions: int) -> LoadedModel:
    """Load a model without an engine around it, for texts of up to `num_positions` tokens.

    Raises StartupError, one sentence, for what a user can mend.
    """
    if config.device.num_threads:
        torch.set_num_threads(config.device.num_threads)
    limits = replace(config.scheduler, max_model_len=num_positions)
    off = replace(config.speculation, speculation="off")
    try:
        return load_model(replace(config, scheduler=limits, speculation=off))
    except (ConfigError, SourceError, WeightsError) as error:
        raise StartupError(str(error)) from error


def _packed_files(
    folder: Path, kernels: Kernels, dtype: torch.dtype, placement: ExpertPlacement | None
) -> PackedFiles | None:
    """Return the files of packed weights; None for a model so small that packing takes no time."""
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if num_bytes < SMALLEST_KEPT_BYTES or kernels.packed_layout is None:
        return None
    layout = f"{kernels.packed_layout}/{dtype}"
    parent = default_cache_folder() / "packed"
    owned = placement.owned if placement else None
    experts = f"{owned.start}-{owned.stop}" if owned else "all"
    return PackedFiles(parent / fingerprint(folder, layout), experts=experts)


def choose_kernels(config: EngineConfig, dtype: torch.dtype) -> Kernels:
    """Return the operations of the device, compiled."""
    device, is_int8 = config.device, config.source.quantization == "int8"
    if device.device != "cpu":
        raise StartupError(f"device {device.device!r} is not supported yet: use --device cpu")
    if device.kernels == "reference" and not device.batch_invariant:
        if is_int8:
            raise StartupError(
                "--kernels reference has no --quantization int8: drop one of the two"
            )
        return ReferenceKernels()
    kind = Int8CpuKernels if is_int8 else CpuKernels
    kernels = kind(
        num_threads=device.num_threads or None,
        is_invariant=device.batch_invariant,
        code_folder=compiled_code_folder(),
    )
    kernels.warm_up(dtype, reporter("compiling kernels (once)", "regions"))
    return kernels


def _choose_dtype(source: ModelSource, config: ModelConfig) -> torch.dtype:
    if source.dtype == "fp32" or (source.dtype == "auto" and source.model == EMBEDDED_MODEL):
        return torch.float32
    if source.dtype == "bf16":
        return torch.bfloat16
    return torch.float32 if config.torch_dtype == "float32" else torch.bfloat16


def _absorbed_max_query_tokens(config: EngineConfig) -> int:
    if config.device.batch_invariant:
        return ANY_CHUNK
    return config.device.absorbed_max_query_tokens


def _eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the ends of sequence that config.json and generation_config.json name."""
    file = loaded.folder / "generation_config.json"
    try:
        extra = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        extra = None
    except (ValueError, AttributeError) as error:
        raise StartupError(f"{file} cannot be read: {error}") from error
    ids = [] if extra is None else extra if isinstance(extra, list) else [extra]
    return frozenset(loaded.config.eos_token_ids).union(ids)


# -- the engine ---------------------------------------------------------------------------------


def _new_scheduler(
    config: EngineConfig,
    num_blocks: int,
    eos_token_ids: frozenset[int],
    loaded: LoadedModel,
    journal: BinaryIO | None,
) -> Scheduler:
    prefix_seed = f"{loaded.folder}/{config.source}".encode()
    if journal is None:
        return Scheduler(
            config.scheduler,
            num_blocks=num_blocks,
            eos_token_ids=eos_token_ids,
            prefix_seed=prefix_seed,
            block_tokens=BLOCK_TOKENS,
            num_lookback_tokens=len(loaded.mtp),
        )
    return RecordedScheduler(
        config.scheduler,
        file=journal,
        num_blocks=num_blocks,
        eos_token_ids=eos_token_ids,
        prefix_seed=prefix_seed,
        block_tokens=BLOCK_TOKENS,
        num_lookback_tokens=len(loaded.mtp),
    )


def _open_journal(path: str | None) -> BinaryIO | None:
    """Create the file of `--record`; only its owner may read the prompts in it."""
    if path is None:
        return None
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError as error:
        raise StartupError(f"cannot record to {path}: {error.strerror}") from error


def _new_hooks(
    config: EngineConfig, folder: Path, eos_token_ids: frozenset[int]
) -> TestHooks | None:
    if not config.enable_test_hooks:
        return None
    if not eos_token_ids:
        raise StartupError("test hooks need a model with an end-of-sequence token")
    from whalepod.server.engine.script_text import load_encode  # brings transformers with it

    return TestHooks(encode=load_encode(folder), eos_token_id=min(eos_token_ids))


def _new_grammars(
    config: EngineConfig, loaded: LoadedModel, eos_token_ids: frozenset[int]
) -> GrammarStore | None:
    file, vocab_size = loaded.folder / "tokenizer.json", loaded.config.vocab_size
    if not file.exists() or not eos_token_ids:
        return None

    def load() -> Compiler:
        text = file.read_text(encoding="utf-8")
        return new_compiler(
            config.structured_outputs_backend, text, vocab_size, sorted(eos_token_ids)
        )

    return GrammarStore(load)


def warm_up(runner: Runner, limits: SchedulerConfig, num_drafts: int = 0) -> None:
    """Run one step of each kind, so that the first request does not wait for a compiler.

    Its rows go to the first block of the cache, which nobody has yet.
    """
    num_places = min(BLOCK_TOKENS, limits.max_model_len)
    for params in (SamplingParams(temperature=0, logprobs=1), SamplingParams(top_p=0.9, seed=0)):
        runner.add(0, RunnerSequence(state=SamplingState(params, [0], 0)))
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
            runner.run(Plan(step=0, rows=(row,)))
        runner.drop(0)
