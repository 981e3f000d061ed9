"""Go on with tokens that were computed elsewhere: behind other tokens, or at other positions."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.errors import CacheFullError, NotSupportedError
from kvcache.prefix.keys import INT_SIZE, INTEGERS, are_integers
from kvcache.prefix.tree import Node, Tree

__all__ = ["Reuse"]


@dataclass(frozen=True)
class Chunk:
    """Tokens of consecutive nodes: so many, from the position `begin` on."""

    nodes: list[Node]
    begin: int
    num_tokens: int


class Chunks:
    """The known blocks by their own tokens, whatever comes before them.

    Chunks of a prompt, of these contents, are found among 64-bit integers only.
    """

    def __init__(self, tree: Tree, contents: list[bytes]) -> None:
        self._tree = tree
        self._size = INT_SIZE * tree.block_size
        whole = len(INTEGERS) + self._size
        self._by_content = {node.content: node for node in tree.by_key.values() if len(node.content) == whole}
        plain = all(map(are_integers, contents))
        self._prompt = b"".join(content[len(INTEGERS) :] for content in contents) if plain else b""

    def find(self, position: int) -> Chunk | None:
        """Return the longest chunk of the prompt that begins at a position; None if there is none."""
        rest = self._prompt[INT_SIZE * position :]
        found = (self._find_at(rest, skipped) for skipped in range(0, self._size, INT_SIZE))
        return max(filter(None, found), key=lambda chunk: chunk.num_tokens, default=None)

    def _find_at(self, rest: bytes, skipped: int) -> Chunk | None:
        """Return a chunk that begins with the last `skipped` bytes of one block, and goes on with a whole one."""
        node = self._by_content.get(INTEGERS + rest[skipped : skipped + self._size])
        if node is None or node.parent is None:
            return None
        before = node.parent.content
        if skipped and not (are_integers(before) and before.endswith(rest[:skipped])):
            return None
        nodes = [node.parent, node] if skipped else [node]
        begin, end, common = node.begin - skipped // INT_SIZE, skipped + self._size, self._size
        while common == self._size:
            similar = self._tree.similar(nodes[-1], INTEGERS + rest[end : end + self._size])
            nodes += [child for child, _ in similar[:1]]
            common = INT_SIZE * similar[0][1] if similar else 0
            end += common
        return Chunk(nodes, begin, end // INT_SIZE)


class Reuse:
    """Adds chunks of prompts to sequences, of at least so many tokens; None: never. Use it with the lock held."""

    def __init__(self, tree: Tree, least: int | None) -> None:
        self._core, self._watch, self._rows = tree.core, tree.watch, tree.rows
        self._tree, self._least = tree, least

    def extend(self, seq_id: int, contents: list[bytes], matched: int, limit: int) -> int:
        """Go on behind the exact match with tokens that were computed elsewhere; return how many match then."""
        if self._least is None or limit - matched < self._least:
            return matched
        chunks = Chunks(self._tree, contents)
        while (chunk := chunks.find(matched)) is not None:
            num_tokens = min(chunk.num_tokens, limit - matched)
            if num_tokens < self._least or not self._move(seq_id, chunk, matched, num_tokens):
                break
            matched += num_tokens
        return matched

    def _move(self, seq_id: int, chunk: Chunk, position: int, num_tokens: int) -> bool:
        """Add the rows of a chunk to a sequence at a position; return False, and do nothing, if they cannot be."""
        moved, begin, end = self._watch.new_retained(), chunk.begin, chunk.begin + num_tokens
        try:
            for node in chunk.nodes:
                if node.begin < end:
                    self._core.share_range(node.seq_id, moved, max(node.begin, begin), min(node.end, end))
            if not self._rows.are_complete(moved, num_tokens):
                return False
            self._core.shift(moved, 0, None, position - begin)
            self._core.share_range(moved, seq_id, position, position + num_tokens)
        except (NotSupportedError, CacheFullError, MemoryError):
            return False
        finally:
            self._core.clear(moved)
        return True
