"""What a sequence finds in the cache when it is admitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from whalepod.scheduler.prefix import Node, PrefixTree
from whalepod.scheduler.request import Sequence


@dataclass(slots=True, kw_only=True)
class PrefixHit:
    """Blocks to share, and a block whose first rows are to be copied.

    `path` holds the tree nodes of the leading `block_ids` (of all of them, with a cache).
    """

    block_ids: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    is_shared: bool = True
    copy_source: int | None = None
    num_copied_tokens: int = 0


def may_start(sequence: Sequence) -> bool:
    """Say whether a sequence may be admitted: not while another answer of the same request
    computes the prompt, which it can share afterwards."""
    if not sequence.request.running or sequence.num_generated:
        return True
    return _sibling_with_prompt(sequence) is not None


def count_shared_blocks(sequence: Sequence, tree: PrefixTree, *, has_cache: bool) -> int:
    """Count the full blocks that the sequence would share if it were admitted now."""
    if _sibling_to_fork(sequence) is not None:
        return sequence.max_reused_tokens // tree.block_tokens
    if not has_cache:
        return 0
    if sequence.shared_blocks_at[0] != tree.version:
        num_blocks = sequence.max_reused_tokens // tree.block_tokens
        salt = sequence.request.cache_salt
        count = tree.count_match(salt, sequence.token_ids, num_blocks, sequence.block_keys)
        sequence.shared_blocks_at = (tree.version, count)
    return sequence.shared_blocks_at[1]


def find_prefix(sequence: Sequence, tree: PrefixTree, *, has_cache: bool) -> PrefixHit:
    """Look up which leading tokens of a sequence need no computing."""
    sibling = _sibling_to_fork(sequence)
    if sibling is not None:
        return _fork(sequence, sibling, tree.block_tokens)
    if not has_cache:
        return PrefixHit(is_shared=False)
    path = _match(sequence, tree)
    start = len(path) * tree.block_tokens
    stop = min(start + tree.block_tokens, sequence.max_reused_tokens)
    parent = path[-1] if path else tree.root(sequence.request.cache_salt)
    node, num_tokens = tree.match_partly(parent, sequence.token_ids[start:stop])
    hit = PrefixHit(block_ids=[node.block_id for node in path], path=path)
    # a copy of very few rows costs more than to compute them
    if node is not None and num_tokens >= max(1, tree.block_tokens // 8):
        hit.copy_source, hit.num_copied_tokens = node.block_id, num_tokens
    return hit


def _match(sequence: Sequence, tree: PrefixTree) -> list[Node]:
    num_blocks = sequence.max_reused_tokens // tree.block_tokens
    salt = sequence.request.cache_salt
    return tree.match(salt, sequence.token_ids, num_blocks, sequence.block_keys)


def _sibling_with_prompt(sequence: Sequence) -> Sequence | None:
    """Find a running sibling whose prompt is in the cache, not only about to be copied there."""
    num_prompt_tokens = sequence.num_prompt_tokens
    for sibling in sequence.request.running:
        if sibling.num_computed >= num_prompt_tokens and sibling.pending_copy is None:
            return sibling
    return None


def _sibling_to_fork(sequence: Sequence) -> Sequence | None:
    """Find a running sibling whose prompt is computed, if this sequence has only its prompt."""
    if not sequence.request.running or sequence.num_generated:
        return None
    if sequence.max_reused_tokens < sequence.num_prompt_tokens - 1:
        return None
    return _sibling_with_prompt(sequence)


def _fork(sequence: Sequence, sibling: Sequence, block_tokens: int) -> PrefixHit:
    num_blocks, num_copied_tokens = divmod(sequence.max_reused_tokens, block_tokens)
    return PrefixHit(
        block_ids=sibling.block_ids[:num_blocks],
        path=sibling.path[:num_blocks],
        is_shared=sibling.is_shared,
        copy_source=sibling.block_ids[num_blocks] if num_copied_tokens else None,
        num_copied_tokens=num_copied_tokens,
    )
