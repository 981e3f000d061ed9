"""`PrefixCache`: finds the beginning of a prompt among the blocks that earlier sequences left behind."""

from __future__ import annotations

import time
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Self, SupportsFloat, SupportsIndex

from kvcache import _core
from kvcache.arguments import integer, to_float
from kvcache.cache import KVCache
from kvcache.errors import CacheBusyError, CacheFullError, NotSupportedError
from kvcache.policy import CrossAttention
from kvcache.prefix.chunks import Chunk, Chunks
from kvcache.prefix.keys import Keys, Tokens, blocks_of, count_tokens, identity_of
from kvcache.prefix.nodes import Node, Nodes, place_of
from kvcache.prefix.rows import Rows
from kvcache.prefix.watch import watch_of

if TYPE_CHECKING:
    from kvcache.stores.client import StoreClient, StoreStats

__all__ = ["PrefixCache", "PrefixStats"]

MOST_BLOCK_SIZE = 1024  # tokens; rows are found, kept and dropped by whole blocks
FETCH_BYTES = 64 << 20  # of blocks from the store that wait to be added
FEW_BLOCKS = 64  # names of blocks that were evicted; more are looked for and forgotten


@dataclass(frozen=True)
class PrefixStats:
    """What a prefix cache has done, and holds.

    Attributes
    ----------
    requests, hits : int
        Calls of `PrefixCache.acquire`, and those that found anything.
    tokens, matched : int
        The tokens that were asked for, and those of them that were there.
    reused : int
        Of these, the tokens that were computed elsewhere (`reuse_min_tokens`).
    fetched : int
        The tokens that came from the store.
    blocks : int
        The blocks that are known now; some may have been evicted.
    sequences : int
        The sequences that were acquired and not released yet.
    store : StoreStats or None
        What happened between this cache and its store; None without one.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    matched: int = 0
    reused: int = 0
    fetched: int = 0
    blocks: int = 0
    sequences: int = 0
    store: StoreStats | None = None


@dataclass(eq=False)
class Session:
    """A sequence that was acquired: what its tokens are known to be, and which of its blocks are retained."""

    keys: list[bytes]  # of the full blocks of the prompt
    contents: list[bytes]
    path: list[Node]  # nodes of its first blocks
    retained_to: int  # position up to which its blocks were retained, or known before
    pending: dict[int, int] = field(default_factory=dict)  # by block: retained sequences whose tokens are not known yet


class PrefixCache:
    """Keeps the rows of ended sequences, so that a prompt that begins like an earlier one computes only what follows.

    A request acquires a sequence for its prompt, feeds what was not matched, generates, and releases the sequence with
    all its tokens. Blocks of tokens stay behind, shared and not copied, until the memory is needed: then the least
    recently used are dropped, before any batch would raise `CacheFullError`.

    Parameters
    ----------
    cache : KVCache
        The cache, for more than one sequence (`max_sequences`) and in blocks of at most 1024 tokens (`block_size`),
        with the strategy "always" and without `CrossAttention`. Its `max_bytes` or `capacity` limits what is kept;
        without a limit, nothing is dropped by itself. Several prefix caches may share it, one for each tenant or model
        adapter.
    store : mutable mapping of str to bytes, optional
        Keeps blocks for other processes and machines as well: `kvcache.stores`. `acquire` waits for it, no longer than
        `timeout`; it is written in the background. A store that fails costs time only.
    salt : bytes, default b""
        The tenant. Blocks that were kept under one salt are not found under another, and whether they exist cannot be
        guessed. Keep it secret where tenants distrust each other.
    fingerprint : str
        What computes the rows: the model's name and revision, its weights' hash, an adapter. Rows of one fingerprint
        are never used for another.
    secret : bytes, optional
        The key of a MAC over each value in the store, of any length. Whoever can write to the store, but lacks it, can
        take values away but not put others in their place.
    reuse_min_tokens : int, optional
        If given, tokens that begin where the exact match ends are taken from wherever they were computed before, in
        another prompt or at another position, if they are at least so many in a row, and moved there, as by llama.cpp's
        ``--cache-reuse``. They are found if they span a whole block of the other prompt. This is an approximation,
        because these rows were computed behind other tokens; nothing that builds on them is kept. The cache needs its
        `rope`. By default off.
    timeout : float, default 1.0
        The most seconds that `acquire` waits for the store.

    Raises
    ------
    TypeError
        If an argument has the wrong type: a store that is no mapping, such as its address.
    ValueError
        If the cache is closed or for one sequence, has blocks of more than 1024 tokens or another strategy, or an
        argument is out of range.
    NotSupportedError
        If a layer has `CrossAttention`, whose rows do not follow from the tokens; or `reuse_min_tokens` is given, and
        the `rope` of a layer is not known.

    Notes
    -----
    Any thread may call any method, while another runs the model. `acquire` and `release` may be called while a batch is
    open; the sequence that is released must not be in it.

    A match ends where every layer has what a query there sees: all rows before it, or those of its window. So a prompt
    can be resumed in the middle of an earlier one although its windows have moved on since. Of a block that is not the
    same to its end, the first tokens are matched.

    A block is named by BLAKE2b of its tokens, all tokens before it, the fingerprint, the shape and types of the cache,
    and the salt, so that equal names mean equal rows; Python's ``hash`` is not used.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcache
    >>> cache = kvcache.KVCache(1, 1, 8, None, max_sequences=None, block_size=16)
    >>> prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    >>> def feed(seq_id, begin, end):
    ...     x = np.ones((end - begin, 1, 8), np.float32)
    ...     with cache.batch(positions=range(begin, end), seq_ids=[seq_id] * (end - begin)) as batch:
    ...         batch.attend(0, x, x, x)
    >>> prompt = list(range(100))
    >>> seq_id, matched = prefix.acquire(prompt)
    >>> feed(seq_id, matched, 100)
    >>> prefix.release(seq_id, prompt)
    >>> prefix.acquire(prompt[:70] + [7, 8, 9])[1]
    70
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        fingerprint: str,
        store: MutableMapping[str, bytes] | None = None,
        salt: bytes = b"",
        secret: bytes | None = None,
        reuse_min_tokens: SupportsIndex | None = None,
        timeout: SupportsFloat = 1.0,
    ) -> None:
        _check_cache(cache)
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint={fingerprint!r}: a str is needed, such as the model's name and revision")
        if not fingerprint:
            raise ValueError("fingerprint is empty: name what computes the rows, such as the model and its revision")
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is a {type(salt).__name__}: bytes are needed")
        if secret is not None and store is None:
            raise ValueError("secret is given without a store: it protects what is in one")
        self._reuse_min_tokens = (
            None if reuse_min_tokens is None else integer(reuse_min_tokens, "reuse_min_tokens", 1, _core.INT32_MAX)
        )
        if reuse_min_tokens is not None:
            _check_rope(cache)
        self._cache = cache
        self._core = cache._core
        self._block_size = cache.block_size
        identity = identity_of(cache, fingerprint)
        self._keys = Keys(identity, salt)
        self._nodes = Nodes(self._keys.root)
        self._rows = Rows(cache)
        self._timeout = _seconds(timeout)
        self._sessions: dict[int, Session] = {}
        self._sweep_at = FEW_BLOCKS
        self._counts = dict.fromkeys(("requests", "hits", "tokens", "matched", "reused", "fetched"), 0)
        self._new: list[Node] = []  # blocks that are not in the store
        self._client: StoreClient | None = None
        if store is not None:
            from kvcache.stores.client import StoreClient

            _check_store(store)
            self._client = StoreClient(store, digest=blake2b(identity).digest(), secret=secret)
        self._watch = watch_of(cache)
        self._watch.add(self)
        weakref.finalize(self, _drop_all, self._core, self._nodes, self._sessions).atexit = False

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._nodes)} blocks of {self._block_size} tokens, {len(self._sessions)} in use>"

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: whatever is copied with it, such as a generation config, goes on to share its rows."""
        return self

    @property
    def cache(self) -> KVCache:
        """The cache whose memory it uses."""
        return self._cache

    # ---- what a request does

    def acquire(self, tokens: Tokens, *, max_matched: SupportsIndex | None = None) -> tuple[int, int]:
        """Return a new sequence that holds as many of the first tokens of a prompt as are known.

        Parameters
        ----------
        tokens : sequence of int or bytes, bytes, or array
            The prompt: integers of any size; bytes, such as a hash, stand for what is no text, such as a piece of an
            image. A prompt that is itself bytes has one token for each byte. `release` takes what was generated as
            well.
        max_matched : int, optional
            The most tokens to match, for sequences that go in lock step with others. By default all but one.

        Returns
        -------
        seq_id : int
            A sequence that nobody else uses. Feed it exactly these tokens, from position `matched` on, then whatever
            is generated; `release` it in the end, or `KVCache.clear` it to keep nothing that is not kept yet.
        matched : int
            The number of tokens that it holds: at most all but one, as the last one has to be fed for an answer.

        Raises
        ------
        TypeError
            If `tokens` is no sequence, or text, or a token is neither an integer nor bytes.
        ValueError
            If there are no tokens, `max_matched` is negative, or the cache is closed.
        MemoryError
            If memory is short.
        """
        contents = blocks_of(tokens, self._block_size)
        if not contents:
            raise ValueError("tokens is empty: a prompt has at least one token")
        num_tokens = (len(contents) - 1) * self._block_size + count_tokens(contents[-1])
        keys = self._keys.chain(self._keys.root, contents[: num_tokens // self._block_size])
        limit = num_tokens - 1
        if max_matched is not None:
            limit = min(limit, integer(max_matched, "max_matched", 0, _core.INT64_MAX))
        if self._client is not None:
            self._fetch(keys[: limit // self._block_size], contents)
        with self._watch.lock:
            self._watch.forget_gone()
            self._sweep()
            seq_id = self._watch.new_sequence()
            try:
                matched = self._attach(seq_id, keys, contents, limit)
            except BaseException:
                self._core.clear(seq_id)
                self._watch.edited(seq_id, 0)
                raise
            self._count(requests=1, hits=matched > 0, tokens=num_tokens, matched=matched)
        return seq_id, matched

    def release(self, seq_id: SupportsIndex, tokens: Tokens) -> None:
        """Give a sequence back: its blocks stay for prompts to come, and the sequence ends.

        Nothing happens to a sequence that holds nothing, such as one that was released or cleared before.

        Parameters
        ----------
        seq_id : int
            The sequence that `acquire` returned, or any other of the cache.
        tokens : sequence of int or bytes, bytes, or array
            The tokens that it holds, generated ones too, from position 0 on. Those that were not fed are ignored.

        Raises
        ------
        CacheBusyError
            If the sequence is in an open batch; nothing has changed then.
        TypeError
            If `tokens` is no sequence, or text, or a token is neither an integer nor bytes.
        MemoryError
            If memory is short; the sequence is as it was.
        """
        seq_id = integer(seq_id, "seq_id", *_core.IDS)
        session = self._sessions.get(seq_id) or Session([], [], [], 0)
        length = min(self._core.next_position(seq_id), self._watch.exact_to(seq_id))
        contents = blocks_of(tokens, self._block_size, length)
        keys = self._keys.chain(self._keys.root, contents)
        with self._watch.lock:
            self._core.remove(seq_id, 0, 0, False)  # raises if a batch has the sequence
            path = self._keep(seq_id, session, keys, contents, length)
            self._core.clear(seq_id)
            self._watch.edited(seq_id, 0)
            _core.touch(self._core, [node.seq_id for node in path])
            self._store_new()

    def new_sequence(self) -> int:
        """Return an id for a sequence that nobody uses, such as a fork of one that was acquired."""
        return self._watch.new_sequence()

    def note_inexact(self, seq_id: SupportsIndex, position: SupportsIndex) -> None:
        """Note that a sequence's rows from a position on do not follow from its tokens alone: they are not kept.

        Say because a mask hid some of the tokens before them while they were computed.
        """
        seq_id = integer(seq_id, "seq_id", *_core.IDS)
        position = integer(position, "position", 0, _core.INT32_MAX)
        with self._watch.lock:
            if seq_id in self._sessions or self._core.next_position(seq_id):
                self._watch.note_inexact(seq_id, position)

    # ---- upkeep

    def pin(self, tokens: Tokens) -> int:
        """Keep the blocks of a prompt, such as a system prompt, whatever else needs memory.

        Parameters
        ----------
        tokens : sequence of int or bytes, bytes, or array
            The prompt.

        Returns
        -------
        int
            How many of its first tokens are kept: whole blocks, and only such as are known now.
        """
        with self._watch.lock:
            path = self._alive(self._path_of(tokens))
            for node in path:
                node.num_pins += 1
            _core.pin(self._core, [node.seq_id for node in path], True)
        return path[-1].end if path else 0

    def unpin(self, tokens: Tokens) -> None:
        """Undo one `pin` of these tokens; do nothing for blocks that are not pinned."""
        with self._watch.lock:
            path = [node for node in self._path_of(tokens) if node.num_pins]
            for node in path:
                node.num_pins -= 1
            _core.pin(self._core, [node.seq_id for node in path], False)

    def evict(self, num_tokens: SupportsIndex) -> int:
        """Drop the least recently used blocks, of at least this many tokens in all if there are as many.

        Pinned blocks stay. What is in the store stays there.

        Returns
        -------
        int
            The number of tokens of the blocks that were dropped.
        """
        wanted = integer(num_tokens, "num_tokens", 0, _core.INT64_MAX)
        dropped = 0
        with self._watch.lock:
            by_id = {node.seq_id: node for node in self._nodes.by_key.values()}
            for seq_id in _core.retained(self._core):
                node = by_id.get(seq_id)
                if dropped >= wanted:
                    break
                if node is None or not self._nodes.contains(node) or any(n.num_pins for n in node.below()):
                    continue
                dropped += sum(n.end - n.begin for n in self._drop(node))
        return dropped

    def clear(self) -> None:
        """Drop all blocks, pinned ones too. Sequences in use stay as they are, and so does what is in the store."""
        with self._watch.lock:
            for node in list(self._nodes.root.children):
                self._drop(node)
            for session in list(self._sessions.values()):
                session.path.clear()
                session.keys.clear()
                self._drop_pending(session, 0)

    def flush(self, timeout: SupportsFloat) -> bool:
        """Wait, at most so many seconds, until what was released is in the store.

        Parameters
        ----------
        timeout : float
            The most seconds to wait.

        Returns
        -------
        bool
            Whether the store took every full block since this prefix cache was made: False if some still wait to be
            written, or were ever dropped, because the store failed or was too slow (`stats`, ``store.dropped``). True
            without a store.
        """
        seconds = _seconds(timeout)
        return self._client is None or (self._client.flush(seconds) and self._client.stats.dropped == 0)

    def close(self, timeout: SupportsFloat = 10.0) -> bool:
        """Write what waits to be written to the store, for at most so many seconds, and drop all blocks.

        From then on the store is neither read nor written. In memory, `acquire` and `release` go on as before.

        Parameters
        ----------
        timeout : float, default 10.0
            The most seconds to wait.

        Returns
        -------
        bool
            Whether the store took every full block since this prefix cache was made, as by `flush`. True without a
            store.
        """
        seconds = _seconds(timeout)
        done = self._client is None or (self._client.close(seconds) and self._client.stats.dropped == 0)
        if not self._core.closed:
            self.clear()
        return done

    @property
    def stats(self) -> PrefixStats:
        """What has happened so far, and what there is now."""
        with self._watch.lock:
            self._watch.forget_gone()
            return PrefixStats(
                **self._counts,
                blocks=len(self._nodes),
                sequences=len(self._sessions),
                store=None if self._client is None else self._client.stats,
            )

    # ---- nodes; with the lock held

    def _count(self, **more: int) -> None:
        for name, value in more.items():
            self._counts[name] += value

    def _path_of(self, tokens: Tokens) -> list[Node]:
        return self._nodes.walk(self._keys.chain(self._keys.root, blocks_of(tokens, self._block_size)))

    def _is_alive(self, node: Node) -> bool:
        """Return whether a node's rows, or some of them, are there."""
        return self._core.seq_len(node.seq_id, None) > 0

    def _alive(self, path: Sequence[Node]) -> list[Node]:
        """Return the first nodes of a path, up to one whose rows are gone."""
        found = []
        for node in path:
            if not self._is_alive(node):
                break
            found.append(node)
        return found

    def _with_similar(self, path: list[Node], contents: list[bytes]) -> tuple[list[Node], int]:
        """Add the node whose first tokens are those of the next block to a path, if there is one.

        Return the path, and the number of tokens that it and the blocks have in common.
        """
        last = path[-1] if path else self._nodes.root
        if len(path) == len(contents):
            return path, last.end
        similar = self._nodes.similar(last, contents[len(path)])
        if not similar:
            return path, last.end
        complete = [pair for pair in similar if self._rows.are_complete(pair[0].seq_id, pair[0].end - pair[0].begin)]
        child, common = (complete or similar)[0]
        return [*path, child], last.end + common

    def _add(self, key: bytes, content: bytes, parent: Node, seq_id: int, is_stored: bool = False) -> Node:
        """Add a block that a retained sequence holds; if it is known already, keep the one that has more rows."""
        node = self._nodes.by_key.get(key)
        if node is None:
            node = self._nodes.add(key, content, parent, seq_id)
            self._drop_beginnings(node, parent)
        elif self._is_alive(node) and self._rows.are_complete(node.seq_id, node.end - node.begin):
            self._core.clear(seq_id)
            return node
        else:
            self._core.clear(node.seq_id)
            node.seq_id = seq_id
            for _ in range(node.num_pins):
                _core.pin(self._core, [seq_id], True)
        if not is_stored:
            self._new.append(node)
        return node

    def _drop_beginnings(self, node: Node, parent: Node) -> None:
        """Drop short blocks that another one begins with."""
        at = place_of(parent, node.content)
        while at and node.content.startswith(parent.children[at - 1].content) and not parent.children[at - 1].children:
            if parent.children[at - 1].num_pins:
                break
            self._drop(parent.children[at - 1])
            at -= 1

    def _drop(self, node: Node) -> list[Node]:
        """Forget a block and all that build on it, and drop their rows; return them."""
        dropped = self._nodes.remove(node)
        for one in dropped:
            self._core.clear(one.seq_id)
        return dropped

    def _sweep(self) -> None:
        """Forget blocks that were evicted, once there are twice as many blocks as were left the last time."""
        if len(self._nodes) < self._sweep_at:
            return
        alive = set(_core.retained(self._core))
        for node in list(self._nodes.by_key.values()):
            if node.seq_id not in alive and self._nodes.contains(node):
                self._drop(node)
        self._sweep_at = max(2 * len(self._nodes), FEW_BLOCKS)

    # ---- sequences; with the lock held

    def _attach(self, seq_id: int, keys: list[bytes], contents: list[bytes], limit: int) -> int:
        """Begin a sequence with what is known of a prompt, up to a position; return how many tokens that are."""
        path = self._nodes.walk(keys)
        found, end = self._with_similar(path, contents)
        matched = _core.attach(self._core, [node.seq_id for node in found], seq_id, min(end, limit))
        known = matched // self._block_size
        self._sessions[seq_id] = Session(keys, contents[: len(keys)], path[:known], known * self._block_size)
        return self._reuse(seq_id, contents, matched, limit)

    def _retain(self, seq_id: int, begin: int, end: int) -> int | None:
        """Retain rows of a sequence; return the retained sequence, or None if there is no memory for it now."""
        retained = self._watch.new_retained()
        try:
            _core.retain(self._core, seq_id, retained, begin, end)
        except (MemoryError, CacheBusyError):  # busy: its keys are being rewritten
            return None
        return retained

    def _keep(self, seq_id: int, session: Session, keys: list[bytes], contents: list[bytes], length: int) -> list[Node]:
        """Keep the blocks of a sequence below a position as nodes; return their path."""
        path: list[Node] = []
        for i, (key, content) in enumerate(zip(keys, contents, strict=True)):
            begin = i * self._block_size
            end = begin + count_tokens(content)
            if end > length:
                break
            node = self._nodes.by_key.get(key)
            retained = session.pending.pop(i, None)
            if retained is None and (node is None or not self._is_alive(node)):
                retained = self._retain(seq_id, begin, end)
                if retained is None:
                    break
            if retained is not None:
                node = self._add(key, content, path[-1] if path else self._nodes.root, retained)
            assert node is not None
            path.append(node)
        return path

    def _drop_pending(self, session: Session, position: int) -> None:
        """Drop retained blocks of unknown tokens that end behind a position."""
        for i in [i for i in session.pending if (i + 1) * self._block_size > position]:
            self._core.clear(session.pending.pop(i))

    def _forget_session(self, seq_id: int) -> None:
        session = self._sessions.pop(seq_id, None)
        if session is not None:
            self._drop_pending(session, 0)

    def _fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Retain the blocks that a batch fills, which is open yet; of each of its sequences, where its tokens stand."""
        for seq_id in self._sessions.keys() & ranges.keys():
            session, (begin, end) = self._sessions[seq_id], ranges[seq_id]
            if begin < session.retained_to:
                self._roll_back(session, begin)
            end = min(end, self._watch.exact_to(seq_id))
            while session.retained_to + self._block_size <= end and self._retain_next(seq_id, session):
                session.retained_to += self._block_size

    def _retain_next(self, seq_id: int, session: Session) -> bool:
        """Retain the next block of a sequence; return False if that cannot be now."""
        i, begin = session.retained_to // self._block_size, session.retained_to
        retained = self._retain(seq_id, begin, begin + self._block_size)
        if retained is None:
            return False
        parent = session.path[i - 1] if 0 < i <= len(session.path) else self._nodes.root
        if i == len(session.path) and i < len(session.keys) and self._nodes.contains(parent):
            session.path.append(self._add(session.keys[i], session.contents[i], parent, retained))
        else:
            session.pending[i] = retained
        return True

    def _undo_fill(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Drop the blocks that were retained of a batch which could not be committed."""
        for seq_id in self._sessions.keys() & ranges.keys():
            session, (begin, _) = self._sessions[seq_id], ranges[seq_id]
            full = begin // self._block_size
            del session.path[full:]
            session.retained_to = min(session.retained_to, full * self._block_size)
            self._drop_pending(session, begin)
        for node in self._new:
            if self._nodes.contains(node):
                self._drop(node)
        self._new.clear()

    def _roll_back(self, session: Session, position: int) -> None:
        """Note that the tokens of a sequence from a position on are not those that were retained of it."""
        full = position // self._block_size
        del session.keys[full:], session.contents[full:], session.path[full:]
        session.retained_to = min(session.retained_to, full * self._block_size)
        self._drop_pending(session, position)

    def _edited(self, seq_id: int | None, position: int) -> None:
        """Note that rows of a sequence from a position on were changed; None: all sequences are gone."""
        for one in list(self._sessions) if seq_id is None else {seq_id} & self._sessions.keys():
            if self._core.next_position(one):
                self._roll_back(self._sessions[one], position)
            else:
                self._forget_session(one)

    # ---- chunks from elsewhere; with the lock held

    def _reuse(self, seq_id: int, contents: list[bytes], matched: int, limit: int) -> int:
        """Go on behind the exact match with tokens that were computed elsewhere; return how many match then."""
        least = self._reuse_min_tokens
        if least is None or limit - matched < least:
            return matched
        chunks = Chunks(self._nodes, contents, self._block_size)
        while (chunk := chunks.find(matched)) is not None:
            num_tokens = min(chunk.num_tokens, limit - matched)
            if num_tokens < least or not self._move(seq_id, chunk, matched, num_tokens):
                break
            self._watch.note_inexact(seq_id, matched)
            matched += num_tokens
            self._count(reused=num_tokens)
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

    # ---- the store

    def _store_new(self) -> None:
        """Queue the new full blocks to be written to the store."""
        for node in self._new:
            if self._client is not None and node.end - node.begin == self._block_size:
                self._client.put(node.key.hex(), partial(self._rows.read, node.seq_id, node.begin, node.end))
        self._new.clear()

    def _fetch(self, keys: list[bytes], contents: list[bytes]) -> None:
        """Get blocks from the store that follow those that are there, if that takes less time than to compute them."""
        assert self._client is not None
        with self._watch.lock:
            path = self._alive(self._nodes.walk(keys))
            _core.touch(self._core, [node.seq_id for node in path])
        missing, begin = keys[len(path) :], len(path)
        timeout = self._time_for(len(missing))
        if not timeout:
            return
        deadline = time.monotonic() + timeout
        at_once = max(1, FETCH_BYTES // self._rows.nbytes(self._block_size))
        for i in range(0, len(missing), at_once):
            part = missing[i : i + at_once]
            hexes = [key.hex() for key in part]
            found = self._client.get_many(hexes, timeout, patience=self._timeout, stop_at_miss=True)
            payloads = [(key, found.get(key.hex())) for key in part]
            timeout = deadline - time.monotonic()
            if not self._import_all(path, payloads, contents[begin + i :]) or timeout <= 0:
                break

    def _import_all(
        self, path: list[Node], payloads: list[tuple[bytes, memoryview | None]], contents: list[bytes]
    ) -> bool:
        """Add blocks from the store to a path, up to one that is missing, or for which there is no room.

        Rows are copied without the lock, which every commit takes. Return whether all blocks were added.
        """
        pinned = [node.seq_id for node in path]
        _core.pin(self._core, pinned, True)
        try:
            for (key, payload), content in zip(payloads, contents, strict=False):
                node = self._known(key)
                if node is None and payload is not None:
                    seq_id = self._import(len(path) * self._block_size, payload)
                    if seq_id is not None:
                        pinned.append(seq_id)
                        node = self._add_fetched(key, content, path[-1] if path else self._nodes.root, seq_id)
                if node is None:
                    return False
                path.append(node)
        finally:
            _core.pin(self._core, pinned, False)
        return True

    def _known(self, key: bytes) -> Node | None:
        with self._watch.lock:
            node = self._nodes.by_key.get(key)
            return node if node is not None and self._is_alive(node) else None

    def _add_fetched(self, key: bytes, content: bytes, parent: Node, seq_id: int) -> Node | None:
        """Add a block from the store; return None, and drop it, if the block before was dropped meanwhile."""
        with self._watch.lock:
            if not self._nodes.contains(parent):
                self._core.clear(seq_id)
                return None
            self._count(fetched=self._block_size)
            return self._add(key, content, parent, seq_id, is_stored=True)

    def _time_for(self, num_blocks: int) -> float:
        """Return the seconds for which to wait for blocks from the store; 0: computing them takes no longer."""
        assert self._client is not None
        if not num_blocks:
            return 0.0
        rate = self._watch.tokens_per_second
        if rate is None:
            return self._timeout
        compute = num_blocks * self._block_size / rate
        fetch = self._client.seconds_for(num_blocks, num_blocks * self._rows.nbytes(self._block_size))
        return 0.0 if fetch is not None and fetch >= compute else min(self._timeout, compute)

    def _import(self, begin: int, payload: memoryview) -> int | None:
        """Return a new retained sequence, pinned, of a block's rows; None if there is no room, or they do not fit."""
        seq_id = self._watch.new_retained()
        try:
            if self._rows.write(seq_id, begin, begin + self._block_size, payload):
                return seq_id
        except BaseException as error:
            self._core.clear(seq_id)
            if not isinstance(error, (CacheFullError, MemoryError)):
                raise
        return None


def _check_cache(cache: KVCache) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}: a KVCache is needed")
    if cache._core.closed:
        raise ValueError("the cache is closed")
    if any(isinstance(layer.policy, CrossAttention) for layer in cache.layers):
        raise NotSupportedError("the cache has layers of CrossAttention: their rows do not follow from the tokens")
    if cache.strategy != "always":
        raise ValueError(f"the cache's strategy is {cache.strategy!r}: only what is stored can be kept; give 'always'")
    if cache.max_sequences == 1:
        raise ValueError(
            "the cache's max_sequences is 1, so that a second request could not run beside the first: make it with "
            "max_sequences=None, or as many as run at once"
        )
    if cache.block_size > MOST_BLOCK_SIZE:
        raise ValueError(
            f"the cache's block_size is {cache.block_size}: blocks of at most {MOST_BLOCK_SIZE} tokens are kept; make "
            "it with block_size=64"
        )


