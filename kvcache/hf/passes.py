"""`Passes`: the forward passes of a model through a cache, the batch of the pass that runs, and whose turn it is.

A pass is complete when it has been through every layer. It ends later, when its batch is committed or aborted. A column
is a place in the texts, padding included. Leading padding is not stored: the offset of a row of the batch is the column
of its first token, whose position is 0. A source is an encoder's rows.
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from kvcache import _core, selecting
from kvcache.arrays import Layout
from kvcache.batch import Batch
from kvcache.cache import KVCache
from kvcache.errors import CacheBusyError, NotSupportedError
from kvcache.eviction import Queries
from kvcache.hf.prompts import Prompts
from kvcache.hf.told import count_leading, masked_ranges, refuse_batch, refuse_padding, shown_columns
from kvcache.layer import count
from kvcache.policy import CrossAttention, FullAttention
from kvcache.threads import Condition
from kvcache.warning import warn

STALLED = 300.0  # seconds in which another thread's pass reaches no layer, after which it is taken for lost
LOOK_AGAIN = 0.05  # seconds
LONG = 2.0  # seconds without progress after which garbage is collected, once
T = TypeVar("T")


class Turns:
    """Knows whose batch is open, and hands out ids that no sequence has.

    A `KVCache` has one open batch at a time, and an `HFCache` keeps its batch open until somebody asks for its tokens.
    So a pass that begins ends the complete pass before it, whichever cache made it. It waits for a pass that runs in
    another thread, and for a batch whose cache another thread is collecting.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the passes of all caches
        self.changed = Condition(self.lock)  # told when one is complete or ends
        self.new_id: Callable[[], int] = itertools.count().__next__  # returns an id that no sequence has
        self.owner: Callable[[], Passes | None] = lambda: None  # returns the passes whose batch is open, if any

    @classmethod
    def of(cls, cache: KVCache) -> Turns:
        """Return the `Turns` of a cache, which its prefix caches use as well. It must not keep the cache alive."""
        with _lock:
            turns = _known.setdefault(cache, cls())
            turns.new_id = partial(_core.new_sequence, cache._core)
            return turns

    def take_turn(self, passes: Passes) -> None:
        """Make these the passes whose batch is open; call it with `lock` held."""
        begin, has_collected = time.monotonic(), False
        while (owner := self.owner()) is not None and owner is not passes and owner.runs_elsewhere():
            since = owner.last_active()
            del owner  # so that it can be collected
            self.changed.wait(LOOK_AGAIN)
            idle = time.monotonic() - max(begin, since)
            if idle > LONG and not has_collected:
                has_collected = True
                gc.collect()  # a pass that failed ends with its cache, which may lie in a cycle, such as a traceback's
            if idle > STALLED:
                raise CacheBusyError(
                    f"another thread's forward pass has reached no layer for {STALLED:.0f} s: if it failed, reset its"
                    " HFCache"
                )
        if owner is not None and owner is not passes:
            owner.end_for_other()
        self.owner = weakref.ref(passes)

    def patiently(self, call: Callable[[], T]) -> T:
        """Call what an open batch refuses, with `lock` held. Wait for a batch without an owner."""
        deadline = time.monotonic() + STALLED
        while True:
            try:
                return call()
            except CacheBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_AGAIN)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[KVCache, Turns] = weakref.WeakKeyDictionary()


def clear_finally(cache: KVCache, seq_ids: Iterable[int]) -> None:
    """Clear sequences from a finalizer, which may run in the middle of anything: without a lock of Python's."""
    if cache._core.closed:
        return
    for seq_id in seq_ids:
        cache._core.clear(seq_id, cache._edits)


OF_ONE_THREAD = "two threads cannot use one HFCache at once: give each its own, or a copy.deepcopy(cache)"


