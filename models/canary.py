"""A start-up check of batch-invariant mode on this machine, with the loaded model itself."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.deepseek_v3 import DeepseekV3

_NUM_TOKENS = BLOCK_TOKENS + 6
_NUM_COMPARED = 4
_TEXT_BLOCKS, _NEIGHBOUR_BLOCK = (0, 1), 2


class NotInvariantError(RuntimeError):
    """The same tokens gave different bits in different company: the mode cannot be offered."""


def canary(model: DeepseekV3) -> None:
    """Compute one text in one chunk beside a neighbour, and again token by token alone.

    Costs about two short prefills and a few decode steps. Raises NotInvariantError when a logit
    of the last tokens differs in any bit.
    """
    ids = [(7 * i + 3) % model.config.vocab_size for i in range(_NUM_TOKENS)]
    together = _run(model, [ids], neighbour=ids[:5])
    head = ids[:-_NUM_COMPARED]
    alone = _run(model, [head, *([token] for token in ids[-_NUM_COMPARED:])], neighbour=[])
    if not torch.equal(together, alone):
        differing = int((together != alone).sum())
        raise NotInvariantError(
            f"batch-invariant mode does not hold on this machine: {differing} of "
            f"{together.numel()} logits depend on the batch (largest difference "
            f"{float((together - alone).abs().max()):.2e}); start without --batch-invariant, "
            "or with one thread"
        )


def _run(model: DeepseekV3, chunks: list[list[int]], neighbour: list[int]) -> Tensor:
    """Return the logits of the last tokens of the concatenated chunks."""
    cache = LatentCache(
        num_layers=model.config.num_layers,
        num_blocks=3,
        row_width=model.config.cache_row_width,
        dtype=model.dtype,
        device=str(model.device),
    )
    hidden, start = [], 0
    for chunk in chunks:
        batch = _batch(chunk, start, neighbour)
        hidden.append(model.forward(batch, cache)[len(neighbour) :])
        start += len(chunk)
    return model.logits(torch.cat(hidden)[-_NUM_COMPARED:])


def _batch(chunk: list[int], start: int, neighbour: list[int]) -> ForwardBatch:
    """Put the neighbour first, then `chunk` at position `start` of the text."""
    positions = [*range(len(neighbour)), *range(start, start + len(chunk))]
    blocks = [_NEIGHBOUR_BLOCK] * len(neighbour)
    blocks += [_TEXT_BLOCKS[p // BLOCK_TOKENS] for p in positions[len(neighbour) :]]
    return ForwardBatch(
        token_ids_T=torch.tensor(neighbour + chunk),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(
            [b * BLOCK_TOKENS + p % BLOCK_TOKENS for b, p in zip(blocks, positions, strict=True)]
        ),
        query_start_B1=torch.tensor(
            [0, len(neighbour), len(neighbour) + len(chunk)], dtype=torch.int32
        ),
        context_lens_B=torch.tensor([len(neighbour), start + len(chunk)], dtype=torch.int32),
        block_tables_BM=torch.tensor([[_NEIGHBOUR_BLOCK, 0], _TEXT_BLOCKS], dtype=torch.int32),
        max_query_tokens=max(len(chunk), len(neighbour)),
    )
