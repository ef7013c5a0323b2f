"""Which blocks a running sequence holds, from its admission to its end."""

from __future__ import annotations

from whalepod.scheduler.admission import PrefixHit
from whalepod.scheduler.blocks import BlockPool
from whalepod.scheduler.plan import BlockCopy
from whalepod.scheduler.prefix import Node, PrefixTree
from whalepod.scheduler.request import Sequence


class KVCacheManager:
    """Moves sequences into and out of the block pool and shares their blocks through the tree.

    A sequence's leading full blocks are nodes of the tree (its `path`), held by it and by
    everyone with the same text; the blocks behind them are its own.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, num_lookback_tokens: int = 0) -> None:
        """num_lookback_tokens: as Scheduler."""
        self.pool = pool
        self._num_lookback_tokens = num_lookback_tokens
        self.tree = tree
        self.block_tokens = tree.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def hold(self, hit: PrefixHit) -> None:
        """Keep what was found in the cache from being evicted."""
        for block_id in hit.block_ids:
            self.pool.acquire(block_id)
        if hit.copy_source is not None:
            self.pool.acquire(hit.copy_source)

    def release(self, hit: PrefixHit) -> None:
        self.drop_copy(hit)
        for block_id in reversed(hit.block_ids):
            self.pool.release(block_id)

    def drop_copy(self, hit: PrefixHit) -> None:
        """Do without the partly matching block, which may have to give way itself."""
        if hit.copy_source is not None:
            self.pool.release(hit.copy_source)
            hit.copy_source, hit.num_copied_tokens = None, 0

    def enter(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Hand over what is held, and allocate the rest of the sequence's blocks."""
        sequence.block_ids = hit.block_ids
        sequence.path = hit.path
        sequence.block_keys[: len(hit.path)] = [node.key for node in hit.path]
        sequence.is_shared = hit.is_shared
        num_shared_tokens = len(hit.block_ids) * self.block_tokens
        num_copied_tokens = max(hit.num_copied_tokens - self._num_lookback_tokens, 0)
        sequence.num_computed = num_shared_tokens + num_copied_tokens
        num_shared_blocks = len(hit.block_ids)
        self.extend(sequence, len(sequence.token_ids))
        if hit.copy_source is not None:
            sequence.pending_copy = BlockCopy(
                source=hit.copy_source,
                target=sequence.block_ids[num_shared_blocks],
                num_tokens=hit.num_copied_tokens,
            )

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens`; False when the pool has too few."""
        while len(sequence.block_ids) * self.block_tokens < num_tokens:
            if not self.pool.num_available:
                return False
            sequence.block_ids.append(self.pool.allocate())
            sequence.block_table = ()
        return True

    def trim(self, sequence: Sequence) -> None:
        """Return the blocks of drafts that were not accepted."""
        num_blocks = self.num_blocks(len(sequence.token_ids))
        while len(sequence.block_ids) > num_blocks:
            self.pool.release(sequence.block_ids.pop())
            sequence.block_table = ()

    def block_table(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the blocks as a value; rebuilt only when they changed."""
        if not sequence.block_table:
            sequence.block_table = tuple(sequence.block_ids)
        return sequence.block_table

    def note_copied(self, sequence: Sequence) -> None:
        """The step with the sequence's copy succeeded: its source is not needed any more."""
        if sequence.pending_copy is not None:
            self.pool.release(sequence.pending_copy.source)
            sequence.pending_copy = None

    def cache(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full now."""
        size, path = self.block_tokens, sequence.path
        while sequence.is_shared and (len(path) + 1) * size <= sequence.num_computed:
            index = len(path)
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = self._last_node(sequence)
            if index == len(sequence.block_keys):
                sequence.block_keys.append(self.tree.key(parent, token_ids))
            key, block_id = sequence.block_keys[index], sequence.block_ids[index]
            node = self.pool.cache(parent, token_ids, key, block_id)
            if node is None:  # another text has the same hash
                sequence.is_shared = False
                return
            if node.block_id != block_id:
                sequence.block_ids[index] = node.block_id
                sequence.block_table = ()
            path.append(node)

    def leave(self, sequence: Sequence, *, keep_text: bool) -> None:
        """Release everything; `keep_text`: the rows of the last, partly filled block may serve
        later requests too."""
        if keep_text and sequence.is_shared:
            self._cache_partly(sequence)
        if sequence.pending_copy is not None:
            self.pool.release(sequence.pending_copy.source)
        for block_id in reversed(sequence.block_ids):
            self.pool.release(block_id)
        sequence.forget_blocks()

    def _cache_partly(self, sequence: Sequence) -> None:
        start = len(sequence.path) * self.block_tokens
        # before its copy is made, the block has no valid rows
        if sequence.num_computed > start and sequence.pending_copy is None:
            token_ids = tuple(sequence.token_ids[start : sequence.num_computed])
            block_id = sequence.block_ids[len(sequence.path)]
            self.pool.cache_partly(self._last_node(sequence), token_ids, block_id)

    def _last_node(self, sequence: Sequence) -> Node:
        if sequence.path:
            return sequence.path[-1]
        return self.tree.root(sequence.request.cache_salt)
