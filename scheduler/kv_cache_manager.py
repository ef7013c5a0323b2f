"""Which blocks a running sequence holds, from its admission to its end."""

from __future__ import annotations

from whalepod.scheduler.block_pool import BlockPool
from whalepod.scheduler.plan import BlockCopy
from whalepod.scheduler.prefix import Node, PrefixHit, PrefixTree
from whalepod.scheduler.request import Sequence


class KVCacheManager:
    """Gives sequences blocks of the pool and shares full ones through the tree.

    A sequence's leading full blocks are nodes of the tree (its `path`), held by it and by
    all sequences with the same text; the blocks after them are its own.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        *,
        enable_prefix_caching: bool = True,
        num_lookback_tokens: int = 0,
    ) -> None:
        """num_lookback_tokens: as Scheduler."""
        self.pool = pool
        self._tree = tree
        self.block_tokens = tree.block_tokens
        self._has_cache = enable_prefix_caching
        self._num_lookback_tokens = num_lookback_tokens

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    # -- what the cache has of a sequence -------------------------------------------------------

    def count_shared_blocks(self, sequence: Sequence) -> int:
        """Count the full blocks that the sequence would share if it were admitted now."""
        num_blocks = sequence.max_reused_tokens // self.block_tokens
        if _sibling_to_fork(sequence) is not None:
            return num_blocks
        if not self._has_cache:
            return 0
        version, count = sequence.shared_blocks_at
        if version != self._tree.version:
            salt, keys = sequence.request.cache_salt, sequence.block_keys
            count = self._tree.count_match(salt, sequence.token_ids, num_blocks, keys)
            sequence.note_shared_blocks(self._tree.version, count)
        return count

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Look up which leading tokens of a sequence need no computing, and hold their blocks."""
        hit = self._find_prefix(sequence)
        for block_id in hit.block_ids:
            self.pool.acquire(block_id)
        if hit.copy_source is not None:
            self.pool.acquire(hit.copy_source)
        return hit

    def _find_prefix(self, sequence: Sequence) -> PrefixHit:
        num_blocks, num_copied_tokens = divmod(sequence.max_reused_tokens, self.block_tokens)
        sibling = _sibling_to_fork(sequence)
        if sibling is not None:
            return PrefixHit(
                block_ids=sibling.block_ids[:num_blocks],
                path=sibling.path[:num_blocks],
                is_shared=sibling.is_shared,
                copy_source=sibling.block_ids[num_blocks] if num_copied_tokens else None,
                num_copied_tokens=num_copied_tokens,
            )
        if not self._has_cache:
            return PrefixHit(is_shared=False)
        salt, token_ids = sequence.request.cache_salt, sequence.token_ids
        path = self._tree.match(salt, token_ids, num_blocks, sequence.block_keys)
        start = len(path) * self.block_tokens
        stop = min(start + self.block_tokens, sequence.max_reused_tokens)
        parent = path[-1] if path else self._tree.root(salt)
        node, num_tokens = self._tree.match_partly(parent, token_ids[start:stop])
        hit = PrefixHit(block_ids=[node.block_id for node in path], path=path)
        # a copy of very few rows costs more than to compute them
        if node is not None and num_tokens >= max(1, self.block_tokens // 8):
            hit.copy_source, hit.num_copied_tokens = node.block_id, num_tokens
        return hit

    def release_hit(self, hit: PrefixHit) -> None:
        """Hold what was found no longer."""
        self.release_copy(hit)
        for block_id in reversed(hit.block_ids):
            self.pool.release(block_id)

    def release_copy(self, hit: PrefixHit) -> None:
        """Do without the partly matching block, which may have to give way itself."""
        if hit.copy_source is not None:
            self.pool.release(hit.copy_source)
            hit.copy_source, hit.num_copied_tokens = None, 0

    # -- from admission to end ------------------------------------------------------------------

    def start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Hand over what is held, and allocate the rest of the sequence's blocks."""
        num_shared_blocks = len(hit.block_ids)
        num_copied_tokens = max(hit.num_copied_tokens - self._num_lookback_tokens, 0)
        sequence.start(hit, num_shared_blocks * self.block_tokens + num_copied_tokens)
        self.extend(sequence, len(sequence.token_ids))
        if hit.copy_source is not None:
            target = sequence.block_ids[num_shared_blocks]
            sequence.await_copy(BlockCopy(hit.copy_source, target, hit.num_copied_tokens))

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens`; False when the pool has too few."""
        while len(sequence.block_ids) * self.block_tokens < num_tokens:
            if not self.pool.num_available:
                return False
            sequence.add_block(self.pool.allocate())
        return True

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks of drafts that were not accepted."""
        num_blocks = self.num_blocks(len(sequence.token_ids))
        while len(sequence.block_ids) > num_blocks:
            self.pool.release(sequence.pop_block())

    def finish_copy(self, sequence: Sequence) -> None:
        """Release the source of a copy: the step with it succeeded."""
        assert sequence.pending_copy is not None, f"{sequence.sequence_id} waits for no copy"
        self.pool.release(sequence.pending_copy.source)
        sequence.finish_copy()

    def cache(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full now."""
        size, path, keys = self.block_tokens, sequence.path, sequence.block_keys
        while sequence.is_shared and (len(path) + 1) * size <= sequence.num_computed:
            index = len(path)
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = self._last_node(sequence)
            if index == len(keys):
                keys.append(self._tree.key(parent, token_ids))
            node = self.pool.cache(parent, token_ids, keys[index], sequence.block_ids[index])
            if node is None:  # another text has the same hash
                sequence.stop_sharing()
                return
            sequence.add_shared_block(node)

    def release(self, sequence: Sequence, *, keep_text: bool) -> None:
        """Free a sequence's blocks; `keep_text`: the rows of the last, partly filled one may serve
        later requests too. The sequence is preempted, or ends, next."""
        if keep_text and sequence.is_shared:
            self._cache_partly(sequence)
        if sequence.pending_copy is not None:
            self.pool.release(sequence.pending_copy.source)
        for block_id in reversed(sequence.block_ids):
            self.pool.release(block_id)

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
        return self._tree.root(sequence.request.cache_salt)


def _sibling_to_fork(sequence: Sequence) -> Sequence | None:
    """Find a running sibling whose prompt is computed, if this sequence has only its prompt."""
    if not sequence.request.running or sequence.num_generated:
        return None
    if sequence.max_reused_tokens < sequence.num_prompt_tokens - 1:
        return None
    return sequence.request.find_prefilled()
