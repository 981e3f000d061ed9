"""`PrefixCache`: finds the beginning of a prompt among the blocks that earlier sequences left behind.

A method asks ``_prefix``, the prefix of the C core. With a store, ``_client`` reads and writes values there, and
``_watch`` queues new blocks for it. A doomed key is a block's name whose value waits to be deleted, as it is forgotten.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, SupportsFloat, SupportsIndex

from kvcache import _core
from kvcache.arguments import integer, spelt, to_float
from kvcache.cache import KVCache
from kvcache.errors import NotSupportedError
from kvcache.policy import ChunkedAttention, CrossAttention, SlidingWindow
from kvcache.prefix.fetching import Fetching
from kvcache.prefix.keys import Arrays, Tokens, arrays_of
from kvcache.prefix.watch import Watch, watch_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvcache.stores.client import StoreClient, StoreStats

WINDOWS = (SlidingWindow, ChunkedAttention)
CLEARED = 3
EVENTS = {1: "kept", 2: "dropped", CLEARED: "cleared"}  # kvc_prefix_event_kind
MOST_BLOCK_SIZE = 1024  # tokens; rows are found, kept and dropped by whole blocks


@dataclass(frozen=True)
class PrefixStats:
    """Counts of what a prefix cache has done, and of what it holds.

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
        The blocks that are known now, whose rows are there.
    sequences : int
        The sequences that were acquired and not released yet.
    checkpoints, checkpoint_bytes : int
        The recurrent states that are kept now (`PrefixCache.checkpoint`), and their bytes.
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
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    store: StoreStats | None = None


@dataclass(frozen=True)
class PrefixEvent:
    """Something that happened to a full block of a prefix cache.

    Attributes
    ----------
    kind : str
        "kept": it is known from now on, in memory. "dropped": it is not any more. "written": it is in the store. And of
        the whole cache "cleared": all blocks before are dropped; and "lost": some events before were forgotten.
    name : str
        The block's name, as `PrefixCache.names` and the store have it; "" of the whole cache.
    position : int
        That of its first token, where it was kept or dropped.
    """

    kind: str
    name: str = ""
    position: int = 0


