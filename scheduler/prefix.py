"""A tree of cached blocks: which texts have their rows in the cache already.

A node is one block of tokens after the path of its parents. Full blocks are found by a hash chain
over token ids, seed (model and weights) and salt; the tokens are compared too, so that a collision
of hashes costs a miss and never mixes two texts. A block that is filled or matched only in part is
found among the children of the last full match, and its first rows are copied.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Digest = Callable[[bytes], bytes]


def blake2b_digest(data: bytes) -> bytes:
    """Hash to 16 bytes; the tokens are compared on a hit, so more would buy nothing."""
    return hashlib.blake2b(data, digest_size=16).digest()


class Node:
    """A block of a cached text; a root (without tokens) stands for the empty text of a salt."""

    __slots__ = ("block_id", "children", "key", "last_used", "parent", "salt", "token_ids")

    def __init__(
        self,
        *,
        parent: Node | None,
        key: bytes,
        salt: str,
        token_ids: tuple[int, ...],
        block_id: int,
    ) -> None:
        self.parent = parent
        self.key = key
        self.salt = salt
        self.token_ids = token_ids
        self.block_id = block_id
        self.children: list[Node] = []  # ordered by token_ids
        self.last_used = 0


@dataclass(slots=True, kw_only=True)
class PrefixHit:
    """What the cache has of a text: blocks to share, and one whose first rows are to be copied.

    `path` holds the tree nodes of the leading `block_ids` (of all of them, with a cache).
    """

    block_ids: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    is_shared: bool = True
    copy_source: int | None = None
    num_copied_tokens: int = 0


def _token_ids(node: Node) -> tuple[int, ...]:
    return node.token_ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading tokens that two texts share."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class PrefixTree:
    """Owns the nodes; knows nothing of reference counts, which belong to the block pool."""

    def __init__(
        self, *, block_tokens: int, seed: bytes = b"", digest: Digest = blake2b_digest
    ) -> None:
        self.block_tokens = block_tokens
        self.version = 0  # grows with every change, so that a match can be remembered
        self._seed = seed
        self._digest = digest
        self._roots: dict[str, Node] = {}
        self._full_nodes: dict[bytes, Node] = {}

    def root(self, salt: str) -> Node:
        """Return the empty text of a salt; the tree keeps it from its first block to its last."""
        root = self._roots.get(salt)
        if root is not None:
            return root
        key = self._digest(len(self._seed).to_bytes(8, "little") + self._seed + salt.encode())
        return Node(parent=None, key=key, salt=salt, token_ids=(), block_id=-1)

    def key(self, parent: Node, token_ids: tuple[int, ...]) -> bytes:
        """Hash a full block after `parent`."""
        return self._digest(parent.key + array("Q", token_ids).tobytes())

    def match(
        self, salt: str, token_ids: Sequence[int], num_blocks: int, keys: list[bytes]
    ) -> list[Node]:
        """Find the longest path of full blocks equal to the first `num_blocks` of a text.

        `keys` remembers the text's hashes between calls; missing ones are appended.
        """
        path: list[Node] = []
        parent = self._roots.get(salt)
        while parent is not None and len(path) < num_blocks:
            node = self._child(parent, len(path), token_ids, keys)
            if node is None or node.token_ids != self._block(token_ids, len(path)):
                break
            path.append(node)
            parent = node
        return path

    def count_match(
        self, salt: str, token_ids: Sequence[int], num_blocks: int, keys: list[bytes]
    ) -> int:
        """Count the blocks that `match` would find, by their hashes alone: quick, and good enough
        to compare candidates."""
        count = 0
        parent = self._roots.get(salt)
        while parent is not None and count < num_blocks:
            parent = self._child(parent, count, token_ids, keys)
            count += parent is not None
        return count

    def _child(
        self, parent: Node, index: int, token_ids: Sequence[int], keys: list[bytes]
    ) -> Node | None:
        """Look up block `index` of a text after `parent`, by its hash."""
        if index == len(keys):
            keys.append(self.key(parent, self._block(token_ids, index)))
        node = self._full_nodes.get(keys[index])
        return node if node is not None and node.parent is parent else None

    def _block(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        size = self.block_tokens
        return tuple(token_ids[index * size : (index + 1) * size])

    def match_partly(self, parent: Node, token_ids: Sequence[int]) -> tuple[Node | None, int]:
        """Find the child of `parent` that shares most leading tokens, and how many.

        In the order of tokens the best child stands next to where the text itself would.
        """
        wanted = tuple(token_ids)
        index = bisect_left(parent.children, wanted, key=_token_ids)
        best, num_tokens = None, 0
        for child in parent.children[max(index - 1, 0) : index + 1]:
            shared = common_prefix(child.token_ids, wanted)
            if shared > num_tokens:
                best, num_tokens = child, shared
        return best, num_tokens

    def find(self, key: bytes) -> Node | None:
        return self._full_nodes.get(key)

    def insert(self, parent: Node, token_ids: tuple[int, ...], key: bytes, block_id: int) -> Node:
        """Add a full block (with its `key`) or a partly filled leaf (fewer tokens, key ignored)."""
        node = Node(
            parent=parent, key=key, salt=parent.salt, token_ids=token_ids, block_id=block_id
        )
        self.version += 1
        if parent.parent is None:
            assert self._roots.get(parent.salt, parent) is parent, "two roots of one salt"
            self._roots[parent.salt] = parent
        insort(parent.children, node, key=_token_ids)
        if len(token_ids) == self.block_tokens:
            self._full_nodes[key] = node
        return node

    def covered_leaf(self, node: Node) -> Node | None:
        """Return a partly filled sibling whose tokens are the beginning of `node`'s, if any."""
        assert node.parent is not None, "a root has no siblings"
        siblings = node.parent.children
        index = bisect_left(siblings, node.token_ids, key=_token_ids)
        if index == 0:
            return None
        leaf = siblings[index - 1]
        num_tokens = len(leaf.token_ids)
        is_partial = num_tokens < self.block_tokens
        return leaf if is_partial and leaf.token_ids == node.token_ids[:num_tokens] else None

    def remove(self, node: Node) -> None:
        """Forget a leaf; a root goes with its last child."""
        parent = node.parent
        assert parent is not None, "a root cannot be removed"
        assert not node.children, f"block {node.block_id} has {len(node.children)} children"
        index = bisect_left(parent.children, node.token_ids, key=_token_ids)
        assert parent.children[index] is node, f"block {node.block_id} is not in the tree"
        del parent.children[index]
        self.version += 1
        if len(node.token_ids) == self.block_tokens:
            del self._full_nodes[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack += node.children
