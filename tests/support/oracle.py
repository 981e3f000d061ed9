"""The oracle: what kvcache means, written with dictionaries and lists: slow, small, and meant to be read.

The names and arguments are those of the package. A sequence is, per layer, a list of rows; nothing here knows of
blocks, runs, threads or element types, nor of the package itself: errors and policies correspond by name.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

MAX_POSITION = 2**31 - 2


class KVCacheError(Exception): ...


class CacheFullError(KVCacheError): ...


class CacheBusyError(KVCacheError): ...


class RowsGoneError(KVCacheError): ...


class NotSupportedError(KVCacheError, NotImplementedError): ...


@dataclass(frozen=True)
class FullAttention:
    def lowest(self, q):
        """The first position that a query at q may see, sinks aside."""
        return 0

    def retained(self, low):
        """Return the first position that is kept, sinks aside, if no query will stand below `low`."""
        return 0

    def is_sink(self, p):
        return False

    @property
    def most_rows(self):
        """The most rows that are kept of a sequence with one at each position."""
        return math.inf


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    window: int
    num_sink_tokens: int = 0
    resume_window: int | None = None

    def lowest(self, q):
        return max(0, q - self.window + 1)

    def retained(self, low):
        return max(0, low - (self.resume_window or self.window) + 1)

    def is_sink(self, p):
        return p < self.num_sink_tokens

    @property
    def most_rows(self):
        return (self.resume_window or self.window) + self.num_sink_tokens


@dataclass(frozen=True)
class ChunkedAttention(FullAttention):
    attention_chunk_size: int
    resume_window: int | None = None

    def lowest(self, q):
        return q - q % self.attention_chunk_size

    def retained(self, low):
        return max(0, self.lowest(low) - (self.resume_window or 0))

    @property
    def most_rows(self):
        return self.attention_chunk_size + (self.resume_window or 0)


@dataclass(frozen=True)
class CrossAttention:
    max_len: int


@dataclass
class Row:
    position: int
    k: np.ndarray  # [num_kv_heads, k_dim], as given
    v: np.ndarray
    delta: int = 0  # position now, less the position k was rotated at
    slot: object = field(default_factory=object)  # shared by forks: what capacity counts


def removed(lost, begin, end, shift):
    """Where expired rows stood after positions [begin, end) were removed, like stored ones."""
    first, last = lost[0], lost[1] - 1
    down = end - begin if shift else 0
    below = [p for p in (first, min(last, begin - 1)) if first <= p <= last and p < begin]
    above = [p - down for p in (max(first, end), last) if first <= p <= last and p >= end]
    return (min(below + above), max(below + above) + 1) if below + above else (0, 0)


def within_capacity(edit):
    """An edit that copies shared rows, and is refused where more slots than `capacity` would then be live."""

    def wrapper(self, *args, **kwargs):
        rows = [{s: [replace(r) for r in held] for s, held in layer.items()} for layer in self.rows]
        lost = [dict(each) for each in self.lost]
        result = edit(self, *args, **kwargs)
        batch = self.open_batch
        pending = len(batch.positions) if batch else 0
        copied = [i for i in self.layers if self.slots_of(self.rows[i]) - self.slots_of(rows[i])]
        if self.capacity is not None and any(self.live(i) + pending > self.capacity for i in copied):
            self.rows, self.lost = rows, lost
            raise CacheFullError("capacity")
        return result

    return wrapper


class KVCache:
    """rope: None (not told), False (keys carry no rotation) or a function (layer, keys[heads, n, dim], delta).

    rewrites: whether keys are moved as they are shifted; else when they are next read, or settled. It only decides on
    which slots sequences go on sharing.
    """

    def __init__(
        self, num_layers, num_kv_heads, head_dim, max_seq_len, *, v_head_dim=None, value_in_key=False,
        policy=FullAttention(), share=None, rope=None, rewrites=False, max_sequences=1, capacity=None, **_,
    ):  # fmt: skip
        self.policy = list(policy) if isinstance(policy, list | tuple) else [policy] * num_layers
        self.heads, self.dims = num_kv_heads, (head_dim, v_head_dim or head_dim)
        self.rope, self.max_seq_len, self.max_sequences = rope, max_seq_len, max_sequences
        self.value_in_key, self.rewrites = value_in_key, rewrites
        limited = capacity is None and None not in (max_seq_len, max_sequences)
        self.capacity = max_seq_len * max_sequences if limited else capacity
        self.own_capacity = None in (max_seq_len, max_sequences) or self.capacity != max_seq_len * max_sequences
        self.source = [i if s is None else s for i, s in enumerate(share or [None] * num_layers)]  # whose rows it reads
        self.layers = [i for i in range(num_layers) if self.source[i] == i and self.keeps_tokens(i)]
        self.rows = [{} for _ in self.policy]  # layer -> {seq_id: [Row, in order of arrival]}
        self.lost = [{} for _ in self.policy]  # layer -> {seq_id: (begin, end): all expired rows stood there}
        self.open_batch = None

    def keeps_tokens(self, layer):
        return not isinstance(self.policy[layer], CrossAttention | None)

    # ---- looking

    @property
    def sequences(self):
        return sorted({s for layer in self.layers for s, rows in self.rows[layer].items() if rows})

    def held(self, layer, seq_id):
        return self.rows[self.source[layer]].get(seq_id, [])

    def positions(self, *, seq_id=0, layer=0):
        return [r.position for r in self.held(layer, seq_id)]

    def seq_len(self, seq_id=0, *, layer=None):
        layers = self.layers if layer is None else [layer]
        return max((len(self.held(i, seq_id)) for i in layers), default=0)

    def positions_in(self, seq_id, layer):
        """Return the positions of a sequence's rows in a layer; None: in any that holds tokens."""
        layers = self.layers if layer is None else [layer]
        return [p for i in layers for p in self.positions(seq_id=seq_id, layer=i)]

    def first_position(self, seq_id=0, *, layer=None):
        return min(self.positions_in(seq_id, layer), default=-1)

    def last_position(self, seq_id=0, *, layer=None):
        return max(self.positions_in(seq_id, layer), default=-1)

    def next_position(self, seq_id=0):
        """The position behind all tokens, expired ones included."""
        return max([self.last_position(seq_id) + 1] + [self.lost_at(i, seq_id)[1] for i in self.layers])

    def lost_at(self, layer, seq_id):
        return self.lost[layer].get(seq_id, (0, 0))

    def misses(self, position, seq_id, below=MAX_POSITION + 1):
        """Return whether a query at this position would miss expired rows below another."""
        lost = [(*self.lost_at(i, seq_id), self.policy[i]) for i in self.layers]
        return any(
            begin < min(below, end) and (policy.lowest(position) < end or policy.is_sink(begin))
            for begin, end, policy in lost
        )

    def can_resume(self, position, *, seq_id=0):
        return not self.layers or (position <= self.next_position(seq_id) and not self.misses(position, seq_id))

    def get(self, layer, position, *, seq_id=0):
        found = [r for r in self.held(layer, seq_id) if r.position == position]
        return (self.key(layer, found[-1]), found[-1].v) if found else None

    def key(self, layer, row):
        if not row.delta or not callable(self.rope):
            return row.k
        return self.rope(self.source[layer], row.k[:, None], row.delta)[:, 0]

    def gather(self, layer, *, seq_id=0):
        """Keys and values, each [num_kv_heads, n, dim]."""
        return self.stacked(layer, self.held(layer, seq_id))

    def stacked(self, layer, rows):
        none = [np.zeros((self.heads, 0, dim), np.float32) for dim in self.dims]
        if not rows:
            return none
        return np.stack([self.key(layer, r) for r in rows], 1), np.stack([r.v for r in rows], 1)

    def extract(self, layer, begin, end, *, seq_id=0):
        k, v = (np.zeros((self.heads, end - begin, dim), np.float32) for dim in self.dims)
        for row in self.held(layer, seq_id):
            if begin <= row.position < end:
                k[:, row.position - begin], v[:, row.position - begin] = self.key(layer, row), row.v
        return k, v

    def live(self, layer, held=None):
        """How many slots the sequences hold in a layer, or these rows take; shared ones are counted once."""
        return len(self.slots_of(self.rows[layer] if held is None else held))

    @staticmethod
    def slots_of(held):
        return {id(r.slot) for rows in held.values() for r in rows}

    # ---- editing

    def check_idle(self, *seq_ids):
        if self.open_batch and set(seq_ids) & set(self.open_batch.seq_ids):
            raise CacheBusyError("the sequence belongs to the open batch")

    def known(self):
        """Every sequence that there is anything to know of."""
        batch = set(self.open_batch.seq_ids) if self.open_batch else set()
        return batch.union(*self.rows)

    def clear(self, seq_id=None):
        gone = self.known() if seq_id is None else {seq_id}
        self.check_idle(*gone)
        for table in (*self.rows, *self.lost):
            for s in gone:
                table.pop(s, None)

    def keep(self, seq_id):
        gone = self.known() - {seq_id}
        self.check_idle(*gone)
        for s in gone:
            self.clear(s)

    def check_cut(self, seq_id, length):
        """Raise if a token at `length` would miss expired rows, once those from there on are dropped."""
        if length < self.next_position(seq_id) and self.misses(length, seq_id, below=length):
            raise RowsGoneError(f"sequence {seq_id} cannot go on at {length}")

    def copy_prefix(self, src, dst, length):
        if src == dst or length < 0:
            raise ValueError("src and dst are the same sequence, or length is negative")
        self.check_idle(src, dst)
        if length:
            self.check_known(src)
        self.check_cut(src, length)
        shared = {i: [replace(r) for r in self.held(i, src) if r.position < length] for i in self.layers}
        lost = {i: removed(self.lost_at(i, src), length, MAX_POSITION + 1, False) for i in self.layers}
        self.become(dst, src, shared, lost)

    def check_known(self, src):
        if not self.next_position(src) and not any(rows.get(src) for rows in self.rows):
            raise ValueError(f"sequence {src} holds nothing")

    def fork(self, src, dst):
        if src == dst:
            raise ValueError("src and dst are the same sequence")
        self.check_idle(src, dst)
        self.check_known(src)
        shared = {i: [replace(r) for r in self.held(i, src)] for i in self.layers}
        self.become(dst, src, shared, {i: self.lost_at(i, src) for i in self.layers})

    def become(self, dst, src, shared, lost):
        self.clear(dst)
        self.put_back(dst, shared, lost)
        for i, policy in enumerate(self.policy):
            if isinstance(policy, CrossAttention) and src in self.rows[i]:
                self.rows[i][dst] = self.rows[i][src]

    def share_range(self, src, dst, begin=0, end=None):
        if src == dst or begin < 0 or (end is not None and end < begin):
            raise ValueError("src and dst are the same sequence, or no range of positions")
        self.check_idle(src, dst)
        if begin == 0 and end is None and not self.next_position(dst) and not any(rows.get(dst) for rows in self.rows):
            self.check_known(src)  # it is a fork
        end = MAX_POSITION + 1 if end is None else end
        rows, lost = {}, {}
        for i in self.layers:
            own, shared = self.held(i, dst), [r for r in self.held(i, src) if begin <= r.position < end]
            same = {(r.position, id(r.slot)) for r in own} & {(r.position, id(r.slot)) for r in shared}
            if {r.position for r in own if (r.position, id(r.slot)) not in same} & {r.position for r in shared}:
                raise ValueError("dst holds another row at a position")
            rows[i] = own + [replace(r) for r in shared if (r.position, id(r.slot)) not in same]
            lost[i] = self.gone_with(i, dst, begin, end, self.lost_at(i, src), self.lost_at(i, dst))
        self.put_back(dst, rows, lost)
        for i, policy in enumerate(self.policy):
            if isinstance(policy, CrossAttention) and src in self.rows[i] and begin < end:
                self.rows[i].setdefault(dst, self.rows[i][src])

    def gone_with(self, layer, dst, begin, end, theirs, ours):
        """Where rows that are gone from dst stood once it shares those of src at [begin, end): see `lost`.

        Where dst holds rows of its own, it lacks none of src's; that is looked at from both ends.
        """
        gone = [max(theirs[0], begin), min(theirs[1], end)]
        own = {r.position for r in self.held(layer, dst)}
        while gone[0] < gone[1] and gone[0] in own:
            gone[0] += 1
        while gone[0] < gone[1] and gone[1] - 1 in own:
            gone[1] -= 1
        ranges = [(begin, end) for begin, end in (gone, ours) if begin < end]
        return min((begin for begin, _ in ranges), default=0), max((end for _, end in ranges), default=0)

    def truncate(self, length, *, seq_id=0):
        self.remove(length, None, seq_id=seq_id)

    @within_capacity
    def remove(self, begin=0, end=None, *, seq_id=0, shift=True):
        if begin < 0 or (end is not None and end < begin):
            raise ValueError("no range of positions")
        self.check_idle(seq_id)
        moves = shift and end is not None and self.last_position(seq_id) >= end
        if moves and self.rope is None:
            raise NotSupportedError("later tokens would move: give rope")
        if end is None or end >= self.next_position(seq_id):
            self.check_cut(seq_id, begin)
        had = self.next_position(seq_id) or (begin == 0 and end != 0)
        kept, lost = {}, {}
        for i in self.layers:
            kept[i] = [r for r in self.held(i, seq_id) if r.position < begin or (end is not None and r.position >= end)]
            lost[i] = removed(self.lost_at(i, seq_id), begin, MAX_POSITION + 1 if end is None else end, shift)
        self.put_back(seq_id, kept, lost)
        self.end_without_tokens(seq_id, had)
        if moves and begin < end:
            self.move(end, None, seq_id, lambda p: p + begin - end, move_lost=False, rewrites=self.rewrites)

    @within_capacity
    def shift(self, begin, end, delta, *, seq_id=0):
        self.check_move(begin, end, seq_id)
        inside = [r.position for i in self.layers for r in self.held(i, seq_id) if begin <= r.position < (end or 2**31)]
        if delta > 0 and max(inside, default=-delta) + delta > MAX_POSITION:
            raise ValueError("a position would pass the largest")
        if delta:
            self.move(begin, end, seq_id, lambda p: p + delta, move_lost=True, rewrites=self.rewrites)

    @within_capacity
    def divide(self, begin, end, divisor, *, seq_id=0):
        if divisor < 1:
            raise ValueError("divisor")
        self.check_move(begin, end, seq_id)
        if divisor > 1:
            self.move(begin, end, seq_id, lambda p: p // divisor, move_lost=True, rewrites=callable(self.rope))

    def check_move(self, begin, end, seq_id):
        if begin < 0 or (end is not None and end < begin):
            raise ValueError("no range of positions")
        if self.rope is None and self.layers:
            raise NotSupportedError("give rope")
        self.check_idle(seq_id)

    @within_capacity
    def settle(self):
        if self.open_batch:
            raise CacheBusyError("a batch is open")
        for i in self.layers if callable(self.rope) else []:
            deltas = {}  # of each slot, as the sequences see it
            for r in (r for rows in self.rows[i].values() for r in rows):
                deltas.setdefault(id(r.slot), set()).add(r.delta)
            for rows in self.rows[i].values():
                rows[:] = [self.settled(i, r, len(deltas[id(r.slot)]) > 1) for r in rows]

    def settled(self, layer, row, copied):
        """The row with its key moved; in a slot of its own, if it is copied for that."""
        if not row.delta:
            return row
        return replace(row, k=self.key(layer, row), delta=0, slot=object() if copied else row.slot)

    @within_capacity
    def inject(self, layer, begin, k, v=None, *, seq_id=0, skip_missing=False):
        if self.source[layer] != layer or self.policy[layer] is None:
            raise ValueError("no rows of its own")
        if isinstance(self.policy[layer], CrossAttention):
            raise NotSupportedError("put replaces its rows")
        self.check_idle(seq_id)
        rows = self.rows[layer].get(seq_id, [])
        latest = {r.position: i for i, r in enumerate(rows)}
        stored = [n for n in range(k.shape[1]) if begin + n in latest]
        if len(stored) < k.shape[1] and not skip_missing:
            raise IndexError("nothing is stored at some of the positions")
        for n in stored:
            i = latest[begin + n]
            key, value = np.array(k[:, n]), np.array(k[:, n, : self.dims[1]] if v is None else v[:, n])
            if rows[i].delta and callable(self.rope):
                key = self.rope(layer, key[:, None], -rows[i].delta)[:, 0]
            rows[i] = replace(rows[i], k=key, v=value)
        for i in self.layers:  # what other sequences hold too is copied for this one
            if self.policy[i] == self.policy[layer]:
                for row in self.rows[i].get(seq_id, []):
                    if begin <= row.position < begin + k.shape[1]:
                        row.slot = object()
        return len(stored)

    def move(self, begin, end, seq_id, to, move_lost, rewrites):
        def inside(p):
            return begin <= p and (end is None or p < end)

        def gone_to(first, last):
            """From the lowest to the highest of where [first, last) came to, if that is not below 0."""
            if not move_lost:
                return first, last
            ends = {first, last - 1, begin - 1, begin, -to(0)} | (set() if end is None else {end - 1, end})
            places = [to(p) if inside(p) else p for p in ends if first <= p < last]
            places = [p for p in places if p >= 0]
            return (min(places), max(places) + 1) if places else (0, 0)

        had = self.next_position(seq_id)
        moved, lost = {}, {}
        for i in self.layers:
            moved[i] = []
            for r in self.held(i, seq_id):
                p = to(r.position) if inside(r.position) else r.position
                if p < 0:
                    continue  # dropped
                row = replace(r, position=p, delta=r.delta + p - r.position)
                if rewrites and inside(r.position):
                    row = replace(self.settled(i, row, False), slot=object())
                moved[i].append(row)
            lost[i] = gone_to(*self.lost_at(i, seq_id))
        self.put_back(seq_id, moved, lost)
        self.end_without_tokens(seq_id, had)

    def end_without_tokens(self, seq_id, had):
        """Forget a sequence that an edit has left nothing of the tokens that it had, an encoder's rows included."""
        if had and not self.next_position(seq_id):
            self.clear(seq_id)

    def put_back(self, seq_id, rows, lost):
        """A sequence that has no rows and has lost none is forgotten."""
        stays = any(rows.values()) or any(end for _, end in lost.values())
        for i in self.layers:
            for table, value in ((self.rows, rows[i]), (self.lost, lost[i])):
                if stays:
                    table[i][seq_id] = value
                else:
                    table[i].pop(seq_id, None)

    def fit(self, positions, seq_ids):
        """Return what every sequence keeps in each layer once these tokens begin; raise if they do not fit."""
        holding = {s for layer in self.rows for s, rows in layer.items() if rows}
        if self.max_sequences is not None and len(holding | set(seq_ids)) > self.max_sequences:
            raise CacheFullError("max_sequences")
        low = {s: max(0, self.next_position(s) - (s not in seq_ids)) for s in self.sequences}
        for p, s in zip(positions, seq_ids, strict=True):
            low[s] = min(low.get(s, p), p)
        kept = [{} for _ in self.rows]
        for i in self.layers:
            for s, rows in self.rows[i].items():
                kept[i][s] = self.retained(i, rows, low.get(s, 0))
            counted = len(positions)
            for s in set(seq_ids) if self.max_seq_len is not None else ():
                left = self.max_seq_len - len(kept[i].get(s, []))
                fed = [p for p, seq_id in zip(positions, seq_ids, strict=True) if seq_id == s]
                if self.stays_within(i, s, fed):
                    counted -= 0 if self.own_capacity else max(0, len(fed) - left)
                elif len(fed) > left:
                    raise CacheFullError("max_seq_len")
            if self.capacity is not None and self.live(i, kept[i]) + counted > self.capacity:
                raise CacheFullError("capacity")
        return kept

    def stays_within(self, layer, seq_id, fed):
        """Whether a layer holds at most `max_seq_len` rows once these tokens are committed, however many they are."""
        rows = [r.position for r in self.held(layer, seq_id)]
        lines = rows, [self.next_position(seq_id) - 1, *fed]
        rising = all(a < b for line in lines for a, b in itertools.pairwise(line))
        return rising and self.policy[layer].most_rows <= self.max_seq_len

    def expire_behind(self, seq_id):
        """Expire what a query in the place of a sequence's last token would not see."""
        low = max(0, self.next_position(seq_id) - 1)
        kept = [{} for _ in self.rows]
        for i in self.layers:
            if seq_id in self.rows[i]:
                kept[i][seq_id] = self.retained(i, self.rows[i][seq_id], low)
        self.expire(kept)

    def retained(self, layer, rows, low):
        """Return the rows that a layer keeps if no query will stand below `low`."""
        policy = self.policy[layer]
        return [r for r in rows if r.position >= policy.retained(low) or policy.is_sink(r.position)]

    def expire(self, kept):
        for i in self.layers:
            for s, rows in kept[i].items():
                gone = {r.position for r in self.rows[i][s]} - {r.position for r in rows}
                self.rows[i][s] = rows
                begin, end = self.lost_at(i, s)
                if gone:
                    self.lost[i][s] = min({*gone, begin} if end else gone), max(end, max(gone) + 1)

    def reserve(self, num_tokens, *, seq_id=0):
        """Expires as a batch does; whatever else it does cannot be seen here."""
        if self.open_batch:
            raise CacheBusyError("a batch is open")
        first = self.next_position(seq_id)
        if self.misses(first, seq_id):
            raise RowsGoneError("the next token")
        self.expire(self.fit(range(first, first + num_tokens), [seq_id] * num_tokens))

    def room(self, seq_id=0, most=200):
        """How many tokens fit, at most `most`: try one after the other."""
        if self.open_batch:
            raise CacheBusyError("a batch is open")
        first = self.next_position(seq_id)
        if self.misses(first, seq_id):
            return 0
        for n in range(1, most + 1):
            try:
                self.fit(range(first, first + n), [seq_id] * n)
            except CacheFullError:
                return n - 1
        return most

    def compact(self):
        if self.open_batch:
            raise CacheBusyError("a batch is open")

    # ---- a forward pass

    def batch(self, n=None, *, positions=None, seq_ids=None, parents=None):
        if n is not None:
            first = self.next_position(0)
            if n > min(self.max_seq_len or n, self.capacity or n) and not any(
                getattr(policy, "most_rows", math.inf) < math.inf for policy in self.policy
            ):
                raise CacheFullError("more than there is ever room for")
            positions = range(first, first + n)
        return Batch(self, list(positions), list(seq_ids or [0] * len(positions)), parents)


class Batch:
    def __init__(self, cache, positions, seq_ids, parents):
        self.cache, self.positions, self.seq_ids, self.parents = cache, positions, seq_ids, parents
        if not positions or len(positions) != len(seq_ids) or min(positions) < 0 or max(positions) > MAX_POSITION:
            raise ValueError("no token, not a sequence for each, or a bad position")
        for t, parent in enumerate(parents or []):
            if not (parent == -1 or (0 <= parent < t and seq_ids[parent] == seq_ids[t])):
                raise ValueError("no parent")
        if cache.open_batch:
            raise CacheBusyError("a batch is open")
        for p, s in zip(positions, seq_ids, strict=True):
            if cache.misses(p, s):
                raise RowsGoneError(f"position {p} of sequence {s} sees rows that have expired")
        cache.expire(cache.fit(positions, seq_ids))  # nothing can fail from here on
        self.rows = [[None] * len(positions) for _ in cache.rows]
        self.slots = [object() for _ in positions]
        self.encoded = [{} for _ in cache.rows]  # cross-attention layers: {seq_id: rows}
        cache.open_batch = self

    @property
    def open(self):
        return self.cache.open_batch is self

    def put(self, layer, k, v=None, *, first=0, seq_id=None):
        policy = self.cache.policy[layer]
        if self.cache.source[layer] != layer or policy is None:
            raise ValueError("no rows of its own")
        v = k[..., : self.cache.dims[1]] if v is None else v
        if isinstance(policy, CrossAttention):
            self.put_encoded(layer, k, v, seq_id)
            return
        if any(r is not None for r in self.rows[layer][first : first + len(k)]):
            raise ValueError("put before")
        for i in range(len(k)):
            t = first + i
            self.rows[layer][t] = Row(self.positions[t], np.array(k[i]), np.array(v[i]), slot=self.slots[t])

    def put_encoded(self, layer, k, v, seq_id):
        if seq_id is None and len(set(self.seq_ids)) > 1:
            raise ValueError("whose rows?")
        seq_id = self.seq_ids[0] if seq_id is None else seq_id
        if seq_id not in self.seq_ids:
            raise ValueError("not in the batch")
        if len(k) > self.cache.policy[layer].max_len:
            raise CacheFullError("max_len")
        self.encoded[layer][seq_id] = [Row(i, np.array(k[i]), np.array(v[i])) for i in range(len(k))]

    def rows_of(self, layer, seq_id):
        """Return a sequence's rows in a layer, in order of arrival, with their batch tokens (None: stored)."""
        layer = self.cache.source[layer]
        if seq_id in self.encoded[layer]:
            return [(r, None) for r in self.encoded[layer][seq_id]]
        rows = [(r, None) for r in self.cache.held(layer, seq_id)]
        own = enumerate(self.rows[layer])
        return rows + [(r, j) for j, r in own if r is not None and self.seq_ids[j] == seq_id]

    def sees(self, layer, i, j, position, causal, masked=()):
        """Whether token i of the batch sees a position, where token j of the batch stands, or None: a stored one."""
        policy, q = self.cache.policy[layer], self.positions[i]
        if any(s == self.seq_ids[i] and begin <= position < end for s, begin, end in masked):
            return False
        if isinstance(policy, CrossAttention):
            return True
        if j is not None and self.parents is not None:
            a = i
            while a not in (j, -1):
                a = self.parents[a]
            if a != j:
                return False
        elif causal and position > q:
            return False
        return position >= policy.lowest(q) or policy.is_sink(position)

    def dense(self, layer, *, non_causal=None, masked=None):
        """k, v [num_kv_heads, n, dim], mask [tokens, n]; the rows of each sequence in order of position."""
        if not self.open:
            raise ValueError("the batch has ended")
        n = len(self.positions)
        non_causal = [non_causal is True] * n if non_causal in (None, True) else non_causal
        all_rows = []
        for s in sorted(set(self.seq_ids)):
            all_rows += [(r, j, s) for r, j in sorted(self.rows_of(layer, s), key=lambda t: t[0].position)]
        mask = np.full((n, len(all_rows)), -np.inf)
        for i in range(n):
            for m, (r, j, s) in enumerate(all_rows):
                if s == self.seq_ids[i] and self.sees(layer, i, j, r.position, not non_causal[i], masked or ()):
                    mask[i, m] = 0
        return *self.cache.stacked(layer, [r for r, _, _ in all_rows]), mask

    def attend(self, layer, q, k=None, v=None, *, first=0, scale=None, non_causal=None, masked=None):
        """q [tokens, num_heads, k_dim] -> [tokens, num_heads, v_dim]; the plain softmax, in float64"""
        if k is not None:
            self.put(layer, k, v, first=first)
        k, v, mask = self.dense(layer, non_causal=non_causal, masked=masked)
        mask = mask[first : first + len(q)]
        group = q.shape[1] // k.shape[0]
        k, v = np.repeat(k, group, 0).astype(float), np.repeat(v, group, 0).astype(float)
        s = np.einsum("thd,hnd->thn", q.astype(float), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        s += mask[:, None]
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = p.sum(-1, keepdims=True)
        return np.einsum("thn,hnd->thd", p / np.where(total, total, 1), v)

    def commit(self, keep=None):
        if not self.open:
            return
        keep = range(len(self.seq_ids)) if keep is None else keep
        if len(set(keep)) < len(keep):
            raise ValueError("a token is kept twice")
        if not all(0 <= j < len(self.seq_ids) for j in keep):
            raise IndexError("no such token")
        if any(self.rows[i][j] is None for i in self.cache.layers for j in keep):
            raise ValueError("a token was not put in some layer")
        for j in sorted(keep):
            s = self.seq_ids[j]
            for i in self.cache.layers:
                self.cache.rows[i].setdefault(s, []).append(self.rows[i][j])
                self.cache.lost[i].setdefault(s, (0, 0))
            for i, encoded in enumerate(self.encoded):
                if s in encoded:
                    self.cache.rows[i][s] = encoded[s]
        self.cache.open_batch = None
        for s in set(self.seq_ids):
            self.cache.expire_behind(s)

    def abort(self):
        if self.open:
            self.cache.open_batch = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.abort() if kind else self.commit()
