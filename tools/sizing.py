"""What a model needs, from the sizes in its `config.json`: arithmetic only, no tensor is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.config import Fp8Config, ModelConfig
from whalepod.models.layout import NamedShape, checkpoint_tensors, is_quantizable

WEIGHT_DTYPES = ("fp32", "bf16", "fp8", "int8")
_VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2, "int8": 2}
"""Bytes of a value that is not quantised."""
_INT8_VALUES, _INT8_SCALE_BYTES = 32, 2
"""Values that share a scale with `--quantization int8`."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Parameters, and bytes by dtype of the weights."""

    parameters: int
    """Of the model itself, as published: without MTP layers."""
    mtp_parameters: int
    """Of the MTP layers, without their copies of the embedding and the head."""
    active_parameters: int
    """Read for one token: all but the embedding table and the experts not chosen."""
    weights_bytes: dict[str, int]
    """By dtype, MTP layers included."""
    kv_bytes_per_token: dict[str, int]
    """By dtype of the cache, MTP layers included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is left for the KV cache when the weights have one dtype."""

    dtype: str
    weights_bytes: int
    kv_cache_bytes: int
    """Negative: what is missing."""
    num_tokens: int
    max_concurrency: float
    """Sequences of the longest allowed length at once."""


def measure(config: ModelConfig) -> ModelSizes:
    """Count a model's parameters and bytes."""
    main: list[NamedShape] = []
    mtp: list[NamedShape] = []
    for name, shape in checkpoint_tensors(config):
        is_mtp = _layer_index(name) >= config.num_layers
        if not (is_mtp and _is_shared_copy(name)):
            (mtp if is_mtp else main).append((name, shape))
    return ModelSizes(
        parameters=_count(main),
        mtp_parameters=_count(mtp),
        active_parameters=_count_active(config, main),
        weights_bytes={
            dtype: sum(_tensor_bytes(config, dtype, name, shape) for name, shape in main + mtp)
            for dtype in WEIGHT_DTYPES
        },
        kv_bytes_per_token={
            dtype: kv_bytes_per_token(config, _VALUE_BYTES[dtype]) for dtype in ("fp32", "bf16")
        },
    )


def kv_bytes_per_token(config: ModelConfig, value_bytes: int, *, with_mtp: bool = True) -> int:
    """Bytes that one token takes in the latent caches of all layers."""
    num_layers = config.num_layers + (config.num_mtp_layers if with_mtp else 0)
    return num_layers * config.cache_row_width * value_bytes


def fit(
    sizes: ModelSizes, dtype: str, memory_bytes: int, max_model_len: int, *, reserve: float = 0.1
) -> Fit:
    """Return what fits into a memory, `reserve` of it kept for activations and the runtime."""
    usable = int(memory_bytes * (1 - reserve))
    cache_bytes = usable - sizes.weights_bytes[dtype]
    per_token = sizes.kv_bytes_per_token["fp32" if dtype == "fp32" else "bf16"]
    num_blocks = max(0, cache_bytes) // (per_token * BLOCK_TOKENS)
    blocks_per_sequence = math.ceil(max_model_len / BLOCK_TOKENS)
    return Fit(
        dtype=dtype,
        weights_bytes=sizes.weights_bytes[dtype],
        kv_cache_bytes=cache_bytes,
        num_tokens=num_blocks * BLOCK_TOKENS,
        max_concurrency=num_blocks / blocks_per_sequence,
    )


def _layer_index(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _is_shared_copy(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def _count(tensors: Iterable[NamedShape]) -> int:
    return sum(math.prod(shape) for _, shape in tensors)


def _count_active(config: ModelConfig, tensors: Iterable[NamedShape]) -> int:
    experts = always = 0
    for name, shape in tensors:
        if ".experts." in name:
            experts += math.prod(shape)
        elif config.tie_word_embeddings or "embed_tokens" not in name:
            always += math.prod(shape)
    if config.gate is None:
        return always
    return always + experts * config.gate.num_experts_per_token // config.gate.num_experts


def _tensor_bytes(config: ModelConfig, dtype: str, name: str, shape: tuple[int, ...]) -> int:
    if dtype == "fp8" and is_quantizable(name, shape):
        block = config.fp8 or Fp8Config()
        rows = math.ceil(shape[0] / block.block_rows)
        columns = math.ceil(shape[1] / block.block_columns)
        return math.prod(shape) + SCALE_BYTES * rows * columns
    is_sensitive = config.q_lora_rank is not None and "_a_proj" in name
    if (
        dtype == "int8"
        and not is_sensitive
        and (is_quantizable(name, shape) or name == "lm_head.weight")
    ):
        num_scales = shape[0] * math.ceil(shape[1] / _INT8_VALUES)
        return math.prod(shape) + _INT8_SCALE_BYTES * num_scales
    value_bytes = 4 if name.endswith("e_score_correction_bias") else _VALUE_BYTES[dtype]
    return math.prod(shape) * value_bytes
