"""The cache and an oracle, driven with the same random operations; everything visible is compared.

What policies, limits and rotations mean, random steps in C hold (tests/c/support/oracle.h). The oracle here is small:
each call from Python reaches the core with its own arguments, and rows come back whole, for layers that see
everything, whose keys carry no rotation or are moved by a function. Every row is of fresh random numbers: one that
lands in the wrong place cannot look right.
"""

import copy
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcache

SEQUENCES = [0, 1, 2, -7, 2**40]
LAST = 2**31 - 2  # the largest position

sequences = st.sampled_from(SEQUENCES)


def roll(layer, keys, delta):
    """Moves keys so that it shows by how much, and by nothing else."""
    return np.roll(keys, delta, -1)


# ---- the oracle


@dataclass(frozen=True)
class Row:
    position: int
    k: tuple  # [num_kv_heads, head_dim] of each layer
    v: tuple
    slot: object = field(default_factory=object)  # shared by forks


def with_layer(rows, layer, given):
    return (*rows[:layer], np.array(given), *rows[layer + 1 :])


class Oracle:
    """What the cache holds: a list of rows, in order of arrival, for each sequence that has any."""

    def __init__(self, num_layers, heads, dims, rope, max_sequences):
        self.num_layers, self.heads, self.dims = num_layers, heads, dims
        self.rope, self.max_sequences = rope, max_sequences
        self.rows = {}
        self.batch_seq_ids = ()  # of the open batch

    @property
    def sequences(self):
        return sorted(self.rows)

    def held(self, seq_id):
        return self.rows.get(seq_id, [])

    def positions(self, seq_id):
        return [row.position for row in self.held(seq_id)]

    def last_position(self, seq_id):
        return max(self.positions(seq_id), default=-1)

    def next_position(self, seq_id):
        return self.last_position(seq_id) + 1

    def stacked(self, layer, rows):
        """Keys and values, each [num_kv_heads, n, dim]."""
        none = (np.zeros((self.heads, 0, dim), np.float32) for dim in self.dims)
        return [np.stack([of[layer] for of in each], 1) if rows else next(none)
                for each in ([r.k for r in rows], [r.v for r in rows])]  # fmt: skip

    def put_back(self, seq_id, rows):
        self.rows.pop(seq_id, None)
        if rows:
            self.rows[seq_id] = rows

    def check(self, *seq_ids, is_valid=True):
        if not is_valid:
            raise ValueError
        if set(seq_ids) & set(self.batch_seq_ids):
            raise kvcache.CacheBusyError

    def check_no_batch(self):
        self.check(*self.batch_seq_ids)

    def clear(self, seq_id=None):
        for s in self.check_gone({*self.rows, *self.batch_seq_ids} if seq_id is None else {seq_id}):
            self.put_back(s, [])

    def keep(self, seq_id):
        for s in self.check_gone({*self.rows, *self.batch_seq_ids} - {seq_id}):
            self.put_back(s, [])

    def check_gone(self, seq_ids):
        self.check(*seq_ids)
        return seq_ids

    def fork(self, src, dst):
        self.copy_prefix(src, dst, LAST + 1)

    def copy_prefix(self, src, dst, length):
        self.check(src, dst, is_valid=src != dst)
        self.check(is_valid=not length or src in self.rows)
        self.put_back(dst, [row for row in self.held(src) if row.position < length])

    def share_range(self, src, dst, begin, end):
        self.check(src, dst, is_valid=src != dst and (end is None or begin <= end))
        self.check(is_valid=src in self.rows or dst in self.rows or begin > 0 or end is not None)  # else it is a fork
        shared = [row for row in self.held(src) if begin <= row.position < (LAST + 1 if end is None else end)]
        own = {(row.position, id(row.slot)) for row in self.held(dst)}
        new = [row for row in shared if (row.position, id(row.slot)) not in own]
        others = own - {(row.position, id(row.slot)) for row in shared}
        self.check(is_valid=not {p for p, _ in others} & {row.position for row in shared})
        self.put_back(dst, self.held(dst) + new)

    def truncate(self, length, *, seq_id):
        self.remove(length, None, seq_id=seq_id)

    def remove(self, begin, end, *, seq_id, shift=True):
        self.check(seq_id, is_valid=end is None or begin <= end)
        moves = shift and end is not None and self.last_position(seq_id) >= end
        if moves and self.rope is None:
            raise kvcache.NotSupportedError
        stay = [r for r in self.held(seq_id) if r.position < begin or (end is not None and r.position >= end)]
        self.put_back(seq_id, stay)
        if moves and begin < end:
            self.move(end, None, seq_id, lambda p: p + begin - end)

    def shift(self, begin, end, delta, *, seq_id):
        self.check_move(begin, end, seq_id)
        top = max((p for p in self.positions(seq_id) if begin <= p < (end or 2**31)), default=-1)
        self.check(is_valid=top < 0 or top + delta <= LAST)
        if delta:
            self.move(begin, end, seq_id, lambda p: p + delta)

    def divide(self, begin, end, divisor, *, seq_id):
        self.check_move(begin, end, seq_id)
        if divisor > 1:
            self.move(begin, end, seq_id, lambda p: p // divisor)

    def check_move(self, begin, end, seq_id):
        self.check(is_valid=end is None or begin <= end)
        if self.rope is None:
            raise kvcache.NotSupportedError
        self.check(seq_id)

    def move(self, begin, end, seq_id, to):
        def moved(row):
            if row.position < begin or (end is not None and row.position >= end):
                return row
            after = replace(row, position=to(row.position))
            if not self.rope:
                return after
            keys = tuple(self.rope(layer, k, after.position - row.position) for layer, k in enumerate(row.k))
            return replace(after, k=keys, slot=object())  # what others share is copied

        self.put_back(seq_id, [row for row in map(moved, self.held(seq_id)) if row.position >= 0])

    def inject(self, layer, begin, k, v, *, seq_id, skip_missing):
        self.check(seq_id)
        latest = {row.position: i for i, row in enumerate(self.held(seq_id))}
        stored = [n for n in range(k.shape[1]) if begin + n in latest]
        if len(stored) < k.shape[1] and not skip_missing:
            raise IndexError
        rows = [
            replace(row, slot=object()) if begin <= row.position < begin + k.shape[1] else row
            for row in self.held(seq_id)
        ]
        for n in stored:
            row = rows[latest[begin + n]]
            rows[latest[begin + n]] = replace(
                row, k=with_layer(row.k, layer, k[:, n]), v=with_layer(row.v, layer, v[:, n])
            )
        self.put_back(seq_id, rows)
        return len(stored)

    def settle(self):
        self.check_no_batch()

    def compact(self):
        self.check_no_batch()

    def reserve(self, num_tokens, *, seq_id):
        self.check_no_batch()
        self.check_room([seq_id])

    def check_room(self, seq_ids):
        if self.max_sequences is not None and len({*self.rows, *seq_ids}) > self.max_sequences:
            raise kvcache.CacheFullError

    def batch(self, *, positions, seq_ids, parents):
        self.check_no_batch()
        self.check_room(seq_ids)
        self.batch_seq_ids = tuple(seq_ids)
        none = (None,) * self.num_layers
        return OracleBatch(self, [Row(p, none, none) for p in positions], seq_ids, parents)


@dataclass
class OracleBatch:
    cache: Oracle
    rows: list
    seq_ids: list
    parents: list | None

    def missing(self, layer):
        return [t for t, row in enumerate(self.rows) if row.k[layer] is None]

    def put(self, layer, k, v, first):
        for t, key, value in zip(range(first, first + len(k)), k, v, strict=True):
            row = self.rows[t]
            self.rows[t] = replace(row, k=with_layer(row.k, layer, key), v=with_layer(row.v, layer, value))

    def shown(self, layer, seq_id):
        """A sequence's rows with their tokens of the batch, None for those that are stored, in order of arrival."""
        own = [(row, t) for t, row in enumerate(self.rows) if self.seq_ids[t] == seq_id and row.k[layer] is not None]
        return [(row, None) for row in self.cache.held(seq_id)] + own

    def sees(self, i, row, t, is_causal, masked):
        if any(s == self.seq_ids[i] and begin <= row.position < end for s, begin, end in masked):
            return False
        if t is None or self.parents is None:
            return not is_causal or row.position <= self.rows[i].position
        while i not in (t, -1):
            i = self.parents[i]
        return i == t

    def dense(self, layer, non_causal, masked):
        """Keys, values and mask [tokens, n]: the rows of each sequence in order of position."""
        shown = [
            (row, t, s) for s in sorted(set(self.seq_ids))
            for row, t in sorted(self.shown(layer, s), key=lambda each: each[0].position)
        ]  # fmt: skip
        mask = np.full((len(self.rows), len(shown)), -np.inf)
        for i, ahead in enumerate(non_causal):
            for n, (row, t, s) in enumerate(shown):
                if s == self.seq_ids[i] and self.sees(i, row, t, not ahead, masked):
                    mask[i, n] = 0
        return *self.cache.stacked(layer, [row for row, _, _ in shown]), mask

    def commit(self, keep):
        for t in sorted(keep):
            self.cache.rows.setdefault(self.seq_ids[t], []).append(self.rows[t])
        self.cache.batch_seq_ids = ()

    def abort(self):
        self.cache.batch_seq_ids = ()


def attended(q, k, v, mask, scale):
    """[tokens, num_heads, dim] over what `dense` returns, in float64; 0 where nothing is seen."""
    group = q.shape[1] // len(k)
    k, v = np.repeat(k, group, 0).astype(float), np.repeat(v, group, 0)
    scores = np.einsum("thd,hnd->thn", q, k) * scale + mask[:, None]
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("thn,hnd->thd", weights / np.where(total, total, 1), v)


# ---- both


def outcome(call):
    """Return what a call returns, and the type of what it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, type(error)


class Machine(RuleBasedStateMachine):
    @initialize(
        num_layers=st.integers(1, 2),
        heads=st.integers(1, 2),
        dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        block_size=st.sampled_from([1, 3, 16, None]),
        max_sequences=st.none() | st.integers(1, 5),
        rope=st.sampled_from([None, False, roll]),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(self, num_layers, heads, dims, block_size, max_sequences, rope, seed):
        self.num_layers, self.heads, self.dims = num_layers, heads, dims
        self.real = kvcache.KVCache(
            num_layers, heads, dims[0], None, v_head_dim=dims[1], dtype="f32", rope=rope, block_size=block_size,
            max_sequences=max_sequences,
        )  # fmt: skip
        self.oracle = Oracle(num_layers, heads, dims, rope, max_sequences)
        self.rng = np.random.default_rng(seed)
        self.batch = self.model = None  # the open batch, and the oracle's
        self.views = []  # arrays, and copies of what they showed when they were taken
        self.counted = {"batches": 0, "aborted": 0, "tokens": 0}

    def both(self, call):
        """Call the cache and the oracle: both succeed, or raise the same, and the cache is as it was."""
        before = self.places()
        real, error = outcome(lambda: call(self.real))
        expected, expected_error = outcome(lambda: call(self.oracle))
        assert error == expected_error, f"{error}, where {expected_error} was expected"
        if error:
            note(f"    {error.__name__}")
            assert self.places() == before
        return real, expected

    def places(self):
        return repr(self.real.blocks()), self.real.stats(), self.real.nbytes

    def random_rows(self, count):
        return [self.rng.standard_normal((count, self.heads, dim), np.float32) for dim in self.dims]

    def as_given(self, rows):
        """Rows as floats, or as the bytes that are stored: for the cache it is the same."""
        return [np.ascontiguousarray(x).view(np.uint8) for x in rows] if self.rng.integers(2) else rows

    # ---- batches

    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "keep"]))
    @precondition(lambda self: not self.batch)
    def whole_batch(self, data, how):
        self.begin(data)
        if self.batch:
            self.put_rest()
            self.finish(data, how)

    @rule(data=st.data())
    def begin_only(self, data):
        self.begin(data)  # while one is open it is refused

    def begin(self, data):
        is_mixed, is_tree = data.draw(st.booleans(), label="mixed"), data.draw(st.booleans(), label="tree")
        positions, seq_ids = [], []
        for seq_id in data.draw(st.lists(sequences, min_size=1, max_size=3, unique=True), label="seq_ids"):
            start = self.oracle.next_position(seq_id) + data.draw(st.sampled_from([0, 0, -3, 5]), label="gap")
            if start < LAST - 20:
                count = data.draw(st.integers(1, 9), label="tokens")
                positions += range(max(0, start), max(0, start) + count)
                seq_ids += [seq_id] * count
        if not positions:
            return
        if is_mixed:
            order = self.rng.permutation(len(positions))
            positions, seq_ids = [positions[i] for i in order], [seq_ids[i] for i in order]
        parents = None
        if is_tree:
            earlier = [[-1] + [j for j in range(i) if seq_ids[j] == s] for i, s in enumerate(seq_ids)]
            parents = [int(self.rng.choice(those)) for those in earlier]
        batch, model = self.both(lambda c: c.batch(positions=positions, seq_ids=seq_ids, parents=parents))
        if batch:
            self.batch, self.model = batch, model
            assert (batch.positions.tolist(), batch.seq_ids.tolist()) == (positions, seq_ids)

    @rule(data=st.data())
    @precondition(lambda self: self.batch)
    def put_some(self, data):
        layer = data.draw(st.integers(0, self.num_layers - 1), label="layer")
        first = data.draw(st.integers(0, len(self.batch) - 1), label="first")
        end = data.draw(st.integers(first + 1, len(self.batch)), label="end")
        rows = self.random_rows(end - first)
        if set(range(first, end)) <= set(self.model.missing(layer)):
            self.batch.put(layer, *self.as_given(rows), first=first)
            self.model.put(layer, *rows, first)
        else:
            assert outcome(lambda: self.batch.put(layer, *rows, first=first))[1] is ValueError

    def put_rest(self):
        for layer in range(self.num_layers):
            for t in self.model.missing(layer):
                rows = self.random_rows(1)
                self.batch.put(layer, *self.as_given(rows), first=t)
                self.model.put(layer, *rows, t)

    @rule(data=st.data(), group=st.integers(1, 3))
    @precondition(lambda self: self.batch)
    def attend(self, data, group):
        """Attend with some tokens, perhaps with their rows, some of which may see ahead, and less than others."""
        layer = data.draw(st.integers(0, self.num_layers - 1), label="layer")
        first = data.draw(st.integers(0, len(self.batch) - 1), label="first")
        count = data.draw(st.integers(1, len(self.batch) - first), label="count")
        q = self.rng.standard_normal((count, self.heads * group, self.dims[0]), np.float32)
        rows = []
        if missing := set(self.model.missing(layer)):
            if missing != set(range(first, first + count)):
                return
            rows = self.random_rows(count)
            self.model.put(layer, *rows, first)
        ahead = self.rng.integers(0, 2, len(self.batch)).astype(bool).tolist()
        near = [int(self.rng.integers(len(self.batch))) for _ in range(self.rng.integers(3))]
        masked = [(s, p, p + 3) for s, p in ((self.model.seq_ids[t], self.model.rows[t].position) for t in near)]
        shown = {"non_causal": ahead, "masked": masked}
        options = {"first": first, "scale": 0.5, **shown}
        out, lse = self.batch.attend(layer, q, *self.as_given(rows), return_lse=True, **options)
        k, v, mask = self.model.dense(layer, **shown)
        for found, expected in zip(self.batch.dense(layer, **shown), (k, v, mask), strict=True):
            np.testing.assert_array_equal(found, expected)
        mask = mask[first : first + count]
        np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(mask).any(1)[:, None].repeat(lse.shape[1], 1))
        np.testing.assert_allclose(out, attended(q, k, v, mask, 0.5), rtol=0, atol=2e-5 * np.abs(v).max(initial=1))

    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "keep", "abort"]))
    @precondition(lambda self: self.batch)
    def end(self, data, how):
        self.finish(data, how)

    def finish(self, data, how):
        tokens = range(len(self.batch))
        keep = data.draw(st.lists(st.sampled_from(tokens), unique=True), label="keep") if how == "keep" else [*tokens]
        if how == "abort":
            self.batch.abort()
            self.model.abort()
            self.counted["aborted"] += 1
        else:
            if set(keep) & {t for layer in range(self.num_layers) for t in self.model.missing(layer)}:
                assert outcome(lambda: self.batch.commit(keep))[1] is ValueError
                self.put_rest()
            self.batch.commit(keep if how == "keep" else None)
            self.model.commit(keep)
            self.counted["batches"] += 1
            self.counted["tokens"] += len(keep)
        self.batch.commit()  # once it has ended, this does nothing
        self.batch = self.model = None

    # ---- edits

    def some_sequence(self, data):
        """Mostly one that holds something."""
        return data.draw(st.sampled_from(self.oracle.sequences * 3 + SEQUENCES), label="seq_id")

    def some_range(self, data, seq_id):
        """Positions at and beside what a sequence holds; the end may be None, or below the beginning."""
        near = [p for at in {0, *self.oracle.positions(seq_id)} for p in (at - 1, at, at + 1) if 0 <= p <= LAST]
        begin = data.draw(st.sampled_from(sorted(near)), label="begin")
        ends = [None, *sorted(p for p in near if p >= begin), max(0, begin - 1)]
        return begin, data.draw(st.sampled_from(ends), label="end")

    @rule(data=st.data(), dst=sequences, is_behind=st.booleans())
    def share(self, data, dst, is_behind):
        src = self.some_sequence(data)
        begin, end = self.some_range(data, src)
        begin = min(LAST, self.oracle.next_position(dst)) if is_behind else begin
        self.both(lambda c: c.share_range(src, dst, begin, end))

    @rule(data=st.data(), dst=sequences, is_whole=st.booleans())
    def fork(self, data, dst, is_whole):
        src = self.some_sequence(data)
        length, _ = self.some_range(data, src)
        self.both(lambda c: c.fork(src, dst) if is_whole else c.copy_prefix(src, dst, length))

    @rule(data=st.data(), shift=st.booleans())
    def remove(self, data, shift):
        seq_id = self.some_sequence(data)
        begin, end = self.some_range(data, seq_id)
        self.both(lambda c: c.remove(begin, end, seq_id=seq_id, shift=shift))

    @rule(data=st.data(), delta=st.integers(-9, 9) | st.integers(-(2**31), 2**31 - 1))
    def shift(self, data, delta):
        seq_id = self.some_sequence(data)
        begin, end = self.some_range(data, seq_id)
        self.both(lambda c: c.shift(begin, end, delta, seq_id=seq_id))

    @rule(data=st.data(), divisor=st.integers(1, 4))
    def divide(self, data, divisor):
        seq_id = self.some_sequence(data)
        begin, end = self.some_range(data, seq_id)
        self.both(lambda c: c.divide(begin, end, divisor, seq_id=seq_id))

    @rule(data=st.data(), count=st.integers(1, 9), skip_missing=st.booleans())
    def inject(self, data, count, skip_missing):
        seq_id, layer = self.some_sequence(data), data.draw(st.integers(0, self.num_layers - 1), label="layer")
        begin, _ = self.some_range(data, seq_id)
        rows = [np.swapaxes(x, 0, 1) for x in self.random_rows(count)]
        given = {self.real: self.as_given(rows), self.oracle: rows}
        if begin + count <= LAST:
            real, expected = self.both(
                lambda c: c.inject(layer, begin, *given[c], seq_id=seq_id, skip_missing=skip_missing)
            )
            assert real == expected

    @rule(data=st.data())
    def truncate(self, data):
        seq_id = self.some_sequence(data)
        length, _ = self.some_range(data, seq_id)
        self.both(lambda c: c.truncate(length, seq_id=seq_id))

    @rule(data=st.data(), how=st.sampled_from(["one", "one", "all but one", "all"]))
    def forget(self, data, how):
        seq_id = self.some_sequence(data)
        call = {"one": lambda c: c.clear(seq_id), "all but one": lambda c: c.keep(seq_id), "all": lambda c: c.clear()}
        self.both(call[how])

    @rule(data=st.data(), num_tokens=st.integers(1, 100))
    def reserve(self, data, num_tokens):
        seq_id = self.some_sequence(data)
        self.both(lambda c: c.reserve(num_tokens, seq_id=seq_id))

    @rule(name=st.sampled_from(["settle", "compact"]))
    def tidy(self, name):
        if self.views and not self.batch:
            assert outcome(getattr(self.real, name))[1] is BufferError
        else:
            self.both(lambda c: getattr(c, name)())

    @rule()
    @precondition(lambda self: not self.views)
    def go_on_with_a_copy(self):
        other, error = outcome(lambda: copy.copy(self.real))
        assert error is (kvcache.CacheBusyError if self.batch else None)
        if other:
            self.real.close()
            self.real = other
            self.counted = dict.fromkeys(self.counted, 0)  # statistics begin anew

    # ---- views

    @rule(data=st.data())
    @precondition(lambda self: self.oracle.sequences)
    def take_views(self, data):
        """Take views of all rows that a sequence holds."""
        seq_id = data.draw(st.sampled_from(self.oracle.sequences), label="seq_id")
        views = []
        for layer in range(self.num_layers):
            spans = self.real.spans(layer, seq_id=seq_id)
            views += [view for span in spans for view in (span.k, span.v)]
            for call in (self.real.keys, self.real.values):
                view, error = outcome(lambda call=call, layer=layer: call(layer, seq_id=seq_id, copy=False))
                assert not error or (error is ValueError and len(spans) > 1)  # that do not lie side by side
                views += [] if error else [view]
        self.views.append([(view, view.copy()) for view in views])

    @rule(data=st.data())
    @precondition(lambda self: self.views)
    def drop_views(self, data):
        del self.views[data.draw(st.integers(0, len(self.views) - 1), label="views")]

    # ---- everything visible

    @invariant()
    def cache_is_valid(self):
        self.real.validate()

    @invariant()
    def views_show_what_they_showed(self):
        for view, before in (pair for pairs in self.views for pair in pairs):
            np.testing.assert_array_equal(view, before)

    @invariant()
    def sequences_are_equal(self):
        assert self.real.sequences == self.oracle.sequences
        for s in SEQUENCES:
            positions = self.oracle.positions(s)
            assert self.real.seq_len(s) == len(positions)
            assert self.real.first_position(s) == min(positions, default=-1)
            assert self.real.last_position(s) == self.oracle.last_position(s)
            following = self.oracle.next_position(s)
            assert self.real.next_position(s) == following
            assert self.real.can_resume(following, seq_id=s)
            assert following > LAST or not self.real.can_resume(following + 1, seq_id=s)
            for layer in range(self.num_layers):
                assert self.real.positions(seq_id=s, layer=layer).tolist() == positions
                self.compare_rows(layer, s, positions)

    def compare_rows(self, layer, s, positions):
        expected = self.oracle.stacked(layer, self.oracle.held(s))
        spans = self.real.spans(layer, seq_id=s)
        assert [p for span in spans for p in span.positions.tolist()] == positions
        found = [
            self.real.gather(layer, seq_id=s),
            (self.real.keys(layer, seq_id=s), self.real.values(layer, seq_id=s)),
        ]
        found += [[x.view(np.float32) for x in self.real.gather(layer, seq_id=s, raw=True)]]
        if spans:
            found.append([np.concatenate([getattr(span, name) for span in spans], 1) for name in "kv"])
        for each in found:
            np.testing.assert_array_equal(each[0], expected[0])
            np.testing.assert_array_equal(each[1], expected[1])
        latest = {p: i for i, p in enumerate(positions)}
        for p in {*positions[:1], *positions[-1:], 1}:
            row = self.real.get(layer, p, seq_id=s)
            assert (row is None) == (p not in latest)
            begin = max(0, p - 2)
            for i, extracted in enumerate(self.real.extract(layer, begin, p + 1, seq_id=s)):
                assert row is None or (row[i] == expected[i][:, latest[p]]).all()
                for at in range(begin, p + 1):
                    right = expected[i][:, latest[at]] if at in latest else 0
                    np.testing.assert_array_equal(extracted[:, at - begin], right)

    @invariant()
    def batch_shows_its_rows(self):
        """Rows of the open batch's sequences: those that are stored, then those that were put."""
        for s in SEQUENCES if self.batch else ():
            for layer in range(self.num_layers):
                spans, error = outcome(lambda s=s, layer=layer: self.batch.spans(layer, seq_id=s))
                assert error is (None if s in self.model.seq_ids else ValueError)
                if not error:
                    rows = [row for row, _ in self.model.shown(layer, s)]
                    assert [p for span in spans for p in span.positions.tolist()] == [row.position for row in rows]
                    k, v = self.oracle.stacked(layer, rows)
                    np.testing.assert_array_equal(self.batch.keys(layer, seq_id=s), k)
                    np.testing.assert_array_equal(self.batch.values(layer, seq_id=s), v)

    @invariant()
    def counters_are_right(self):
        stats = self.real.stats()
        slots = {id(row.slot) for rows in self.oracle.rows.values() for row in rows}
        assert stats["live_slots"] == len(slots) + (len(self.batch) if self.batch else 0)
        assert {name: stats[name] for name in self.counted} == self.counted

    def teardown(self):
        if hasattr(self, "views"):
            if self.batch:
                self.batch.abort()
            self.views.clear()
            self.real.clear()
            self.real.compact()
            assert self.real.stats()["live_slots"] == 0
            self.real.close()


Machine.TestCase.settings = settings(stateful_step_count=40)
TestMachine = Machine.TestCase
