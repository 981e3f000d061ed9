"""Sequences that prompts have acquired: the blocks that they fill are retained, for prompts to come."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache import _core
from kvcache.errors import CacheBusyError
from kvcache.prefix.fetching import Fetching
from kvcache.prefix.keys import count_tokens
from kvcache.prefix.tree import Node, Tree

__all__ = ["Sessions"]


@dataclass(eq=False)
class Session:
    """A sequence that was acquired: what its tokens are known to be, and which of its blocks are retained."""

    keys: list[bytes]  # of the full blocks of the prompt
    contents: list[bytes]
    path: list[Node]  # nodes of its first blocks
    retained_to: int  # position up to which its blocks were retained, or known before
    pending: dict[int, int] = field(default_factory=dict)  # by block: retained sequences whose tokens are not known yet
    exact_to: int = _core.INT32_MAX  # marked while the sequence held nothing


class Sessions:
    """The sessions of a prefix cache, by sequence; the `Listener` of its `Watch`. Use it with the lock held."""

    def __init__(self, tree: Tree, fetching: Fetching) -> None:
        self._core, self._watch, self._block_size = tree.core, tree.watch, tree.block_size
        self._tree, self._fetching = tree, fetching
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, seq_id: int, keys: list[bytes], contents: list[bytes], limit: int) -> int:
        """Begin a sequence with what is known of a prompt, up to a position; return how many tokens that are."""
        path = self._tree.walk(keys)
        while path and not self._tree.is_alive(path[-1]):
            path.pop()  # it would hide those that begin alike
        found, end = self._tree.with_similar(path, contents)
        matched = _core.attach(self._core, [node.seq_id for node in found], seq_id, min(end, limit))
        known = matched // self._block_size
        self._by_id[seq_id] = Session(keys, contents[: len(keys)], path[:known], known * self._block_size)
        return matched

    def keep(self, seq_id: int, keys: list[bytes], contents: list[bytes], length: int) -> list[Node]:
        """Keep the blocks of a sequence below a position as nodes; return their path."""
        session = self._by_id.get(seq_id)
        pending = {} if session is None else session.pending
        path: list[Node] = []
        for i, (key, content) in enumerate(zip(keys, contents, strict=True)):
            begin = i * self._block_size
            end = begin + count_tokens(content)
            if end > length:
                break
            node = self._tree.by_key.get(key)
            retained = pending.pop(i, None)
            if retained is None and (node is None or not self._tree.is_alive(node)):
                retained = self._retain(seq_id, begin, end)
                if retained is None:
                    break
            if retained is not None:
                node = self._tree.add(key, content, path[-1] if path else self._tree.root, retained)
            assert node is not None
            path.append(node)
        return path

    def clear(self) -> None:
        """Forget the blocks of all sequences, which were dropped; the sequences stay."""
        for session in self._by_id.values():
            session.path.clear()
            session.keys.clear()
            self._drop_pending(session, 0)

    def start_over(self) -> None:
        """Forget all blocks, whose rows are dropped; those of sequences in use are retained again."""
        self._tree.start_over()
        for session in self._by_id.values():
            session.path, session.pending, session.retained_to = [], {}, 0

    def drop_all(self) -> None:
        """Drop the rows of a prefix cache that is no more."""
        if self._core.closed:
            return
        for node in list(self._tree.by_key.values()):  # a commit of another thread may go on with both
            self._core.clear(node.seq_id)
        for session in list(self._by_id.values()):
            self._drop_pending(session, 0)

    # ---- what the watch says

    def fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Retain the blocks that a batch fills, which is open yet; of each of its sequences, where its tokens stand."""
        for seq_id in self._by_id.keys() & ranges.keys():
            session, (begin, end) = self._by_id[seq_id], ranges[seq_id]
            if begin < session.retained_to:
                self._roll_back(session, begin)
            if session.exact_to < end:
                self._core.mark_inexact(seq_id, session.exact_to)
            end = min(end, self._core.exact_to(seq_id))
            while session.retained_to + self._block_size <= end and self._retain_next(seq_id, session):
                session.retained_to += self._block_size

    def undo_fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Drop the blocks that were retained of a batch which could not be committed."""
        for seq_id in self._by_id.keys() & ranges.keys():
            session, (begin, _) = self._by_id[seq_id], ranges[seq_id]
            full = begin // self._block_size
            del session.path[full:]
            session.retained_to = min(session.retained_to, full * self._block_size)
            self._drop_pending(session, begin)
        for node in self._tree.new:
            if node in self._tree:
                self._tree.drop(node)
        self._tree.new.clear()

    def filled(self) -> None:
        """Queue the new blocks, whose rows are there now, to be written to the store."""
        self._fetching.store_new()

    def edited(self, seq_id: int | None, position: int) -> None:
        """Note that rows of a sequence from a position on were changed; None: all sequences are gone."""
        for one in list(self._by_id) if seq_id is None else {seq_id} & self._by_id.keys():
            if self._core.next_position(one):
                self._roll_back(self._by_id[one], position)
            else:
                self._drop_pending(self._by_id.pop(one), 0)

    def note_inexact(self, seq_id: int, position: int) -> None:
        """Mark the rows of a sequence from a position on as inexact; of one that holds nothing yet, once it does.

        The core knows no sequence without rows.
        """
        self._core.mark_inexact(seq_id, position)
        session = self._by_id.get(seq_id)
        if session is not None and not self._core.next_position(seq_id):
            session.exact_to = min(position, session.exact_to)

    # ---- blocks

    def _retain(self, seq_id: int, begin: int, end: int) -> int | None:
        """Retain rows of a sequence; return the retained sequence, or None if there is no memory for it now."""
        retained = self._watch.new_retained()
        try:
            _core.retain(self._core, seq_id, retained, begin, end)
        except (MemoryError, CacheBusyError):  # busy: its keys are being rewritten
            return None
        return retained

    def _retain_next(self, seq_id: int, session: Session) -> bool:
        """Retain the next block of a sequence; return False if that cannot be now."""
        i, begin = session.retained_to // self._block_size, session.retained_to
        retained = self._retain(seq_id, begin, begin + self._block_size)
        if retained is None:
            return False
        parent = session.path[i - 1] if 0 < i <= len(session.path) else self._tree.root
        if i == len(session.path) and i < len(session.keys) and parent in self._tree:
            session.path.append(self._tree.add(session.keys[i], session.contents[i], parent, retained))
        else:
            session.pending[i] = retained
        return True

    def _roll_back(self, session: Session, position: int) -> None:
        """Note that the tokens of a sequence from a position on are not those that were retained of it."""
        full = position // self._block_size
        del session.keys[full:], session.contents[full:], session.path[full:]
        session.retained_to = min(session.retained_to, full * self._block_size)
        self._drop_pending(session, position)

    def _drop_pending(self, session: Session, position: int) -> None:
        """Drop retained blocks of unknown tokens that end behind a position."""
        for i in list(session.pending):
            if (i + 1) * self._block_size > position and (retained := session.pending.pop(i, None)) is not None:
                self._core.clear(retained)
