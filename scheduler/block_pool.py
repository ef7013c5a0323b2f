"""The block pool: who holds which cache block, and which cached text gives way for a new one.

A block is in exactly one state: free, owned (it has references) or cached (it has none, but the
prefix tree knows its text). `free + cached + owned = total`.

    allocate: free -> owned, or cached -> owned (evicts the least recently used leaf of the tree)
    acquire:  cached -> owned, or one more reference
    release:  one reference less; the last one: owned -> cached if the tree knows it, else -> free
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from whalepod.scheduler.prefix import Node, PrefixTree


class OutOfBlocks(Exception):
    """Nothing is free and nothing can be evicted; callers ask `num_available` first."""


class BlockPool:
    """Owns reference counts and states of `num_blocks` blocks. Raises ValueError below 1."""

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        if num_blocks < 1:
            raise ValueError(f"the cache needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.tree = tree
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._nodes: list[Node | None] = [None] * num_blocks
        # (last_used, block) of leaves without references; entries that no longer hold are skipped
        self._evictable: list[tuple[int, int]] = []
        self._clock = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones, whose texts may go."""
        return len(self._free) + self.num_cached

    @property
    def num_owned(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def free_blocks(self) -> tuple[int, ...]:
        """List the blocks whose rows mean nothing any more."""
        return tuple(self._free)

    def allocate(self) -> int:
        """Take a block with one reference. Raises OutOfBlocks."""
        if not self._free:
            self._evict()
        block_id = self._free.pop()
        self._refs[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """Add a reference to an owned or cached block."""
        if self._refs[block_id] == 0:
            assert self._nodes[block_id] is not None, f"block {block_id} is free"
            self.num_cached -= 1
        self._refs[block_id] += 1

    def release(self, block_id: int) -> None:
        """Give back a reference."""
        self._refs[block_id] -= 1
        refs = self._refs[block_id]
        assert refs >= 0, f"block {block_id} has {refs} references after a release"
        if refs:
            return
        node = self._nodes[block_id]
        if node is None:
            self._free.append(block_id)
            return
        self.num_cached += 1
        self._clock += 1
        node.last_used = self._clock
        self._offer(node)

    def cache(
        self, parent: Node, token_ids: tuple[int, ...], key: bytes, block_id: int
    ) -> Node | None:
        """Let others share a full block; returns its node, or None when the hash is taken.

        If the text is cached in another block already, the caller's reference moves over to that
        block and its own is given back: every holder of a text holds the same blocks, so a cached
        block never has an owned one after it and can always be evicted in the end.
        """
        num_tokens, size = len(token_ids), self.tree.block_tokens
        assert num_tokens == size, f"block {block_id} has {num_tokens} tokens, a full one {size}"
        existing = self.tree.find(key)
        if existing is not None:
            if existing.parent is not parent or existing.token_ids != token_ids:
                return None
            self.acquire(existing.block_id)
            self.release(block_id)
            return existing
        return self._insert(parent, token_ids, key, block_id)

    def cache_partly(self, parent: Node, token_ids: tuple[int, ...], block_id: int) -> None:
        """Let others copy the first rows of a block that its owner is about to release."""
        _, num_covered = self.tree.match_partly(parent, token_ids)
        if num_covered < len(token_ids):
            self._insert(parent, token_ids, b"", block_id)

    def _insert(self, parent: Node, token_ids: tuple[int, ...], key: bytes, block_id: int) -> Node:
        assert self._nodes[block_id] is None, f"block {block_id} has a text already"
        assert self._refs[block_id] > 0, f"block {block_id} has no owner to cache it"
        node = self.tree.insert(parent, token_ids, key, block_id)
        self._nodes[block_id] = node
        leaf = self.tree.covered_leaf(node)
        if leaf is not None and self._refs[leaf.block_id] == 0:
            self._forget(leaf)
        return node

    def _offer(self, node: Node) -> None:
        """Note that a node may be evicted, if it is a leaf without references."""
        if node.children or self._refs[node.block_id]:
            return
        heappush(self._evictable, (node.last_used, node.block_id))
        if len(self._evictable) > 4 * self.num_blocks + 64:
            self._evictable = [entry for entry in self._evictable if self._holds(entry)]
            heapify(self._evictable)

    def _holds(self, entry: tuple[int, int]) -> bool:
        last_used, block_id = entry
        node = self._nodes[block_id]
        is_idle = node is not None and self._refs[block_id] == 0 and not node.children
        return is_idle and node is not None and node.last_used == last_used

    def _evict(self) -> None:
        while self._evictable:
            entry = heappop(self._evictable)
            if self._holds(entry):
                node = self._nodes[entry[1]]
                assert node is not None
                self._forget(node)
                return
        raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")

    def forget_cached(self) -> int:
        """Turn all cached blocks into free ones; return how many. Texts of live requests stay."""
        num_forgotten = self.num_cached
        while self.num_cached:
            self._evict()
        return num_forgotten

    def _forget(self, node: Node) -> None:
        """Turn a cached leaf into a free block."""
        self.tree.remove(node)
        self._nodes[node.block_id] = None
        self.num_cached -= 1
        self._free.append(node.block_id)
        parent = node.parent
        if parent is not None and parent.parent is not None:
            self._offer(parent)

    def check(self, holders: Sequence[int]) -> None:
        """Compare every count with a fresh one; `holders` lists each held block once a holder.

        Raises AssertionError with both values.
        """
        expected = [0] * self.num_blocks
        for block_id in holders:
            expected[block_id] += 1
        for block_id, refs in enumerate(expected):
            found = self._refs[block_id]
            assert found == refs, f"block {block_id}: {found} references, {refs} holders"
        self._check_states()
        self._check_tree()

    def _check_states(self) -> None:
        free = sorted(self._free)
        without_text = [
            i for i in range(self.num_blocks) if self._refs[i] == 0 and self._nodes[i] is None
        ]
        assert free == without_text, f"free list {free}, unused blocks {without_text}"
        num_cached = sum(
            1 for i in range(self.num_blocks) if self._refs[i] == 0 and self._nodes[i] is not None
        )
        assert self.num_cached == num_cached, f"{self.num_cached} cached, counted {num_cached}"
        num_owned = sum(1 for refs in self._refs if refs)
        total = len(free) + num_cached + num_owned
        assert total == self.num_blocks, f"blocks add up to {total}, there are {self.num_blocks}"

    def _check_tree(self) -> None:
        num_nodes = 0
        entries = {entry for entry in self._evictable if self._holds(entry)}
        for node in self.tree.nodes():
            num_nodes += 1
            block_id = node.block_id
            assert self._nodes[block_id] is node, f"block {block_id} has another node"
            if self._refs[block_id]:
                continue
            held = [child.block_id for child in node.children if self._refs[child.block_id]]
            assert not held, f"cached block {block_id} cannot be evicted: {held} after it are held"
            if not node.children:
                entry = (node.last_used, block_id)
                assert entry in entries, f"cached leaf {block_id} is not in {sorted(entries)}"
        num_known = sum(1 for node in self._nodes if node is not None)
        assert num_nodes == num_known, f"{num_nodes} nodes in the tree, {num_known} known"
