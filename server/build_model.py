"""The part of the composition root that loads a model, and chooses the kernels it runs on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch

from whalepod.ep_comm.interface import ExpertPlacement
from whalepod.kernels.cpu import CpuKernels, Int8CpuKernels
from whalepod.kernels.interface import BLOCK_TOKENS, Kernels
from whalepod.kernels.reference import ReferenceKernels
from whalepod.kernels.reference_int8 import Int8ReferenceKernels
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
from whalepod.mtp.module import MtpModule
from whalepod.server.build_speculation import load_mtp, wants_mtp
from whalepod.server.cache_memory import settle_length
from whalepod.server.config import EngineConfig, ModelSource
from whalepod.server.errors import StartupError
from whalepod.server.progress import reporter

ANY_CHUNK = 2**31
"""Batch-invariant mode attends in one way only, absorbed, however long a chunk is."""
CANARY_POSITIONS = 2 * BLOCK_TOKENS
"""The canary's text needs so many, however short the requests may be."""
SMALLEST_KEPT_BYTES = 256 << 20
"""Checkpoints below it are packed at each start."""


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
    mtp: MtpModule | None = None
    """The layer that drafts, if speculation uses it."""

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the routed experts that are loaded here."""
        return self.model.expert_bytes + (self.mtp.expert_bytes if self.mtp is not None else 0)

    @property
    def num_cache_layers(self) -> int:
        return self.config.num_layers + (self.mtp is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model whose configuration was read and whose weights were not.

    engine_config  what was asked for, with the model's own limits in place of zeros
    started_s      on the monotonic clock, when its configuration was read
    """

    config: ModelConfig
    engine_config: EngineConfig
    folder: Path
    dtype: torch.dtype
    kernels: Kernels
    started_s: float


def read_checkpoint(config: EngineConfig) -> Checkpoint:
    """Read the configuration of the model that was asked for, and choose what it runs on."""
    started_s, source = time.monotonic(), config.source
    if config.device.num_threads:
        torch.set_num_threads(config.device.num_threads)
    with_weights = source.load_format != "dummy"
    folder = resolve_model(source.model, source.revision, with_weights=with_weights)
    model_config = load_config(folder)
    config = replace(config, scheduler=settle_length(config.scheduler, model_config))
    dtype = _choose_dtype(source, model_config)
    return Checkpoint(
        config=model_config,
        engine_config=config,
        folder=folder,
        dtype=dtype,
        kernels=choose_kernels(config, dtype),
        started_s=started_s,
    )


def load_model(checkpoint: Checkpoint, placement: ExpertPlacement | None = None) -> LoadedModel:
    """Read or make the weights; `placement` says which experts to load, None: all."""
    model_config, config = checkpoint.config, checkpoint.engine_config
    folder, kernels, dtype = checkpoint.folder, checkpoint.kernels, checkpoint.dtype
    weights = _new_weights(config, model_config, folder, kernels, dtype, placement)
    model = DeepseekV3(
        model_config,
        weights,
        kernels,
        max_positions=max(config.scheduler.max_model_len, CANARY_POSITIONS),
        absorbed_max_query_tokens=(
            ANY_CHUNK if config.device.batch_invariant else config.device.absorbed_max_query_tokens
        ),
        placement=placement,
    )
    mtp = None
    if wants_mtp(config.speculation, model_config):
        mtp = load_mtp(model, weights, kernels, placement)
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
    limits = replace(config.scheduler, max_model_len=num_positions)
    off = replace(config.speculation, speculation="off")
    with startup_errors():
        return load_model(read_checkpoint(replace(config, scheduler=limits, speculation=off)))


@contextmanager
def startup_errors() -> Iterator[None]:
    """Raise StartupError, one sentence, for what goes wrong in the block and a user can mend."""
    try:
        yield
    except (ConfigError, SourceError, WeightsError, NotInvariantError) as error:
        raise StartupError(str(error)) from error
    except MemoryError as error:
        raise StartupError(f"not enough memory for the model: {error}") from error


def _choose_dtype(source: ModelSource, config: ModelConfig) -> torch.dtype:
    if source.dtype == "fp32" or (source.dtype == "auto" and source.model == EMBEDDED_MODEL):
        return torch.float32
    if source.dtype == "bf16":
        return torch.bfloat16
    return torch.float32 if config.torch_dtype == "float32" else torch.bfloat16


def choose_kernels(config: EngineConfig, dtype: torch.dtype) -> Kernels:
    """Return the operations of the device, compiled."""
    device, is_int8 = config.device, config.source.quantization == "int8"
    if device.device != "cpu":
        raise StartupError(f"device {device.device!r} is not supported yet: use --device cpu")
    if device.kernels == "reference":
        return Int8ReferenceKernels() if is_int8 else ReferenceKernels()
    kind = Int8CpuKernels if is_int8 else CpuKernels
    kernels = kind(
        num_threads=device.num_threads or None,
        is_invariant=device.batch_invariant,
        code_folder=compiled_code_folder(),
    )
    kernels.warm_up(dtype, reporter("compiling kernels (once)", "regions"))
    return kernels


def _new_weights(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    placement: ExpertPlacement | None,
) -> Weights:
    if config.source.load_format == "dummy":
        return DummyWeights(model_config, dtype=dtype, seed=config.source.seed)
    return CheckpointWeights(
        folder,
        model_config,
        dtype=dtype,
        progress=reporter("weights", "MiB", 1 << 20),
        packed_files=_packed_files(folder, kernels, dtype, placement),
    )


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


def eos_token_ids_of(loaded: LoadedModel) -> frozenset[int]:
    """Return the ends of sequence that config.json, generation_config.json and the tokenizer name.

    The gateway gets the same set in `EngineInfo`. Raises StartupError for a file that is damaged.
    """
    file = loaded.folder / "generation_config.json"
    extra = _read_object(file).get("eos_token_id")
    ids = [] if extra is None else extra if isinstance(extra, list) else [extra]
    if not all(type(token_id) is int for token_id in ids):
        raise StartupError(f"{file}: eos_token_id must be integers, got {extra!r}")
    return frozenset(loaded.config.eos_token_ids).union(ids, _tokenizer_eos_ids(loaded.folder))


def _tokenizer_eos_ids(folder: Path) -> Iterator[int]:
    token = _read_object(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None:
        for added in _read_object(folder / "tokenizer.json").get("added_tokens", ()):
            if added["content"] == text:
                yield added["id"]


def _read_object(file: Path) -> dict[str, Any]:
    """Return a JSON object of a checkpoint, {} if the file is absent."""
    try:
        found = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartupError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise StartupError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found
