"""Who drafts with the modules of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.models.cache import LatentCache
from whalepod.mtp.chain import ChainDrafter
from whalepod.mtp.interface import BatchSource, Drafter, DraftModel
from whalepod.mtp.single import SingleDrafter


def new_drafter(
    modules: Sequence[DraftModel], cache: LatentCache, batches: BatchSource, *, hidden_size: int
) -> Drafter:
    """Return the drafter of one module or of several."""
    if len(modules) == 1:
        return SingleDrafter(modules[0], cache, batches, hidden_size=hidden_size)
    return ChainDrafter(modules, cache, batches, hidden_size=hidden_size)
