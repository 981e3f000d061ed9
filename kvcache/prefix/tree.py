"""The blocks that a prefix cache knows, as a tree: a node is a block of tokens behind those of its parent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter

from kvcache.prefix.keys import common_tokens, count_tokens

__all__ = ["Node", "Nodes", "place_of"]

_content = attrgetter("content")


class Node:
    """A block of tokens, whose rows a retained sequence of the cache holds, unless they were evicted.

    Attributes
    ----------
    key, content : bytes
        The key of the block, and its tokens: `kvcache.prefix.keys`.
    parent : Node or None
        The block before; None: the root, which has no tokens.
    seq_id : int
        The retained sequence with its rows.
    begin, end : int
        Positions of its first token, and behind its last.
    children : list of Node
        By rising content; no two have the same.
    num_pins : int
        How often it was pinned.
    """

    __slots__ = ("begin", "children", "content", "end", "key", "num_pins", "parent", "seq_id")

    def __init__(self, key: bytes, content: bytes, parent: Node | None, seq_id: int) -> None:
        self.key = key
        self.content = content
        self.parent = parent
        self.seq_id = seq_id
        self.begin: int = parent.end if parent else 0
        self.end: int = self.begin + count_tokens(content) if parent else 0
        self.children: list[Node] = []
        self.num_pins = 0

    def below(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            yield node


def place_of(parent: Node, content: bytes) -> int:
    """Return the index of the child with a content, or where it would be: there may be very many."""
    return bisect_left(parent.children, content, key=_content)


class Nodes:
    """All nodes, by their keys."""

    def __init__(self, root_key: bytes) -> None:
        self.root = Node(root_key, b"", None, 0)
        self.by_key: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def walk(self, keys: Sequence[bytes]) -> list[Node]:
        """Return the nodes of the first keys, up to one that is not known."""
        path = []
        for key in keys:
            node = self.by_key.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def similar(self, parent: Node, content: bytes) -> list[tuple[Node, int]]:
        """Return children that have most tokens in common with a block at their beginning, and how many: one or two."""
        at = place_of(parent, content)
        neighbours = parent.children[max(at - 1, 0) : at + 1]  # in order of content: one of these has most
        found = [(child, common_tokens(child.content, content)) for child in neighbours]
        most = max((common for _, common in found), default=0)
        return [(child, common) for child, common in found if most and common == most]

    def add(self, key: bytes, content: bytes, parent: Node, seq_id: int) -> Node:
        """Add a node that is not known."""
        node = Node(key, content, parent, seq_id)
        parent.children.insert(place_of(parent, content), node)
        self.by_key[key] = node
        return node

    def remove(self, node: Node) -> list[Node]:
        """Remove a node with all that lies below it; return these nodes."""
        removed = list(node.below())
        for one in removed:
            del self.by_key[one.key]
        if node.parent is not None:
            del node.parent.children[place_of(node.parent, node.content)]
        return removed

    def contains(self, node: Node) -> bool:
        """Return whether a node is one of these still."""
        return node is self.root or self.by_key.get(node.key) is node