@spelt
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
        ``--cache-reuse``. They are found if they span a whole block of the other prompt; of blocks with the same
        tokens, the 32 used last are looked at. This is an approximation, because these rows were computed behind other
        tokens; nothing that builds on them is kept. The cache needs its `rope`. By default off.
    timeout : float, default 1.0
        The most seconds that `acquire` waits for the store.
    quota : int, default 0
        Tokens: so many of its most recently used ones are not evicted for others, nor is the rest of the block in which
        they end. All that share a cache should have less than its `capacity` together.
    ttl : float, optional
        Seconds after which blocks that nobody has used, and that are not pinned, are dropped, from memory. By default
        never.
    state_bytes : int, default 0
        For a model with recurrent layers beside its attention: the most bytes of the state of one sequence. A match
        then ends at a `checkpoint`.
    max_checkpoint_bytes : int, optional
        The most bytes of all states that are kept; the least recently used ones are dropped. By default they go with
        their blocks.
    max_events : int, default 0
        So many events, of 40 bytes each, are noted for `take_events`.

    Raises
    ------
    TypeError
        If an argument has the wrong type: a store that is no mapping, such as its address.
    ValueError
        If the cache is closed or for one sequence, has blocks of more than 1024 tokens or another strategy, or an
        argument is out of range.
    NotSupportedError
        If a layer has `CrossAttention`, whose rows do not follow from the tokens; or `reuse_min_tokens` is given, and
        the `rope` of a layer is not known, or with `state_bytes`: a state does not move with tokens.
    CacheFullError
        If `max_bytes` of the cache leaves no room, for example for `max_events`.
    MemoryError
        If memory is short.

    Notes
    -----
    Any thread may call any method, while another runs the model. `acquire` and `release` may be called while a batch is
    open; the sequence that is released must not be in it.

    A method that takes tokens raises TypeError and MemoryError as `acquire` does, and ValueError for an argument out of
    range. Once the cache is closed, methods raise ValueError. `flush` and `close` do not.

    A match ends where every layer has the rows that a query there sees: all rows before it, or the rows of its window.
    So a prompt can be resumed in the middle of an earlier one although its windows have moved on since. If a block is
    not the same to its end, its first tokens are matched.

    The name of a block is BLAKE2b of its tokens, all tokens before it, the fingerprint, `state_bytes` and the salt. It
    also depends on `block_size` and the layers of the cache, with their policies and `rope`, and on the `prompts` of
    `kvcache.hf.HFCache.make_kv_cache`. So equal names mean equal rows. Python's ``hash`` is not used.

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
        quota: SupportsIndex = 0,
        ttl: SupportsFloat | None = None,
        state_bytes: SupportsIndex = 0,
        max_checkpoint_bytes: SupportsIndex | None = None,
        max_events: SupportsIndex = 0,
    ) -> None:
        _check_cache(cache)
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint={fingerprint!r}: a str is needed, such as the model's name and revision")
        if not fingerprint:
            raise ValueError("fingerprint is empty: name what computes the rows, such as the model and its revision")
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is a {type(salt).__name__}: bytes are needed")
        _check_secret(secret, store)
        least = None
        if reuse_min_tokens is not None:
            least = integer(reuse_min_tokens, "reuse_min_tokens", 1, _core.INT32_MAX)
            _check_rope(cache)
        seconds = _seconds(timeout)
        tokens = integer(quota, "quota", 0, _core.INT64_MAX)
        of_state = integer(state_bytes, "state_bytes", 0, _core.INT64_MAX)
        most = 0
        if max_checkpoint_bytes is not None:
            most = integer(max_checkpoint_bytes, "max_checkpoint_bytes", max(1, of_state), _core.INT64_MAX)
        num_events = integer(max_events, "max_events", 0, _core.INT32_MAX)
        named = fingerprint.encode("utf-8", "surrogatepass")
        if cache._prompts != "stored":  # rows behind prompts differ by it; no fingerprint has the byte 255
            named += b"\xff" + cache._prompts.encode()
        self._identity = identity = _core.identity(cache._core, named)
        self._cache, self._core, self._block_size = cache, cache._core, cache.block_size
        limits = (tokens, _ttl(ttl), least or 0, store is not None, of_state, most, num_events)
        self._prefix = _core.Prefix(self._core, salt, identity, secret, *limits)
        common = {
            "fingerprint": fingerprint,
            "store": store,
            "secret": secret,
            "reuse_min_tokens": least,
            "timeout": seconds,
            "state_bytes": of_state,
            "max_checkpoint_bytes": most or None,
        }
        self._written = _Written(num_events)  # for `take_events`
        self._common: dict[str, Any] = common  # what a tenant's prefix cache is made with as well
        self._client: StoreClient | None = None  # None: there is no store
        self._fetching: Fetching | None = None  # gets blocks from the store, if any
        self._watch: Watch | None = None  # has new blocks written to the store, if any
        self._forgotten: deque[NDArray[np.uint8]] = deque()  # names of dropped blocks, until the client has them
        if store is not None:
            self._use(store, seconds)

    def _use(self, store: MutableMapping[str, bytes], timeout: float) -> None:
        """Read from a store, and write to it."""
        from kvcache.stores.client import StoreClient

        _check_store(store)
        rows = sum(layer.bytes_per_token for layer in self._cache.layers) * self._block_size
        # A value has a header of 128 bytes, a byte for each layer, rows, and the position of a state before it.
        nbytes = 128 + self._cache.num_layers + rows + 4 + self.state_bytes
        self._client = StoreClient(store, most_bytes=nbytes)
        self._watch = watch_of(self._cache)
        # A block that is computed again has no state until somebody keeps one, and may lack rows of windows.
        may_lack = self.state_bytes > 0 or any(isinstance(layer.policy, WINDOWS) for layer in self._cache.layers)
        self._watch.add(self._prefix.user, self, partial(self._client.put, written=self._written.note, joins=may_lack))
        weakref.finalize(self, self._watch.discard, self._prefix.user).atexit = False
        self._fetching = Fetching(self._prefix, self._client, timeout, self._block_size, nbytes)

    def __repr__(self) -> str:
        stats = self._prefix.stats()
        return f"<PrefixCache: {stats['blocks']} blocks of {self._block_size} tokens, {stats['sequences']} in use>"

    def __copy__(self) -> Self:
        """Return itself: there is no other with the same blocks."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: whatever is copied with it, such as a generation config, goes on to share its rows."""
        return self

    @property
    def cache(self) -> KVCache:
        """The cache whose memory it uses."""
        return self._cache

    @property
    def identity(self) -> bytes:
        """Everything that rows depend on besides tokens: the model, and how the cache stores its rows.

        A program in C shares a store with this prefix cache if its cache has the same layers, and its fingerprint,
        `salt` and `secret` are the same. In place of the fingerprint it may give this identity, as
        ``kvc_prefix_config.identity``.
        """
        return self._identity

    @property
    def state_bytes(self) -> int:
        """The most bytes of the recurrent state of a sequence; 0: the model has none."""
        state_bytes: int = self._common["state_bytes"]
        return state_bytes

    def tenant(
        self,
        salt: bytes,
        *,
        secret: bytes | None = None,
        quota: SupportsIndex = 0,
        ttl: SupportsFloat | None = None,
        max_events: SupportsIndex = 0,
    ) -> PrefixCache:
        """Return a prefix cache for another tenant: of the same cache, model and store, which shares no block with it.

        The arguments are those of the class: `quota` in tokens, `ttl` in seconds. Without a `secret`, values have a MAC
        by the secret of this prefix cache, if it has one. There may be any number of tenants. A tenant takes about
        3 KB, or 5 KB with a store. A batch asks the tenants of its own sequences alone.

        Keep it as long as the tenant's prompts are to match: its blocks are dropped from memory with the object.
        Blocks that wait to be written to the store are written before. Only the tenant's own `flush` waits for them.
        """
        common = self._common if secret is None else {**self._common, "secret": secret}
        return PrefixCache(self._cache, salt=salt, quota=quota, ttl=ttl, max_events=max_events, **common)

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
            A sequence that nobody else uses; ids count up from 0, so take your own from `new_sequence`. Feed it exactly
            these tokens, from position `matched` on, then whatever is generated; `release` it in the end, or
            `KVCache.clear` it to keep nothing that is not kept yet.
        matched : int
            The number of tokens that it holds: at most all but one, as the last one has to be fed for an answer.

        Raises
        ------
        TypeError
            If `tokens` is no sequence, or text, or a token is neither an integer nor bytes.
        ValueError
            If there are no tokens, `max_matched` is negative, or the cache is closed.
        CacheFullError
            If `max_bytes` of the cache leaves no room for the prompt, which takes 8 bytes for each token.
        MemoryError
            If memory is short.
        """
        given = _some(tokens)
        limit = len(given[0]) - 1
        if max_matched is not None:
            limit = min(limit, integer(max_matched, "max_matched", 0, _core.INT64_MAX))
        if self._fetching is not None:
            self._fetching.fetch(given, limit)
        return self._prefix.acquire(*given, limit)

    def release(self, seq_id: SupportsIndex, tokens: Tokens) -> None:
        """Give a sequence back: its blocks stay for prompts to come, and the sequence ends.

        A sequence that holds nothing stays as it is, for example after an earlier release or `clear`.

        Parameters
        ----------
        seq_id : int
            The sequence that `acquire` returned, or any other of the cache.
        tokens : sequence of int or bytes, bytes, or array
            The tokens that it holds, generated ones too, from position 0 on. Those that were not fed are ignored. No
            tokens: the sequence only ends.

        Raises
        ------
        CacheBusyError
            If the sequence is in an open batch.
        ValueError
            If the sequence holds more exact tokens than these, as it does if a whole prompt was fed behind its match.
            Blocks of such a prompt were kept with rows of other tokens: `forget` it, and prompts that went on from
            them.
            To keep only the first ``n`` tokens, call ``note_inexact(seq_id, n)`` before.
        TypeError, MemoryError
            As in `acquire`. The sequence is as it was, whatever is raised.
        """
        length = min(self._core.next_position(seq_id), self._core.exact_to(seq_id))
        self._prefix.release(seq_id, *arrays_of(tokens, length))
        self._store_new()

    def checkpoint(self, seq_id: SupportsIndex, tokens: Tokens, state: Buffer = b"") -> None:
        """Keep the blocks of a sequence, which goes on, and the recurrent state of the model after these tokens.

        Good places are before the last token of a prompt (`acquire` never matches the last one), at the end of an
        answer, and every few thousand tokens of a long prompt. A store gets the last state within each full block: with
        one, where the last full block of a prompt and of an answer ends.

        Parameters
        ----------
        seq_id : int
            A sequence of the cache.
        tokens : sequence of int or bytes, bytes, or array
            All tokens that it holds, from position 0 on. If it holds fewer, or their rows are not exact, no state is
            kept.
        state : buffer of bytes, optional
            The state, of at most `state_bytes` bytes. Without it, only blocks are kept.

        Raises
        ------
        CacheBusyError
            If the sequence is in an open batch.
        CacheFullError
            If `max_bytes` of the cache leaves no room for the state, or pinned states leave none within
            `max_checkpoint_bytes`. Blocks may then have been kept without it.
        ValueError
            If the state has more than `state_bytes` bytes, or there is a state and no token.
        TypeError, MemoryError
            As in `acquire`.
        """
        try:
            view = memoryview(state)
            view = view.cast("B") if view.nbytes else memoryview(b"")
        except (TypeError, ValueError):  # ValueError: of elements that buffers do not know
            raise TypeError(f"state is a {type(state).__name__}: contiguous bytes are needed") from None
        if view.nbytes > self.state_bytes:
            raise ValueError(
                f"state has {view.nbytes:,} bytes, and this prefix cache keeps states of at most {self.state_bytes:,}: "
                "make it with a larger state_bytes"
            )
        self._prefix.checkpoint(seq_id, *arrays_of(tokens), view)
        self._store_new()

    def state(self, seq_id: SupportsIndex) -> memoryview | None:
        """Return a copy of the recurrent state that an acquired sequence goes on from.

        None if nothing was matched. Ask before the sequence's first commit, which forgets the state.
        """
        return self._prefix.state(seq_id)

    def _store_new(self) -> None:
        """Queue new blocks to be written to the store, if there is one."""
        if self._watch is not None and not self._core.closed:
            self._watch.store_new()

    def lookup(self, tokens: Tokens, *, store: bool = False, rows: bool = False) -> int:
        """Return how many of the first tokens are known, without taking anything.

        With `store`, tokens in the store count too. The store is asked which blocks it has, for at most `timeout`
        seconds; no value is read. With `state_bytes`, `acquire` may match less, because it needs a state. With `rows`,
        tokens that have rows in memory count, also behind the last state. If they are more than the known tokens,
        another prompt began alike, and a `checkpoint` there lets the next such prompt resume from it.
        """
        given = arrays_of(tokens)
        matched, with_rows = self._prefix.lookup(*given)
        known = with_rows if rows else matched
        if not store or self._client is None:
            return known
        names = self._prefix.names(*given)[known // self._block_size :]
        num = self._client.count(names, self._common["timeout"])
        return max(known, (known // self._block_size + num) * self._block_size)

    def names(self, tokens: Tokens) -> list[str]:
        """Return the names of a prompt's full blocks, known or not: the keys of their values in the store."""
        return self._prefix.names(*arrays_of(tokens))

    def take_events(self) -> list[PrefixEvent]:
        """Return what happened since the last call, in order: for a router that sends a prompt where its blocks are.

        The last `max_events` of memory are noted, and as many of the store. These come last, as far as it has written
        them by now.
        """
        found, num_lost = self._prefix.take_events()
        written, are_lost = self._written.take()
        events = [PrefixEvent("lost")] if num_lost or are_lost else []
        events += [PrefixEvent(EVENTS[kind], name if kind != CLEARED else "", at) for kind, at, name in found]
        return events + [PrefixEvent("written", name) for name in written]

    def new_sequence(self) -> int:
        """Return an unused id for a sequence, such as a fork of an acquired sequence."""
        return _core.new_sequence(self._core)

    def note_inexact(self, seq_id: SupportsIndex, position: SupportsIndex) -> None:
        """Note that a sequence's rows from a position on do not follow from its tokens alone: they are not kept.

        For example, a mask hid some earlier tokens while they were computed. Call it before the batch that computes
        them is committed: blocks that a commit or `checkpoint` has kept by then stay. It does nothing for a sequence
        that was cut to nothing, which has ended: call it while the batch that feeds it again is open.
        """
        self._core.mark_inexact(seq_id, position)

    # ---- upkeep

    def pin(self, tokens: Tokens) -> int:
        """Pin the known tokens of a prompt, such as a system prompt: their blocks and state are not evicted.

        Return the number of these tokens. If it is 0, nothing is pinned. If only the first tokens of a block are the
        prompt's, the whole block is pinned. Pin the prompt again when more tokens of it are known. `unpin` takes back
        one call. Raise `CacheFullError` if `max_bytes` of the cache leaves no room for the list of blocks.
        """
        return self._prefix.pin(*arrays_of(tokens))

    def unpin(self, tokens: Tokens) -> None:
        """Undo one `pin` of the same tokens; do nothing if no such pin is left."""
        self._prefix.unpin(*arrays_of(tokens))

    def evict(self, num_tokens: SupportsIndex) -> int:
        """Drop the least recently used blocks until `num_tokens` tokens are dropped; return how many were dropped.

        Pinned blocks stay, and so do blocks of answers that are not released yet, and what is in the store.
        """
        return self._prefix.evict(num_tokens)

    def forget(self, tokens: Tokens) -> int:
        """Forget a prompt, for example private data, in memory and in the store.

        No prompt of this prefix cache matches its tokens until somebody computes them again. Pass the answer, too. Each
        block that has one of these tokens is dropped, and each block behind the whole prompt, pinned or not, with their
        states. Other blocks behind a part of the prompt stay, for when that part is computed again. Equal tokens of
        another prompt, or at another position, stay, too. If `reuse_min_tokens` must not move them, forget that prompt
        as well.

        Sequences go on, but nothing more is kept of sequences that were begun or acquired before this call returned.
        Nothing is kept, either, of a sequence that was restored from a file, or that another prefix cache acquired. Nor
        is a sequence that got rows of such a sequence by a fork or by `share_range`. Pins stay, for when the same
        blocks are computed again.

        The name of a block that is only in the store is not known here. Once such a block is fetched, with tokens of
        the prompt or behind it, it counts as computed again. To be sure, give each tenant a store of its own, and clear
        it.

        Other prefix caches, of this `KVCache` or another one, do not learn of it. They may hold these tokens, too, for
        example in a copy of the cache. Forget the prompt there as well.

        Return how many tokens were dropped from memory. `flush` waits for the store, and returns False if the store did
        not delete all values; then call this again. Until a value is deleted, or written anew because its tokens were
        computed again, no prefix cache with this store object reads it.
        """
        given = arrays_of(tokens)
        if self._client is None or self._watch is None:
            return self._prefix.forget(*given, deque())
        with self._client.forgetting() as doom:
            doom(self._prefix.names(*given))
            with self._watch.forgetting:
                try:
                    num = self._prefix.forget(*given, self._forgotten)
                finally:  # blocks may be dropped, too, as when a signal came meanwhile
                    self._hand_over(doom)
            self._store_new()  # so that what waits to be written counts as written before, and is deleted after it
        self._client.delete_doomed()
        return num

    def _hand_over(self, doom: Callable[[Iterable[str]], None]) -> None:
        """Doom the names of dropped blocks."""
        while self._forgotten:
            names = self._forgotten[0]
            num_names = bisect_left(range(len(names)), True, key=lambda i: not names[i].any())
            doom(name.tobytes().hex() for name in names[:num_names])
            self._forgotten.popleft()  # last: a signal's handler that raises before loses nothing

    def _begin_in_child(self) -> None:
        """End what threads were forgetting that a forked child does not have."""
        if self._client is not None:
            self._hand_over(self._client.doom)
        self._prefix.end_forgets()

    def clear(self) -> None:
        """Drop all blocks, pinned ones too. Sequences in use stay as they are, and so does what is in the store."""
        self._prefix.clear()

    def flush(self, timeout: SupportsFloat) -> bool:
        """Wait, at most so many seconds, until what was released is in the store.

        Return whether the store took every full block since this prefix cache was made, and has deleted what was
        forgotten. That is False if some blocks still wait to be written, or were ever dropped, because the store failed
        or was too slow (`stats`, ``store.dropped``). Forgotten blocks need not be written. True without a store.
        """
        seconds = _seconds(timeout)
        self._store_new()
        if self._client is None:
            return True
        return self._client.flush(seconds) and self._client.stats.dropped == 0 and not self._forgotten

    def close(self, timeout: SupportsFloat = 10.0) -> bool:
        """Write what waits to be written to the store, for at most so many seconds, and drop all blocks.

        After this call the store is neither read nor written. In memory, `acquire` and `release` go on as before.
        Return whether the store took every full block, as `flush` does.
        """
        seconds = _seconds(timeout)
        self._store_new()
        done = self._client is None or (self._client.close(seconds) and self._client.stats.dropped == 0)
        if not self._core.closed:
            self.clear()
        return done

    @property
    def stats(self) -> PrefixStats:
        """Counts of what has happened so far, and of what the cache holds now."""
        return PrefixStats(
            **self._prefix.stats(),
            fetched=0 if self._fetching is None else self._fetching.num_fetched,
            store=None if self._client is None else self._client.stats,
        )


