"""Find tokens of a prompt among blocks that follow other tokens, or stand at other positions."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.prefix.keys import INT_SIZE, INTEGERS
from kvcache.prefix.nodes import Node, Nodes

__all__ = ["Chunk", "Chunks"]


@dataclass(frozen=True)
class Chunk:
    """Tokens of consecutive nodes: so many, from the position `begin` on."""

    nodes: list[Node]
    begin: int
    num_tokens: int


class Chunks:
    """The known blocks by their own tokens, whatever comes before them.

    Parameters
    ----------
    nodes : Nodes
        The known blocks.
    contents : list of bytes
        The prompt's blocks. Chunks of it are found among 64-bit integers only.
    block_size : int
        The number of tokens in a block.
    """

    def __init__(self, nodes: Nodes, contents: list[bytes], block_size: int) -> None:
        self._nodes = nodes
        whole = len(INTEGERS) + INT_SIZE * block_size
        self._by_content = {node.content: node for node in nodes.by_key.values() if len(node.content) == whole}
        self._size = INT_SIZE * block_size
        plain = all(content.startswith(INTEGERS) for content in contents)
        self._prompt = b"".join(content[len(INTEGERS) :] for content in contents) if plain else b""

    def find(self, position: int) -> Chunk | None:
        """Return the longest chunk of the prompt that begins at a position; None if there is none."""
        rest = self._prompt[INT_SIZE * position :]
        found = (self._find_at(rest, skipped) for skipped in range(0, self._size, INT_SIZE))
        return max(filter(None, found), key=lambda chunk: chunk.num_tokens, default=None)

    def _find_at(self, rest: bytes, skipped: int) -> Chunk | None:
        """Return a chunk that begins with the last `skipped` bytes of one block, and goes on with a whole one."""
        node = self._by_content.get(INTEGERS + rest[skipped : skipped + self._size])
        if node is None or node.parent is None or not node.parent.content.endswith(rest[:skipped]):
            return None
        nodes = [node.parent, node] if skipped else [node]
        begin, end, common = node.begin - skipped // INT_SIZE, skipped + self._size, self._size
        while common == self._size:
            similar = self._nodes.similar(nodes[-1], INTEGERS + rest[end : end + self._size])
            nodes += [child for child, _ in similar[:1]]
            common = INT_SIZE * similar[0][1] if similar else 0
            end += common
        return Chunk(nodes, begin, end // INT_SIZE)
