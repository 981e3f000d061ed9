"""The blocks that a prefix cache knows, as a tree: a node is a block of tokens behind those of its parent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from kvcache import _core
from kvcache.prefix.keys import common_tokens, count_tokens
from kvcache.prefix.rows import Rows
from kvcache.prefix.watch import watch_of

if TYPE_CHECKING:
    from kvcache.cache import KVCache

__all__ = ["Node", "Tree"]

FEW_BLOCKS = 64  # the tree forgets evicted blocks when it has at least this many

_content = attrgetter("content")


class Node:
    """A block of tokens, whose rows a retained sequence of the cache holds, unless they were evicted."""

    __slots__ = ("begin", "children", "content", "end", "key", "num_pins", "parent", "seq_id")

    def __init__(self, key: bytes, content: bytes, parent: Node | None, seq_id: int) -> None:
        self.key, self.content = key, content  # of the block, and its tokens: `kvcache.prefix.keys`
        self.parent = parent  # the block before; None: the root, which has no tokens
        self.seq_id = seq_id  # the retained sequence with its rows
        self.begin: int = parent.end if parent else 0  # positions of its first token, and behind its last
        self.end: int = self.begin + count_tokens(content) if parent else 0
        self.children: list[Node] = []  # by rising content; no two have the same
        self.num_pins = 0

    def below(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            yield node


class Tree:
    """All nodes, and whether their rows are there: they may be evicted at any time. Use it with the watch's lock."""

    def __init__(self, cache: KVCache, root_key: bytes) -> None:
        self.core, self.watch, self.rows, self.block_size = cache._core, watch_of(cache), Rows(cache), cache.block_size
        self.root = Node(root_key, b"", None, 0)
        self.by_key: dict[bytes, Node] = {}  # all but the root
        self.new: list[Node] = []  # added since the last `take_new`, and not from a store
        self._sweep_at = FEW_BLOCKS

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, node: Node) -> bool:
        return node is self.root or self.by_key.get(node.key) is node

    def walk(self, keys: Sequence[bytes]) -> list[Node]:
        """Return the nodes of the first keys, up to one that is not known."""
        path = []
        for key in keys:
            node = self.by_key.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def is_alive(self, node: Node) -> bool:
        """Return whether a node's rows, or some of them, are there."""
        return self.core.seq_len(node.seq_id, None) > 0

    def alive(self, path: Sequence[Node]) -> list[Node]:
        """Return the first nodes of a path, up to one whose rows are gone."""
        return list(takewhile(self.is_alive, path))

    def is_complete(self, node: Node) -> bool:
        """Return whether all of a node's rows are there."""
        return self.rows.are_complete(node.seq_id, node.end - node.begin)

    def similar(self, parent: Node, content: bytes) -> list[tuple[Node, int]]:
        """Return children that have most tokens in common with a block at their beginning, and how many: one or two."""
        found = [(child, common_tokens(child.content, content)) for child in self._neighbours(parent, content)]
        most = max((common for _, common in found), default=0)
        return [(child, common) for child, common in found if most and common == most]

    def _neighbours(self, parent: Node, content: bytes) -> list[Node]:
        """Return the children beside a content in order, one of which has most in common; forget evicted ones."""
        while True:
            at = _place_of(parent, content)
            neighbours = parent.children[max(at - 1, 0) : at + 1]
            evicted = [child for child in neighbours if not self.is_alive(child)]
            if not evicted:
                return neighbours
            for child in evicted:
                self.drop(child)

    def with_similar(self, path: list[Node], contents: list[bytes]) -> tuple[list[Node], int]:
        """Add the node whose first tokens are those of the next block to a path, if there is one.

        Return the path, and the number of tokens that it and the blocks have in common.
        """
        last = path[-1] if path else self.root
        similar = self.similar(last, contents[len(path)]) if len(path) < len(contents) else []
        if not similar:
            return path, last.end
        child, common = next((pair for pair in similar if self.is_complete(pair[0])), similar[0])
        return [*path, child], last.end + common

    def add(self, key: bytes, content: bytes, parent: Node, seq_id: int, is_stored: bool = False) -> Node:
        """Add a block that a retained sequence holds; if it is known already, keep the one that has more rows."""
        node = self.by_key.get(key)
        if node is None:
            node = self.by_key[key] = Node(key, content, parent, seq_id)
            parent.children.insert(_place_of(parent, content), node)
        elif self.is_alive(node) and self.is_complete(node):
            self.core.clear(seq_id)
            return node
        else:
            self.core.clear(node.seq_id)
            node.seq_id = seq_id
            for _ in range(node.num_pins):
                _core.pin(self.core, [seq_id], True)
        if is_stored:
            self._drop_beginnings(node)
        else:
            self.new.append(node)
        return node

    def take_new(self) -> list[Node]:
        """Return the new blocks, now that their rows are there to stay, and drop what they take the place of."""
        new, self.new = [node for node in self.new if node in self], []
        for node in new:
            self._drop_beginnings(node)
        return new

    def _drop_beginnings(self, node: Node) -> None:
        """Drop short blocks that another one begins with."""
        parent = node.parent or self.root
        at = _place_of(parent, node.content)
        while at:
            other = parent.children[at - 1]
            if common_tokens(other.content, node.content) < other.end - other.begin or other.children or other.num_pins:
                break
            self.drop(other)
            at -= 1

    def drop(self, node: Node) -> None:
        """Forget a block and all that build on it, and drop their rows."""
        for one in list(node.below()):
            del self.by_key[one.key]
            self.core.clear(one.seq_id)
            one.children.clear()  # with their parent, they would wait for the garbage collector
        if node.parent is not None:
            del node.parent.children[_place_of(node.parent, node.content)]

    def start_over(self) -> None:
        """Forget all blocks, whatever state they are in; their rows stay."""
        self.root.children.clear()
        self.by_key.clear()
        self.new.clear()

    def sweep(self) -> None:
        """Forget blocks that were evicted, once there are twice as many blocks as were left the last time."""
        if len(self) < self._sweep_at:
            return
        retained = set(_core.retained(self.core))
        for node in list(self.by_key.values()):
            if node.seq_id not in retained and node in self:
                self.drop(node)
        self._sweep_at = max(2 * len(self), FEW_BLOCKS)


def _place_of(parent: Node, content: bytes) -> int:
    """Return the index of the child with a content, or where it would be: there may be very many."""
    return bisect_left(parent.children, content, key=_content)