def _check_rope(cache: KVCache) -> None:
    for i, layer in enumerate(cache._layers):
        if layer.rope is None and layer.policy is not None:
            raise NotSupportedError(
                f"reuse_min_tokens moves tokens, and the keys of layer {i} may have to be rotated: make the cache with"
                " rope=, or leave reuse_min_tokens out"
            )


def _seconds(timeout: SupportsFloat) -> float:
    seconds = to_float(timeout, "timeout")
    if not seconds >= 0:
        raise ValueError(f"timeout={timeout!r}: must be a number of seconds of at least 0")
    return seconds


def _check_store(store: object) -> None:
    """Raise TypeError for what is no mutable mapping; for one by its methods alone, it need not say that it is."""
    methods = ("__getitem__", "__setitem__", "__delitem__")
    if isinstance(store, Sequence) or not all(hasattr(type(store), name) for name in methods):
        raise TypeError(
            f"store is a {type(store).__name__}: a mutable mapping of str to bytes is needed, such as"
            " kvcache.stores.open returns"
        )


def _drop_all(core: _core.Cache, nodes: Nodes, sessions: dict[int, Session]) -> None:
    """Drop the rows of a prefix cache that is no more."""
    if core.closed:
        return
    for node in nodes.by_key.values():
        core.clear(node.seq_id)
    for session in sessions.values():
        for seq_id in session.pending.values():
            core.clear(seq_id)