class ForwardPass:
    """The state of one forward pass: its batch, its padding, and the layers it has been through.

    A pass begins when its first layer brings keys (`Passes.reach`). Its batch is opened by the first attention, whose
    mask says which tokens are leading padding, or by the first operation on a layer's keys (`Passes.open`). It ends
    when the next pass begins, or when stored tokens are asked for (`Passes.end`, `Passes.finish`). Its tokens stay if
    it has been through every layer.
    """

    # Set by `Passes.open`.
    num_tokens: int  # tokens of each sequence, padding included
    not_padding: torch.Tensor | None  # [batch, tokens] of bool, False: leading padding; None: there is none
    offsets: list[int]  # the column of each sequence's position 0
    num_seen: int  # tokens of each sequence before the pass, padding included
    selects: bool  # whether its tokens select rows, in layers with sketches

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.is_open = False
        self.batch: Batch | None = None  # of an open pass, None: all tokens are leading padding
        self.brings_sequences = False  # whether there were none before
        self.thread = threading.get_ident()
        self.last_active = time.monotonic()  # when it reached a layer
        self.begun: set[int] = set()  # layers that have brought keys, or attended
        self.done: set[int] = set()  # layers that have stored the new tokens, or attended
        self.decoded: set[int] = set()  # layers whose rows were made dense tensors
        self.without_kernels: set[int] = set()  # layers that the kernels cannot attend over, whatever the mask is
        # Rows that neither the attention nor the model has used yet, by layer: [batch, heads, tokens, dim].
        self.pending: dict[int, tuple[torch.Tensor, ...]] = {}
        self.leaves_rows = False  # whether the model left a layer's rows unused, and attends to others
        self.is_read = False  # whether layers may still read rows that earlier layers brought
        self.masked: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]]]] = {}  # id of a mask: it, and its ranges

    def drop_padding(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack tensors ``[batch, heads, tokens, dim]`` to ``[tokens, heads, dim]`` if there is leading padding."""
        if self.not_padding is None:
            return tensors
        return tuple(x.transpose(1, 2)[self.not_padding] for x in tensors)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pack a tensor ``[batch, tokens, ...]`` to ``[tokens, ...]``, without leading padding."""
        packed = tensor.flatten(0, 1) if self.not_padding is None else tensor[self.not_padding]
        return packed.contiguous()

    @property
    def layout(self) -> Layout:
        """The layout of the tensors that `drop_padding` returns."""
        return "BHTD" if self.not_padding is None else "THD"

    def kept(self, num_back: int) -> list[int]:
        """Return the indices in the batch of all tokens except those in the last `num_back` columns.

        The batch has the tokens of all rows, row by row, without leading padding.
        """
        columns = torch.arange(self.num_tokens).expand(len(self.offsets), -1)
        if self.not_padding is not None:
            columns = columns[self.not_padding]
        kept: list[int] = (columns.flatten() < self.num_tokens - num_back).nonzero()[:, 0].tolist()
        return kept

    @property
    def is_complete(self) -> bool:
        """Whether the pass has been through every layer."""
        left = len(self.pending) if self.leaves_rows else 0
        return len(self.done) + left == self.num_layers


class Passes:
    """The passes that a model makes through the layers of a cache, one after the other, and the sequences they fill.

    `turns` is what the caches on these rows share. `has_readers` says whether some layers of the model have no rows,
    and attend to the rows of earlier layers. `select` is the argument of `HFCache`, kept as `num_selected`. `num_rows`
    counts the layers of rows: those behind them hold what lies beside rows, such as an indexer's keys. `config` is the
    model's. `last` is the pass that runs, or ran last; None: that one has ended. `num_seen` counts the columns of ended
    passes.
    """

    def __init__(
        self, cache: KVCache, turns: Turns, has_readers: bool, select: int | None, num_rows: int,
        config: PreTrainedConfig,
    ) -> None:  # fmt: skip
        self.cache, self.turns, self.has_readers, self.num_selected = cache, turns, has_readers, select
        self.num_rows, self.config = num_rows, config
        self.layers = cache.layers
        self.is_called = False  # whether a call of the model runs, of which `note_call` was told
        self.last: ForwardPass | None = None  # that runs, or ran last
        self.queries: Queries | None = None  # of the tokens, for `HFCache.evict`; None: they are not noted
        self.seq_ids: list[int] = []  # the sequence of each batch index
        self.forget()
        self._num_layers = cache.num_layers  # those that a pass goes through
        self.is_source = [isinstance(layer.policy, CrossAttention) for layer in self.layers]  # over an encoder
        self.calls = {"kernel": 0, "dense": 0, "fallback": 0}  # how often a layer was attended over by each means
        if select is not None:
            self.calls["select"] = 0  # of the calls of kernels, those that selected rows
        self.has_warned = False  # that layers were attended without the kernels
        self.users: dict[object, int] = {}  # the thread of each call of `generate`; the first one has the cache
        self._first_layer: int | None = None  # the layer that forward passes begin with

    def forget(self) -> None:
        """Forget all tokens; the pass has ended, and the sequences were cleared."""
        self._forget_queries(self.seq_ids)
        self.seq_ids = []
        self.num_seen = 0  # tokens of each sequence, padding included: the columns of a mask
        self.num_last = 0  # those of them that the pass fed which ended last
        self.offsets: list[int] = []  # the column of each sequence's position 0: leading padding is not stored
        self.without_kernels: set[int] = set()  # of the pass that ended last
        self.prompts: Prompts | None = None  # what `HFCache.acquire` was told
        self.has_dropped = False  # whether tokens of a pass that failed were dropped

    def take(self, seq_ids: list[int], num_seen: int, offsets: list[int]) -> None:
        """Go on from sequences that hold so many columns; `offsets` are the columns of their positions 0."""
        self.seq_ids, self.num_seen, self.offsets = seq_ids, num_seen, offsets

    def fork(self) -> Self:
        """Return passes that go on from the same tokens; they share the rows, and copy none."""
        self.end()
        seq_ids = self.new_ids(len(self.seq_ids))
        other = copy.copy(self)
        other.is_called, other.users = False, {}
        other.seq_ids, other.calls = seq_ids, dict(self.calls)
        other.prompts = copy.copy(self.prompts)
        other.queries = copy.deepcopy(self.queries)
        for source, seq_id in zip(self.seq_ids, other.seq_ids, strict=True):
            other._fork(source, seq_id)
        other._forget_queries(self.seq_ids)
        return other

    def _fork(self, source: int, seq_id: int) -> None:
        """Let a new sequence go on from another one."""
        self.cache.fork(source, seq_id, missing_ok=True)
        if self.queries is not None:
            self.queries.fork(source, seq_id)

    def _forget_queries(self, seq_ids: Iterable[int]) -> None:
        """Forget the queries of these sequences, if any were noted."""
        if self.queries is not None:
            for seq_id in seq_ids:
                self.queries.forget(seq_id)

    def __del__(self) -> None:
        ended, self.last = self.last, None  # without a lock: this may run in the middle of anything
        if ended is not None and ended.batch is not None:
            ended.batch.abort()
        clear_finally(self.cache, self.seq_ids)  # instead of closing it: copies may still use the KVCache

    def new_ids(self, count: int) -> list[int]:
        """Return ids that no sequence has."""
        return [self.turns.new_id() for _ in range(count)]

    def select(self, batch_indices: list[int]) -> None:
        """Make a batch of the sequences at these indices; fork a sequence whose index occurs more than once.

        If it fails, nothing has changed, and `seq_ids` is the same list. After an interrupt behind the forks it is
        another one, of all sequences, so that they can be cleared.
        """
        before = self.seq_ids
        selected: list[int] = []
        forked: dict[int, int] = {}  # which sequence each goes on from
        for source in (before[i] for i in batch_indices):
            if source not in selected:
                selected.append(source)
                continue
            [seq_id] = self.new_ids(1)
            forked[seq_id] = source
            selected.append(seq_id)
        try:
            self.seq_ids = [*before, *forked]
            for seq_id, source in forked.items():
                self._fork(source, seq_id)
        except BaseException:
            for seq_id in forked:
                self.cache.clear(seq_id)
            self.seq_ids = before
            raise
        dropped = set(before) - set(selected)
        for seq_id in dropped:
            self.cache.clear(seq_id)
        self._forget_queries(dropped)
        self.seq_ids, self.offsets = selected, [self.offsets[i] for i in batch_indices]
        if self.prompts is not None:
            self.prompts.select(batch_indices, self.num_seen)

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it has no types; torch would trace NumPy
    def note_queries(
        self, queries: Queries, this_pass: ForwardPass, index: int, q: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Note queries ``[batch, heads, tokens, dim]`` of the last tokens of a pass."""
        end = self.num_seen + this_pass.num_tokens
        asked = {name: options.get(name) for name in ("scale", "softcap", "sinks")}
        if isinstance(asked["sinks"], torch.Tensor):
            asked["sinks"] = asked["sinks"].detach().float().numpy()
        for row, (seq_id, offset) in enumerate(zip(self.seq_ids, this_pass.offsets, strict=True)):
            num_tokens = min(q.shape[2], end - offset)  # without padding
            if num_tokens:
                of_row = q[row, :, q.shape[2] - num_tokens :].transpose(0, 1).detach().float().numpy()
                positions = np.arange(end - offset - num_tokens, end - offset)
                queries.note(index, of_row, positions, seq_id=seq_id, **asked)

    def keep_positions(self, kept: Sequence[NDArray[np.int32]]) -> None:
        """Drop the rows of each sequence except those at some positions, and give the memory of the others back."""
        with self.turns.lock:  # until memory is given back, no other cache may open a batch
            self.turns.take_turn(self)
            for seq_id, positions in zip(self.seq_ids, kept, strict=True):
                self.cache.keep_positions(positions, seq_id=seq_id)
            self.turns.patiently(self.cache.compact)

    def check_evictable(self) -> None:
        """Raise NotSupportedError if the model could not go on without some of the tokens."""
        if self.num_rows < self.cache.num_layers:
            raise NotSupportedError("an indexer of the model chooses rows: tokens cannot be evicted beside it")
        if self.without_kernels:
            raise NotSupportedError(
                f"layer {min(self.without_kernels)} attended with dense tensors in the last pass: the model computes"
                " with the rows first, or adds a bias to the scores, or its attention is not 'kvcache'. Only the"
                " kernels know which rows are left, so tokens cannot be evicted"
            )

    @property
    def has_gaps(self) -> bool:
        """Whether tokens were evicted, so that rows are not side by side, or the last ones are missing."""
        full = next((i for i, layer in enumerate(self.layers) if layer.policy == FullAttention()), None)
        if full is None:
            return False
        ends = zip(self.seq_ids, (self.num_seen - offset for offset in self.offsets), strict=True)
        return any(self.cache.seq_len(i, layer=full) < max(end, self.cache.next_position(i)) for i, end in ends)

    # ---- whose turn it is

    def check_user(self) -> None:
        """Raise CacheBusyError if another thread generates with the cache."""
        thread = threading.get_ident()
        if [*self.users.values(), thread][0] != thread:
            raise CacheBusyError(f"another thread generates with this HFCache: {OF_ONE_THREAD}")

    def runs_elsewhere(self) -> bool:
        """Whether a pass runs in another thread."""
        running = self.last
        if running is None or running.thread == threading.get_ident():
            return False
        return running.is_read or len(running.done) != running.num_layers

    def note_call(self, is_called: bool) -> None:
        """Note that a call of the model begins, or has ended. No layer reads rows after its end."""
        with self.turns.lock:
            self.is_called = is_called
            if self.last is not None:
                self.last.is_read = False
            self.turns.changed.notify_all()

    def last_active(self) -> float:
        """Return when the pass reached a layer, by ``time.monotonic``."""
        return 0.0 if self.last is None else self.last.last_active

    def end_for_other(self) -> None:
        """End the pass because a pass of another cache begins in the same memory."""
        self._warn_unfinished()
        self.end()

    # ---- a pass

    def reach(self, index: int, rows: tuple[torch.Tensor, ...] = ()) -> ForwardPass:
        """Return the pass that reaches a layer, and take the rows that the layer brings.

        transformers does not say where a pass begins. All begin with the same layer, whether the last one was complete
        or ended in an error.
        """
        with self.turns.lock:
            if self._first_layer is None:
                self._first_layer = index
            this_pass = self.last
            if this_pass is None or index == self._first_layer or index in this_pass.begun:
                this_pass = self._next(index, rows)
            elif this_pass.thread != threading.get_ident():
                raise CacheBusyError(f"layer {index} goes on with the pass of another thread: {OF_ONE_THREAD}")
            elif this_pass.pending and index < self.num_rows:  # the model attended to other keys than it was given
                this_pass.leaves_rows = True
                self._put_pending(this_pass)
            this_pass.begun.add(index)
            this_pass.last_active = time.monotonic()
            if rows:
                this_pass.pending[index] = rows
            return this_pass

    def _next(self, index: int, rows: tuple[torch.Tensor, ...]) -> ForwardPass:
        """End the last pass, and begin another one with a layer, which brings these rows."""
        if self.users:
            self.check_user()
        begun = ForwardPass(self._num_layers)
        begun.is_read = self.has_readers and self.is_called
        last = self.last
        if last is not None and not last.is_complete:
            if not self.is_source[index]:
                _check_fed_again(last, rows[0].shape[2])
            self._warn_unfinished()
        self.end()
        if index != self._first_layer:
            raise RuntimeError(
                f"layer {index} brings keys in a forward pass without layer {self._first_layer}: the model"
                " runs a layer twice, or the cache, or a copy of it, was used by others before the pass ended"
            )
        self.last = begun
        return begun

    def _warn_unfinished(self) -> None:
        """Warn if the last pass left layers out, so that its tokens are dropped."""
        if self.last is not None and not self.last.is_complete:
            warn(
                f"kvcache: the last forward pass went through {len(self.last.done)} of {self.last.num_layers} layers,"
                " and its tokens were dropped: it failed, a copy of the cache was used before it ended, or the cache"
                " was made from another model's config"
            )

    def warn(self, what: str) -> None:
        """Warn that the kernels do not attend, once for a cache and its copies."""
        if not self.has_warned:
            self.has_warned = True
            warn(f"kvcache: {what}")

    def open(self, this_pass: ForwardPass, batch_size: int, num_tokens: int, padding: torch.Tensor | None) -> None:
        """Begin the batch of a pass; leave out the padding before a row's first token."""
        self.check_batch_size(batch_size)
        if not self.seq_ids:
            this_pass.brings_sequences = True
            self.seq_ids, self.offsets = self.new_ids(batch_size), [0] * batch_size
        leading = [0] * batch_size
        if padding is None and self.prompts is not None and self.num_seen < self.prompts.most_leading:
            padding = self.prompts.mask  # a model's own attention does not hand it to the cache
        if padding is not None:
            new = shown_columns(padding[:, self.num_seen :], num_tokens)
            counts = zip(count_leading(new), self.offsets, strict=True)
            leading = [count if offset == self.num_seen else 0 for count, offset in counts]
        positions: list[int] = []
        seq_ids: list[int] = []
        offsets: list[int] = []
        for seq_id, offset, left_out in zip(self.seq_ids, self.offsets, leading, strict=True):
            begin = self.num_seen - offset
            positions.extend(range(begin, begin + num_tokens - left_out))
            seq_ids.extend([seq_id] * (num_tokens - left_out))
            offsets.append(offset + left_out)
        if self.prompts is not None:
            self.prompts.check_leading(offsets, self.num_seen + num_tokens)
        this_pass.not_padding = torch.arange(num_tokens) >= torch.tensor(leading)[:, None] if any(leading) else None
        this_pass.num_tokens, this_pass.offsets, this_pass.num_seen = num_tokens, offsets, self.num_seen
        shortest = self.num_seen + num_tokens - max(offsets, default=0)
        is_prompt = self.prompts is not None and self.num_seen < self.prompts.end
        this_pass.selects = (
            self.num_selected is not None
            and num_tokens == 1
            and not is_prompt
            and shortest >= selecting.least_tokens(self.num_selected)
        )
        with self.turns.lock:
            if self.turns.owner() is not self:
                self.turns.take_turn(self)
            if positions:  # no other variable has the batch: an exception's traceback would keep it open
                this_pass.batch = self.cache.batch(positions=positions, seq_ids=seq_ids, timeout=STALLED)
        this_pass.is_open = True
        if self.prompts is not None:
            self.prompts.note_inexact(self.seq_ids, self.num_seen, num_tokens)

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the end of a first pass."""
        self.finish()
        is_first = self.last is not None and self.last.brings_sequences
        return -1 if is_first else len(self.seq_ids) or -1

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError if the cache holds more or fewer rows."""
        if self.seq_ids and len(self.seq_ids) != batch_size:
            refuse_batch(batch_size, len(self.seq_ids))

    def masked(self, this_pass: ForwardPass, padding: torch.Tensor | None) -> list[tuple[int, int, int]]:
        """Return the positions that a mask hides; raise if it shows padding that was not stored."""
        num_columns, offsets = self.num_seen + this_pass.num_tokens, this_pass.offsets
        if padding is None:
            padding = torch.ones(len(offsets), num_columns, dtype=torch.bool)
        known = this_pass.masked.get(id(padding))
        if known is not None:
            return known[1]
        shown = shown_columns(padding, num_columns)
        for row, (columns, offset) in enumerate(zip(shown, offsets, strict=True)):
            if columns[:offset].any():
                refuse_padding(row, offset)
        ranges = masked_ranges(shown, self.seq_ids, offsets)
        this_pass.masked[id(padding)] = padding, ranges
        return ranges

    def note_done(self, this_pass: ForwardPass, index: int) -> None:
        """Note that a layer has stored the new tokens."""
        with self.turns.lock:
            this_pass.done.add(index)
            this_pass.last_active = time.monotonic()
            self.turns.changed.notify_all()

    def _put_pending(self, this_pass: ForwardPass) -> None:
        """Store the new rows of layers that the pass has been at."""
        for index in [*this_pass.pending]:
            self.put(this_pass, index)

    def put(self, this_pass: ForwardPass, index: int) -> None:
        """Store the new rows of a layer, without attending."""
        new = this_pass.pending[index]
        if not this_pass.is_open:
            self.open(this_pass, len(new[0]), new[0].shape[2], None)
        if self.is_source[index]:
            self.put_source(this_pass, index, *new)
        elif this_pass.batch is not None:
            this_pass.batch.put(index, *this_pass.drop_padding(*new), layout=this_pass.layout)
        del this_pass.pending[index]
        self.note_done(this_pass, index)

    def put_source(self, this_pass: ForwardPass, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store an encoder's rows."""
        assert this_pass.batch is not None
        for batch_index, seq_id in enumerate(self.seq_ids):
            this_pass.batch.put(index, k[batch_index], v[batch_index], seq_id=seq_id, layout="HTD")

    def finish(self) -> None:
        """End the last pass if it is complete; leave a pass that still runs."""
        with self.turns.lock:
            if self.last is not None and self.last.is_complete:
                self.end()

    @property
    def length(self) -> int:
        """The tokens of each sequence, with the tokens of the last pass if it is complete, padding included."""
        with self.turns.lock:  # another cache may end the pass
            last = self.last
            if last is None or not last.is_open or not last.is_complete:
                return self.num_seen
            return self.num_seen + last.num_tokens

    @property
    def num_open(self) -> int:
        """The tokens of each sequence in the last pass, padding included, if it is complete and has not ended."""
        with self.turns.lock:
            return self.length - self.num_seen

    def end(self, num_back: int = 0) -> None:
        """End the last pass: keep its tokens except the last `num_back` columns, or drop all if it is incomplete.

        An interrupt may come in the middle. The next call then ends the pass.
        """
        with self.turns.lock:
            ended = self.last
            if ended is None:
                return
            is_complete = ended.is_complete
            if is_complete and ended.pending:
                self._put_pending(ended)
            if ended.batch is not None:
                if is_complete:
                    ended.batch.commit(ended.kept(num_back) if num_back else None)
                else:
                    ended.batch.abort()
            if is_complete:
                self.num_last = ended.num_tokens - num_back
                self.num_seen = ended.num_seen + self.num_last
                self.offsets, self.without_kernels = ended.offsets, ended.without_kernels
            else:
                if ended.brings_sequences:
                    self.forget()
                self.has_dropped = True
            self.last = None
            self.turns.changed.notify_all()


def _check_fed_again(last: ForwardPass, num_tokens: int) -> None:
    """Raise if a pass of so many tokens seems to follow the tokens of a pass that left layers out.

    A pass that fails within a layer leaves that layer unfinished. A pass that fails between two layers looks like a
    pass of a model with fewer layers. Then the same number of tokens is taken for the same tokens, fed again; any other
    number is refused.
    """
    if last.begun == last.done and last.num_tokens != num_tokens:
        raise ValueError(
            f"the last forward pass went through {len(last.done)} of {last.num_layers} layers, and what it fed"
            f" ({count(last.num_tokens, 'token')}) was dropped: if the model has no more layers, give HFCache"
            " model.config; if the pass failed, call crop(0), then feed it again"
        )
