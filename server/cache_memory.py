"""How much memory the latent cache gets, and how long requests may be."""

from __future__ import annotations

from dataclasses import replace

import torch

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError
from whalepod.server.memory import memory_bytes

SHARE_OF_FREE_MEMORY = 0.5
"""What the cache may take of the memory that is free once the weights are loaded."""
DEFAULT_CACHE_BYTES = 4 << 30
"""The most that it takes unasked; pages count only once they are written."""


def settle_length(limits: SchedulerConfig, config: ModelConfig) -> SchedulerConfig:
    """Return the limits with the model's own length where none was given."""
    if not limits.max_model_len:
        return replace(limits, max_model_len=config.max_position_embeddings)
    if limits.max_model_len > config.max_position_embeddings:
        raise StartupError(
            f"max_model_len ({limits.max_model_len}) is over the model's "
            f"max_position_embeddings ({config.max_position_embeddings}): lower --max-model-len"
        )
    return limits


def new_cache(
    config: EngineConfig, *, num_layers: int, row_width: int, dtype: torch.dtype
) -> LatentCache:
    """Allocate the latent cache; StartupError when no block fits."""
    row_bytes = num_layers * row_width * dtype.itemsize
    num_blocks = count_blocks(config, block_bytes=row_bytes * BLOCK_TOKENS)
    return LatentCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        row_width=row_width,
        dtype=dtype,
        device=config.device.device,
    )


def count_blocks(config: EngineConfig, *, block_bytes: int) -> int:
    """Return the blocks that fit: into the given memory, or as many as all requests can use.

    Raises StartupError when there is no room for one.
    """
    limits, given_bytes = config.scheduler, config.device.kv_cache_memory_bytes
    num_usable = limits.max_num_seqs * -(-limits.max_model_len // BLOCK_TOKENS)
    free_bytes = min(int(memory_bytes()[1] * SHARE_OF_FREE_MEMORY), DEFAULT_CACHE_BYTES)
    free_bytes //= config.parallel.expert_parallel_size  # ranks that share this machine
    num_blocks = given_bytes // block_bytes if given_bytes else free_bytes // block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"the KV cache has {given_bytes or free_bytes} bytes and one block of {BLOCK_TOKENS} "
            f"tokens takes {block_bytes}: give it more with --kv-cache-memory"
        )
    return num_blocks if given_bytes else min(num_blocks, num_usable)
