"""The part of the composition root that loads a model."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch

from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.kernels.interface import BLOCK_TOKENS, Kernels
from whalepod.models.canary import NotInvariantError, canary
from whalepod.models.config import ConfigError, ModelConfig, load_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.packed_files import PackedFiles, fingerprint
from whalepod.models.source import (
    EMBEDDED_MODEL,
    SourceError,
    default_cache_folder,
    resolve_model,
)
from whalepod.models.weights import CheckpointWeights, DummyWeights, Weights, WeightsError
from whalepod.mtp.module import MtpModule
from whalepod.server.cache_memory import settle_length
from whalepod.server.choices import choose_kernels, wants_mtp
from whalepod.server.config import EngineConfig, ModelSource
from whalepod.server.errors import StartupError
from whalepod.server.progress import reporter

ANY_CHUNK = 2**31
"""Batch-invariant mode attends in one way only, absorbed, however long a chunk is."""
CANARY_POSITIONS = 2 * BLOCK_TOKENS
"""What the canary's text needs, however short the requests may be."""
SMALLEST_KEPT_BYTES = 256 << 20
"""Checkpoints below it are packed at each start."""

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights.

    mtp  the layer that drafts, if speculation uses it
    """

    model: DeepseekV3
    mtp: MtpModule | None
    weights_bytes: int

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the routed experts that are loaded here."""
        return self.model.expert_bytes + (self.mtp.expert_bytes if self.mtp is not None else 0)


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
    device, limits = checkpoint.engine_config.device, checkpoint.engine_config.scheduler
    weights = _open_weights(checkpoint, placement)
    model = DeepseekV3(
        checkpoint.config,
        weights,
        checkpoint.kernels,
        max_positions=max(limits.max_model_len, CANARY_POSITIONS),
        absorbed_max_query_tokens=(
            ANY_CHUNK if device.batch_invariant else device.absorbed_max_query_tokens
        ),
        placement=placement,
    )
    mtp = None
    if wants_mtp(checkpoint.engine_config.speculation, checkpoint.config):
        mtp = load_mtp(model, weights, checkpoint.kernels, placement)
    if isinstance(weights, CheckpointWeights):
        weights.save_packed()
    if device.batch_invariant:
        canary(model)
    return LoadedModel(model=model, mtp=mtp, weights_bytes=weights.bytes_read)


def load_mtp(
    model: DeepseekV3,
    weights: Weights,
    kernels: Kernels,
    placement: ExpertPlacement | None = None,
) -> MtpModule | None:
    """Load the module.

    A checkpoint that lacks the whole layer, as some quantised ones do, is served without its
    drafts; one that has a part of the layer raises WeightsError.
    """
    if isinstance(weights, CheckpointWeights) and not weights.mtp_names():
        logger.warning(
            "WARNING: config.json names a multi-token-prediction layer, but the checkpoint has no "
            "tensor of it: no drafts"
        )
        return None
    module = MtpModule(model, weights, kernels, placement=placement)
    unused = weights.unused_mtp_names() if isinstance(weights, CheckpointWeights) else ()
    if unused:
        raise WeightsError(
            f"{unused[0]} is unexpected (and {len(unused) - 1} more): the multi-token-prediction "
            "layer that config.json describes has no place for it"
        )
    return module


@contextmanager
def startup_errors() -> Iterator[None]:
    """Raise StartupError, one sentence, for what goes wrong in the block and a user can fix."""
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


def _open_weights(checkpoint: Checkpoint, placement: ExpertPlacement | None) -> Weights:
    source = checkpoint.engine_config.source
    if source.load_format == "dummy":
        return DummyWeights(checkpoint.config, dtype=checkpoint.dtype, seed=source.seed)
    return CheckpointWeights(
        checkpoint.folder,
        checkpoint.config,
        dtype=checkpoint.dtype,
        progress=reporter("weights", "MiB", 1 << 20),
        packed_files=_packed_files(checkpoint, placement),
    )


def _packed_files(checkpoint: Checkpoint, placement: ExpertPlacement | None) -> PackedFiles | None:
    """Return the files of packed weights; None for a model so small that packing takes no time."""
    folder, layout = checkpoint.folder, checkpoint.kernels.packed_layout
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if num_bytes < SMALLEST_KEPT_BYTES or layout is None:
        return None
    parent = default_cache_folder() / "packed"
    owned = placement.owned if placement else None
    experts = _name_of(owned) if owned else "all"
    key = fingerprint(folder, f"{layout}/{checkpoint.dtype}")
    return PackedFiles(parent / key, experts=experts)


def _name_of(experts: Sequence[int]) -> str:
    if isinstance(experts, range):
        return f"{experts.start}-{experts.stop}"
    return f"{experts[0]}x{len(experts)}-{zlib.crc32(repr(list(experts)).encode()):08x}"


def eos_token_ids_of(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ends of sequence that config.json, generation_config.json and the tokenizer name.

    The gateway gets the same set in `EngineInfo`. Raises StartupError for a file that is damaged.
    """
    file = checkpoint.folder / "generation_config.json"
    extra = _read_object(file).get("eos_token_id")
    ids = [] if extra is None else extra if isinstance(extra, list) else [extra]
    if not all(type(token_id) is int for token_id in ids):
        raise StartupError(f"{file}: eos_token_id must be integers, got {extra!r}")
    return frozenset(checkpoint.config.eos_token_ids).union(
        ids, _tokenizer_eos_ids(checkpoint.folder)
    )


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