class _Written:
    """The names of the last `most` blocks that the writing thread stored."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.names: deque[str] = deque(maxlen=most)
        self.are_lost = False  # whether some were dropped since the last `take`

    def note(self, name: str) -> None:
        """Note a block, in place of the oldest one if there is no room."""
        if self.most and len(self.names) == self.most:
            self.are_lost = True
        self.names.append(name)

    def take(self) -> tuple[list[str], bool]:
        """Return the names noted since the last call, and whether some were lost."""
        are_lost, self.are_lost = self.are_lost, False
        names: list[str] = []
        with contextlib.suppress(IndexError):  # another thread may take some
            while True:
                names.append(self.names.popleft())
        return names, are_lost


def _some(tokens: Tokens) -> Arrays:
    """Return tokens as arrays. Raise ValueError for an empty prompt."""
    given = arrays_of(tokens)
    if not len(given[0]):
        raise ValueError("tokens is empty: a prompt has at least one token")
    return given


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


def _check_secret(secret: object, store: object) -> None:
    if not isinstance(secret, bytes | None):
        raise TypeError(f"secret is a {type(secret).__name__}: bytes are needed, or None for values without a MAC")
    if secret == b"":
        raise ValueError("secret=b'': must not be empty; None stores values without a MAC")
    if secret is not None and store is None:
        raise ValueError("secret is given without a store: it protects what is in one")


def _check_rope(cache: KVCache) -> None:
    for i, layer in enumerate(cache._layers):
        if layer.rope is None and layer.policy is not None:
            raise NotSupportedError(
                f"reuse_min_tokens moves tokens, and the keys of layer {i} may have to be rotated: make the cache with"
                " rope=Rope(...), or rope=False if they carry no rotation, or leave reuse_min_tokens out"
            )


def _seconds(timeout: SupportsFloat) -> float:
    """Return a timeout as a float; raise ValueError if it is negative or NaN."""
    seconds = to_float(timeout, "timeout")
    if not seconds >= 0:
        raise ValueError(f"timeout={timeout!r}: must be a number of seconds of at least 0")
    return seconds


def _ttl(seconds: SupportsFloat | None) -> int:
    """Return milliseconds, rounded up; 0: without end."""
    if seconds is None:
        return 0
    number = to_float(seconds, "ttl")
    if not 0 < number <= 1e12:
        raise ValueError(f"ttl={seconds!r}: must be a number of seconds above 0, and at most 1e12; None is without end")
    return math.ceil(number * 1000)


def _check_store(store: object) -> None:
    """Raise TypeError for what is no mutable mapping; for one by its methods alone, it need not say that it is."""
    methods = ("__getitem__", "__setitem__", "__delitem__")
    if isinstance(store, Sequence) or not all(hasattr(type(store), name) for name in methods):
        raise TypeError(
            f"store is a {type(store).__name__}: a mutable mapping of str to bytes is needed, such as"
            " kvcache.stores.open returns"
        )
