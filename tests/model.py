"""What kvcache means, as a dictionary: slow, small, and meant to be read.

The names and arguments are those of the package. A sequence is, per layer, a list of rows; nothing here knows of
blocks, runs, threads or element types, nor of the package itself: errors and policies correspond by name. Some of what
stands here (rope, chunks, cross-attention, trees, `keep=`) the package has yet to learn.
"""

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
        """The first position that is kept when nothing below `low` will be asked for, sinks aside."""
        return 0

    def is_sink(self, p):
        return False


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


@dataclass(frozen=True)
class ChunkedAttention(FullAttention):
    attention_chunk_size: int
    resume_window: int | None = None

    def lowest(self, q):
        return q - q % self.attention_chunk_size

    def retained(self, low):
        return max(0, self.lowest(low) - (self.resume_window or 0))


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


class KVCache:
    """rope: None (not told), False (keys carry no rotation) or a function (layer, keys[heads, n, dim], delta)."""

    def __init__(
        self, num_layers, num_kv_heads, head_dim, max_seq_len, *, policy=FullAttention(), rope=None, max_sequences=1,
        capacity=None, **_,
    ):  # fmt: skip
        self.policy = list(policy) if isinstance(policy, list | tuple) else [policy] * num_layers
        self.rope, self.max_seq_len, self.max_sequences = rope, max_seq_len, max_sequences
        limited = capacity is None and None not in (max_seq_len, max_sequences)
        self.capacity = max_seq_len * max_sequences if limited else capacity
        self.layers = [i for i, p in enumerate(self.policy) if not isinstance(p, CrossAttention | None)]
        self.rows = [{} for _ in self.policy]  # layer -> {seq_id: [Row, in order of arrival]}
        self.lost_end = [{} for _ in self.policy]  # layer -> {seq_id: below it rows were evicted}
        self.encoded = [{} for _ in self.policy]  # cross-attention layers: {seq_id: (k, v)}
        self.open_batch = None

    # ---- looking

    @property
    def sequences(self):
        return sorted({s for layer in self.layers for s, rows in self.rows[layer].items() if rows})

    def held(self, layer, seq_id):
        return self.rows[layer].get(seq_id, [])

    def positions(self, *, seq_id=0, layer=0):
        return [r.position for r in self.held(layer, seq_id)]

    def seq_len(self, seq_id=0, *, layer=None):
        return max(len(self.held(i, seq_id)) for i in ([layer] if layer is not None else self.layers))

    def first_position(self, seq_id=0):
        return min((p for layer in self.layers for p in self.positions(seq_id=seq_id, layer=layer)), default=-1)

    def last_position(self, seq_id=0):
        return max((p for layer in self.layers for p in self.positions(seq_id=seq_id, layer=layer)), default=-1)

    def next_position(self, seq_id=0):
        return self.last_position(seq_id) + 1

    def misses(self, position, seq_id):
        """Whether a query there would miss rows that were evicted."""
        return any(self.policy[i].lowest(position) < self.lost_end[i].get(seq_id, 0) for i in self.layers)

    def can_resume(self, position, *, seq_id=0):
        return position <= self.next_position(seq_id) and not self.misses(position, seq_id)

    def get(self, layer, position, *, seq_id=0):
        found = [r for r in self.held(layer, seq_id) if r.position == position]
        return (self.key(layer, found[-1]), found[-1].v) if found else None

    def key(self, layer, row):
        return self.rope(layer, row.k[:, None], row.delta)[:, 0] if row.delta and callable(self.rope) else row.k

    def gather(self, layer, *, seq_id=0):
        """Keys and values, each [num_kv_heads, n, dim]; None where there are none."""
        rows = self.held(layer, seq_id)
        return (np.stack([self.key(layer, r) for r in rows], 1), np.stack([r.v for r in rows], 1)) if rows else None

    def live(self, layer):
        """How many slots the sequences hold in a layer."""
        return len({id(r.slot) for rows in self.rows[layer].values() for r in rows})

    # ---- editing

    def check_idle(self, *seq_ids):
        if self.open_batch and set(seq_ids) & set(self.open_batch.seq_ids):
            raise CacheBusyError("the sequence belongs to the open batch")

    def known(self):
        """Every sequence that there is anything to know of."""
        batch = set(self.open_batch.seq_ids) if self.open_batch else set()
        return batch.union(*self.rows, *self.encoded)

    def clear(self, seq_id=None):
        gone = self.known() if seq_id is None else {seq_id}
        self.check_idle(*gone)
        for table in (*self.rows, *self.lost_end, *self.encoded):
            for s in gone:
                table.pop(s, None)

    def keep(self, seq_id):
        gone = self.known() - {seq_id}
        self.check_idle(*gone)
        for s in gone:
            self.clear(s)

    def copy_prefix(self, src, dst, length):
        if src == dst or length < 0:
            raise ValueError("src and dst are the same sequence, or length is negative")
        self.check_idle(src, dst)
        shared = {i: [replace(r) for r in self.held(i, src) if r.position < length] for i in self.layers}
        lost = {i: min(self.lost_end[i].get(src, 0), length) for i in self.layers}
        self.become(dst, shared, lost, {i: t[src] for i, t in enumerate(self.encoded) if src in t})

    def fork(self, src, dst):
        if src == dst:
            raise ValueError("src and dst are the same sequence")
        self.check_idle(src, dst)
        shared = {i: [replace(r) for r in self.held(i, src)] for i in self.layers}
        lost = {i: self.lost_end[i].get(src, 0) for i in self.layers}
        self.become(dst, shared, lost, {i: t[src] for i, t in enumerate(self.encoded) if src in t})

    def become(self, dst, shared, lost, encoded):
        self.clear(dst)
        self.put_back(dst, shared, lost)
        for layer, rows in encoded.items():
            self.encoded[layer][dst] = rows

    def truncate(self, length, *, seq_id=0):
        self.remove(length, None, seq_id=seq_id)

    def remove(self, begin=0, end=None, *, seq_id=0, shift=True):
        if begin < 0 or (end is not None and end < begin):
            raise ValueError("no range of positions")
        self.check_idle(seq_id)
        moves = shift and end is not None and self.last_position(seq_id) >= end
        if moves and self.rope is None:
            raise NotSupportedError("later tokens would move: give rope")
        kept, lost = {}, {}
        for i in self.layers:
            kept[i] = [r for r in self.held(i, seq_id) if r.position < begin or (end is not None and r.position >= end)]
            lost[i] = self.lost_end[i].get(seq_id, 0)
            if lost[i] > begin:  # evicted rows are removed, and move, like stored ones
                behind = end is not None and lost[i] > end
                lost[i] = begin if not behind else lost[i] - (end - begin) if shift else lost[i]
        self.put_back(seq_id, kept, lost)
        if moves:
            self.move(end, None, seq_id, lambda p: p + begin - end, move_lost=False)

    def shift(self, begin, end, delta, *, seq_id=0):
        if self.rope is None:
            raise NotSupportedError("give rope")
        self.move(begin, end, seq_id, lambda p: p + delta, move_lost=True)

    def divide(self, begin, end, divisor, *, seq_id=0):
        if self.rope is None:
            raise NotSupportedError("give rope")
        self.move(begin, end, seq_id, lambda p: p // divisor, move_lost=True)

    def move(self, begin, end, seq_id, to, move_lost):
        def inside(p):
            return begin <= p and (end is None or p < end)

        moved, lost = {}, {}
        for i in self.layers:
            moved[i] = []
            for r in self.held(i, seq_id):
                p = to(r.position) if inside(r.position) else r.position
                if p >= 0:  # moved below zero: dropped
                    moved[i].append(replace(r, position=p, delta=r.delta + p - r.position))
            lost[i] = self.lost_end[i].get(seq_id, 0)
            if move_lost and lost[i] and inside(lost[i] - 1):
                lost[i] = max(0, to(lost[i] - 1) + 1)
        self.put_back(seq_id, moved, lost)

    def put_back(self, seq_id, rows, lost):
        """A sequence without a row in any layer is empty and has lost nothing; else each layer knows its loss."""
        for i in self.layers:
            if any(rows.values()):
                self.rows[i][seq_id], self.lost_end[i][seq_id] = rows[i], lost[i]
            else:
                self.rows[i].pop(seq_id, None), self.lost_end[i].pop(seq_id, None)

    def compact(self):
        if self.open_batch:
            raise CacheBusyError("a batch is open")

    # ---- a forward pass

    def batch(self, n=None, *, positions=None, seq_ids=None, parents=None):
        if n is not None:
            first = self.next_position(0)
            if n > min(self.max_seq_len or n, self.capacity or n):
                raise CacheFullError("more than there is ever room for")
            positions = range(first, first + n)
        return Batch(self, list(positions), list(seq_ids or [0] * len(positions)), parents)


class Batch:
    def __init__(self, cache, positions, seq_ids, parents):
        self.cache, self.positions, self.seq_ids, self.parents = cache, positions, seq_ids, parents
        if not positions or len(positions) != len(seq_ids) or min(positions) < 0 or max(positions) > MAX_POSITION:
            raise ValueError("no token, not a sequence for each, or a bad position")
        if cache.open_batch:
            raise CacheBusyError("a batch is open")
        for p, s in zip(positions, seq_ids, strict=True):
            if cache.misses(p, s):
                raise RowsGoneError(f"position {p} of sequence {s} sees rows that were evicted")
        if cache.max_sequences is not None and len(set(cache.sequences) | set(seq_ids)) > cache.max_sequences:
            raise CacheFullError("max_sequences")
        low = {s: cache.next_position(s) for s in cache.sequences}
        for p, s in zip(positions, seq_ids, strict=True):
            low[s] = min(low.get(s, p), p)
        kept = [{} for _ in cache.rows]
        for i in cache.layers:
            policy = cache.policy[i]
            for s, rows in cache.rows[i].items():
                first = policy.retained(low.get(s, 0))
                kept[i][s] = [r for r in rows if r.position >= first or policy.is_sink(r.position)]
        for i in cache.layers:
            live = len({id(r.slot) for rows in kept[i].values() for r in rows})
            if cache.capacity is not None and live + len(positions) > cache.capacity:
                raise CacheFullError("capacity")
            longest = max(len(kept[i].get(s, [])) + seq_ids.count(s) for s in seq_ids)
            if cache.max_seq_len is not None and longest > cache.max_seq_len:
                raise CacheFullError("max_seq_len")
        for i in cache.layers:  # nothing can fail from here on
            for s, rows in kept[i].items():
                gone = {r.position for r in cache.rows[i][s]} - {r.position for r in rows}
                cache.rows[i][s] = rows
                cache.lost_end[i][s] = max([cache.lost_end[i].get(s, 0)] + [p + 1 for p in gone])
        self.rows = [[None] * len(positions) for _ in cache.rows]
        self.slots = [object() for _ in positions]
        cache.open_batch = self

    @property
    def open(self):
        return self.cache.open_batch is self

    def put(self, layer, k, v, *, first=0, seq_id=None):
        if isinstance(self.cache.policy[layer], CrossAttention):
            rows = np.swapaxes(k, 0, 1), np.swapaxes(v, 0, 1)
            self.cache.encoded[layer][0 if seq_id is None else seq_id] = rows
            return
        if any(r is not None for r in self.rows[layer][first : first + len(k)]):
            raise ValueError("put before")
        for i in range(len(k)):
            t = first + i
            self.rows[layer][t] = Row(self.positions[t], np.array(k[i]), np.array(v[i]), slot=self.slots[t])

    def sees(self, layer, i, j, position, causal):
        """Whether token i of the batch sees a position, where token j of the batch stands, or None: a stored one."""
        policy, q = self.cache.policy[layer], self.positions[i]
        if j is not None and self.parents is not None:
            a = i
            while a not in (j, -1):
                a = self.parents[a]
            if a != j:
                return False
        elif causal and position > q:
            return False
        return position >= policy.lowest(q) or policy.is_sink(position)

    def dense(self, layer, *, non_causal=None):
        """k, v [num_kv_heads, n, dim], mask [tokens, n]; the rows of each sequence in order of position."""
        if not self.open:
            raise ValueError("the batch has ended")
        n = len(self.positions)
        non_causal = [non_causal is True] * n if non_causal in (None, True) else non_causal
        all_rows = []
        for s in sorted(set(self.seq_ids)):
            mine = [(r, None, s) for r in self.cache.held(layer, s)]
            mine += [(r, j, s) for j, r in enumerate(self.rows[layer]) if r is not None and self.seq_ids[j] == s]
            all_rows += sorted(mine, key=lambda t: t[0].position)
        mask = np.full((n, len(all_rows)), -np.inf)
        for i in range(n):
            for m, (r, j, s) in enumerate(all_rows):
                if s == self.seq_ids[i] and self.sees(layer, i, j, r.position, not non_causal[i]):
                    mask[i, m] = 0
        k = np.stack([self.cache.key(layer, r) for r, _, _ in all_rows], 1)
        return k, np.stack([r.v for r, _, _ in all_rows], 1), mask

    def attend(self, layer, q, k=None, v=None, *, first=0, scale=None, non_causal=None):
        """q [tokens, num_heads, k_dim] -> [tokens, num_heads, v_dim]; the plain softmax, in float64"""
        if k is not None:
            self.put(layer, k, v, first=first)
        k, v, mask = self.dense(layer, non_causal=non_causal)
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
        if any(r is None for i in self.cache.layers for r in self.rows[i]):
            raise ValueError("a token was not put in some layer")
        for j, s in enumerate(self.seq_ids):
            for i in self.cache.layers:
                if keep is None or j in keep:
                    self.cache.rows[i].setdefault(s, []).append(self.rows[i][j])
                    self.cache.lost_end[i].setdefault(s, 0)
        self.cache.open_batch = None

    def abort(self):
        if self.open:
            self.cache.open_batch = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.abort() if kind else self.commit()
