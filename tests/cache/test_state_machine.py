"""The cache and its oracle (support/oracle.py), driven with the same random operations; everything visible is compared.

What is stored is f32, or transformed and quantised rows that lose nothing by it, so that contents compare exactly.
Every row is of fresh random numbers: one that lands in the wrong place cannot look right.
"""

import copy

import numpy as np
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import oracle
from support.ggml_blocks import blocks
from support.transform import hadamard

import kvcache

SEQUENCES = [0, 1, 2, -7, 2**40]
LAST = oracle.MAX_POSITION

sequences = st.sampled_from(SEQUENCES)
limits = st.none() | st.integers(4, 60)
sizes = st.sampled_from([1, 4, 100])  # tokens in a range


@st.composite
def policies(draw):
    kind = draw(st.sampled_from(["full", "window", "chunks", "full", "window", "cross", "none"]))
    if kind == "full":
        return kvcache.FullAttention()
    if kind == "chunks":
        return kvcache.ChunkedAttention(draw(st.integers(1, 8)), draw(st.none() | st.integers(0, 6)))
    if kind == "cross":
        return kvcache.CrossAttention(draw(st.integers(1, 6)))
    if kind == "none":
        return None
    window = draw(st.integers(1, 8))
    resume = draw(st.none() | st.integers(window, window + 6))
    return kvcache.SlidingWindow(window, draw(st.sampled_from([0, 0, 1, 3])), resume)


@st.composite
def shares(draw, policies):
    """Draw the layer, of the same policy, whose rows each layer reads; None: its own."""
    share = []
    for layer, policy in enumerate(policies):
        sources = [i for i in range(layer) if share[i] is None and policies[i] == policy]
        share.append(draw(st.sampled_from([None, None, *sources])))
    return share


def in_oracle(policy):
    if isinstance(policy, kvcache.FullAttention):
        return oracle.FullAttention()
    if isinstance(policy, kvcache.SlidingWindow):
        return oracle.SlidingWindow(policy.window, policy.num_sink_tokens, policy.resume_window or policy.window)
    if isinstance(policy, kvcache.ChunkedAttention):
        return oracle.ChunkedAttention(policy.attention_chunk_size, policy.resume_window or 0)
    return policy and oracle.CrossAttention(policy.max_len)


def rotation(inv_freq):
    """RoPE of half-split pairs, as a function."""

    def rotate(layer, keys, delta):
        n = len(inv_freq)
        a, b = keys[..., :n].astype(float), keys[..., n : 2 * n].astype(float)
        cos, sin = np.cos(delta * inv_freq), np.sin(delta * inv_freq)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, keys[..., 2 * n :]], -1).astype(np.float32)

    return rotate


def roll(layer, keys, delta):
    """Moves keys so that it shows by how much, and by nothing else."""
    return np.roll(keys, delta, -1)


def roll_transformed(layer, keys, delta):
    """Does so to keys of 64 elements that are a code of all largest numbers once they are transformed: none is lost."""
    return hadamard(np.roll(hadamard(keys, 64), delta, -1), 64)


def ropes(kind, head_dim):
    """Return a rope of this kind for the cache, and its counterpart for the oracle."""
    inv_freq = np.array([1.0, 0.1])[: head_dim // 2]
    if kind == "frequencies" and len(inv_freq):
        return kvcache.Rope(inv_freq), rotation(inv_freq)
    moves = roll_transformed if head_dim == 64 else roll
    return {"unknown": (None, None), "none": (False, False)}.get(kind, (moves, moves))


def outcome(call):
    """Return what a call returns, and the name of what it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, type(error).__name__


def assert_close(out, expected, v, error=256 * 2**-24):
    """Few rows of few elements: f32 errs by some 2^-24 of the largest value (test_attention.py has it exactly)."""
    np.testing.assert_allclose(out, expected, rtol=0, atol=error * np.abs(v).max(initial=1))


class Machine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        heads=st.integers(1, 2),
        dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        block_size=st.sampled_from([1, 3, 16, None]),
        max_sequences=st.none() | st.integers(1, 5),
        max_seq_len=limits,
        capacity=limits,
        rope=st.sampled_from(["unknown", "none", "frequencies", "function"]),
        value_in_key=st.booleans(),
        transformed=st.sampled_from([False, False, True]),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(
        self, data, heads, dims, block_size, max_sequences, max_seq_len, capacity, rope, value_in_key, transformed, seed
    ):  # fmt: skip
        given = data.draw(st.lists(policies(), min_size=1, max_size=4), label="policies")
        share = data.draw(shares(given), label="share")
        if transformed:
            dims, rope = (64, 64), "function" if rope == "frequencies" else rope  # which would round settled keys
        self.transformed = transformed
        self.error = {"error": 2e-3} if transformed else {}  # queries and weights of 16 bits
        value_in_key = value_in_key and dims[1] <= dims[0] and rope in ("unknown", "none")
        self.num_layers, self.heads, self.dims, self.value_in_key = len(given), heads, dims, value_in_key
        options = {
            "max_sequences": max_sequences, "capacity": capacity, "v_head_dim": dims[1], "value_in_key": value_in_key,
            "share": share,
        }  # fmt: skip
        real_rope, self.rope = ropes(rope, dims[0])
        self.exact = real_rope in (
            None,
            False,
            roll,
            roll_transformed,
        )  # whether keys that moved are the same to the bit
        self.real = kvcache.KVCache(
            len(given), heads, dims[0], max_seq_len, dtype="q8_0" if transformed else "f32", policy=given,
            block_size=block_size, rope=real_rope, k_transform="hadamard", v_transform="hadamard", **options,
        )  # fmt: skip
        self.oracle = oracle.KVCache(
            len(given), heads, dims[0], max_seq_len, policy=[in_oracle(p) for p in given], rope=self.rope,
            rewrites=real_rope in (roll, roll_transformed), **options,
        )  # fmt: skip
        # Of those with one policy, one layer.
        self.groups = {self.oracle.policy[layer]: layer for layer in self.oracle.layers}
        self.rng = np.random.default_rng(seed)
        self.batch = self.oracle_batch = None
        self.views = []  # arrays, and copies of what they showed when they were taken
        self.committed = self.aborted = self.tokens = 0

    def both(self, call):
        """Call the cache and the oracle: both succeed, or raise the same."""
        real, error = outcome(lambda: call(self.real))
        expected, expected_error = outcome(lambda: call(self.oracle))
        assert error == expected_error, f"{error}, where {expected_error} was expected"
        if error:
            note(f"    {error}")
        return real, expected, error

    # ---- batches

    def positions(self, data, seq_id, count, low):
        """Draw positions of a sequence's next tokens: its next position, or nearly anywhere else."""
        start = max(self.oracle.next_position(seq_id), low)
        if start > LAST - 50:
            return list(range(LAST + 1 - count, LAST + 1))
        kind = data.draw(st.sampled_from(["next"] * 4 + ["gap", "back", "repeat", "down", "any", "far"]), label="kind")
        if kind == "gap":
            start += data.draw(st.integers(1, 9), label="gap")
        elif kind == "far":
            start = LAST - data.draw(st.integers(0, 60), label="far")
        elif kind == "back":
            start = max(0, start - data.draw(st.integers(1, 9), label="back"))
        elif kind == "repeat":
            return [start] * count
        elif kind == "down":
            return list(range(start + count - 1, start - 1, -1))
        elif kind == "any":
            return data.draw(st.lists(st.integers(0, start + 9), min_size=count, max_size=count), label="positions")
        return list(range(start, start + count))

    def begin(self, data):
        positions, seq_ids = [], []
        for _ in range(data.draw(st.integers(1, 3), label="stretches")):
            seq_id = self.some_sequence(data)
            mine = [p for p, s in zip(positions, seq_ids, strict=True) if s == seq_id]
            stretch = self.positions(
                data, seq_id, data.draw(st.integers(1, 9), label="tokens"), max(mine, default=-1) + 1
            )
            positions += stretch
            seq_ids += [seq_id] * len(stretch)
        if len(set(seq_ids)) > 1 and data.draw(st.booleans(), label="mixed"):
            order = self.rng.permutation(len(positions))
            positions, seq_ids = [positions[i] for i in order], [seq_ids[i] for i in order]
        parents = None
        if data.draw(st.sampled_from([False, False, True]), label="tree"):
            earlier = [[-1] + [j for j in range(i) if seq_ids[j] == s] for i, s in enumerate(seq_ids)]
            parents = [int(self.rng.choice(those)) for those in earlier]
        note(f"    {positions} of {seq_ids}, parents {parents}")
        return self.begin_both(lambda c: c.batch(positions=positions, seq_ids=seq_ids, parents=parents))

    def places(self):
        """Return where every row lies, and how much memory there is: a call that is refused must not change it."""
        layers = [layer for layer, policy in enumerate(self.oracle.policy) if policy is not None]
        return repr([self.real.blocks(layer) for layer in layers]), self.real.stats(), self.real.nbytes

    def begin_both(self, call):
        before = self.places()
        batch, model_batch, error = self.both(call)
        assert not error or self.places() == before
        if not error:
            self.batch, self.oracle_batch = batch, model_batch
            assert batch.positions.tolist() == model_batch.positions
            assert batch.seq_ids.tolist() == model_batch.seq_ids
        return not error

    def random(self, tokens, heads, dim):
        return self.rng.standard_normal((tokens, heads, dim), np.float32)

    def random_rows(self, count):
        """Keys, and values where they do not lie in the keys."""
        k, v = (self.random(count, self.heads, dim) for dim in self.dims)
        if self.transformed:  # codes of -127 and 127, and a scale that is a power of two
            k, v = (hadamard(np.where(x < 0, -127, 127) * np.float32(2**-7), 64) for x in (k, v))
        return (k,) if self.value_in_key else (k, v)

    def missing(self, layer):
        """Tokens that are still to be put."""
        if layer not in self.oracle.layers:
            return []
        return [t for t, row in enumerate(self.oracle_batch.rows[layer]) if row is None]

    def as_given(self, rows):
        """Rows as floats, or as the bytes that are stored: for the cache it is the same."""
        return [self.encoded(x) for x in rows] if self.rng.integers(2) else rows

    def encoded(self, rows):
        return blocks(hadamard(rows, 64), "q8_0") if self.transformed else np.ascontiguousarray(rows).view(np.uint8)

    def put(self, layer, first, count):
        rows = self.random_rows(count)
        self.batch.put(layer, *self.as_given(rows), first=first)
        self.oracle_batch.put(layer, *rows, first=first)

    def is_ready(self, layer, first, end):
        """Return whether all rows are put that these tokens descend from, or that precede the last in its sequence."""
        layer = self.oracle.source[layer]
        if self.oracle_batch.parents is not None:
            return not self.sees_but_missing(layer, first, end)
        last = {}
        for s, p in zip(self.oracle_batch.seq_ids[first:end], self.oracle_batch.positions[first:end], strict=True):
            last[s] = max(last.get(s, -1), p)
        return not any(
            self.oracle_batch.positions[t] <= last.get(self.oracle_batch.seq_ids[t], -1) for t in self.missing(layer)
        )

    def attend(self, layer, first, count, with_rows, **hides_or_shows):
        group = int(self.rng.integers(1, 4))
        q = self.random(count, self.heads * group, self.dims[0])
        rows = []
        if with_rows:
            rows = self.random_rows(count)
            self.oracle_batch.put(layer, *rows, first=first)
        options = {"first": first, "scale": 0.5, **hides_or_shows}
        out, lse = self.batch.attend(layer, q, *self.as_given(rows), **options, return_lse=True)
        assert out.shape == (count, self.heads * group, self.dims[1])
        mask = self.oracle_batch.dense(layer, **hides_or_shows)[2][first : first + count]
        np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(mask).any(1)[:, None].repeat(lse.shape[1], 1))
        assert_close(
            out, self.oracle_batch.attend(layer, q, **options), self.oracle_batch.dense(layer)[1], **self.error
        )

    def attend_all(self, layer):
        """Attend over all rows, and once more with tokens that see ahead, unless it is a layer without attention."""
        if self.oracle.policy[layer] is None:
            assert outcome(lambda: self.batch.attend(layer, np.ones((1, self.heads, self.dims[0]), "f4"), scale=1))[1]
            return
        if isinstance(self.oracle.policy[layer], oracle.CrossAttention):
            without = [s for s in self.oracle_batch.seq_ids if not self.oracle_batch.rows_of(layer, s)]
            for s in without if self.oracle.source[layer] == layer else []:
                self.put_encoded(layer, s)
            if without and self.oracle.source[layer] != layer:
                return
        count = len(self.batch)
        self.attend(layer, 0, count, with_rows=False)
        ahead = [None, True, self.rng.integers(0, 2, count).astype(bool).tolist()][self.rng.integers(3)]
        masked = self.some_ranges()
        self.attend(layer, 0, count, with_rows=False, non_causal=ahead, masked=masked)
        self.compare_dense(layer, non_causal=ahead, masked=masked)

    def some_ranges(self):
        """Ranges of positions, near those of the batch, that queries are not to see."""
        near = [int(self.rng.integers(len(self.batch))) for _ in range(self.rng.integers(4))]
        starts = [max(0, self.oracle_batch.positions[t] - int(self.rng.integers(-2, 12))) for t in near]
        return [
            (self.oracle_batch.seq_ids[t], p, p + int(self.rng.integers(9))) for t, p in zip(near, starts, strict=True)
        ]

    def compare_dense(self, layer, **hides_or_shows):
        found, expected = (b.dense(layer, **hides_or_shows) for b in (self.batch, self.oracle_batch))
        self.assert_rows(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[2], expected[2])

    def put_encoded(self, layer, seq_id):
        most = self.oracle.policy[layer].max_len
        rows = self.random_rows(int(self.rng.integers(1, most + 2)))
        calls = [lambda b=b: b.put(layer, *rows, seq_id=seq_id) for b in (self.batch, self.oracle_batch)]
        error, expected = (outcome(call)[1] for call in calls)
        assert error == expected
        if error == "CacheFullError":  # one more than there may be
            for b in (self.batch, self.oracle_batch):
                b.put(layer, *(x[:most] for x in rows), seq_id=seq_id)

    def assert_rows(self, found, expected):
        """Keys that were rotated are only close."""
        if self.exact:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    def finish(self, commit, keep=None):
        error = None
        if commit and keep is not None:
            error = self.finish_both("commit", keep)
        elif commit:
            error = self.finish_both("commit")
        else:
            self.finish_both("abort")
        if error:
            for layer in range(self.num_layers):
                for t in self.missing(layer):
                    self.put(layer, t, 1)
            assert not (self.finish_both("commit", keep) if keep is not None else self.finish_both("commit"))
        self.committed += commit
        self.aborted += not commit
        self.tokens += commit * (len(self.batch) if keep is None else len(keep))
        self.batch.commit()  # once it has ended, this does nothing
        self.batch = self.oracle_batch = None

    def finish_both(self, how, *arguments):
        batches = self.batch, self.oracle_batch
        (_, error), (_, expected) = (outcome(lambda b=b: getattr(b, how)(*arguments)) for b in batches)
        assert error == expected
        return error

    @rule(data=st.data(), size=sizes, commit=st.sampled_from([True, True, True, False]), attend=st.booleans())
    @precondition(lambda self: not self.batch)
    def whole_batch(self, data, size, commit, attend):
        if self.begin(data):
            self.put_rest(size, attend)
            self.finish(commit)

    @rule(n=st.integers(1, 12))
    @precondition(lambda self: not self.batch)
    def next_tokens(self, n):
        """Decode as a runner does with its only sequence."""
        if self.begin_both(lambda c: c.batch(n)):
            self.put_rest(100, True)
            self.finish(True)

    @rule(data=st.data(), steps=st.integers(1, 12))
    @precondition(lambda self: not self.batch)
    def decode(self, data, steps):
        """Feed a few sequences together, a token of each at a time."""
        seq_ids = data.draw(st.lists(st.sampled_from(self.oracle.sequences or [0]), unique=True, min_size=1))
        for _ in range(steps):
            positions = [self.oracle.next_position(s) for s in seq_ids]
            if self.begin_both(lambda c, p=positions: c.batch(positions=p, seq_ids=seq_ids)):
                self.put_rest(100, True)
                self.finish(True)

    def put_rest(self, size, attend):
        """All that is not put yet, in token ranges, attended over where what they see is there."""
        for layer in sorted(range(self.num_layers), key=lambda i: i not in self.oracle.layers):  # those that share last
            while missing := self.missing(layer):
                first, count = missing[0], 1
                while count < size and first + count in missing:
                    count += 1
                together = attend and set(missing) == set(range(first, first + count))
                if together:
                    self.attend(layer, first, count, with_rows=True)
                else:
                    self.put(layer, first, count)
                    if attend and self.is_ready(layer, first, first + count):
                        self.attend(layer, first, count, with_rows=False)
            if attend:
                self.attend_all(layer)

    @rule(data=st.data())
    def begin_only(self, data):
        self.begin(data)  # while one is open it is refused

    @rule(data=st.data())
    @precondition(lambda self: self.batch)
    def put_for_cross_attention(self, data):
        layer = data.draw(st.integers(0, self.num_layers - 1), label="layer")
        if self.oracle.source[layer] == layer and isinstance(self.oracle.policy[layer], oracle.CrossAttention):
            self.put_encoded(layer, data.draw(st.none() | st.sampled_from(self.oracle_batch.seq_ids), label="seq_id"))

    @rule(data=st.data())
    @precondition(lambda self: self.batch)
    def put_some(self, data):
        layer = data.draw(st.integers(0, self.num_layers - 1), label="layer")
        if layer not in self.oracle.layers:
            rows = self.random_rows(1)
            if not isinstance(self.oracle.policy[layer], oracle.CrossAttention) or self.oracle.source[layer] != layer:
                assert outcome(lambda: self.batch.put(layer, *rows))[1] == "ValueError"
            return
        first = data.draw(st.integers(0, len(self.batch) - 1), label="first")
        end = data.draw(st.integers(first + 1, len(self.batch)), label="end")
        free = all(t in self.missing(layer) for t in range(first, end))
        if free:
            self.put(layer, first, end - first)
        else:
            rows = self.random_rows(end - first)
            assert outcome(lambda: self.batch.put(layer, *rows, first=first))[1] == "ValueError"

    @rule(data=st.data())
    @precondition(lambda self: self.batch)
    def attend_some(self, data):
        layer = data.draw(st.integers(0, self.num_layers - 1), label="layer")
        first = data.draw(st.integers(0, len(self.batch) - 1), label="first")
        end = data.draw(st.integers(first + 1, len(self.batch)), label="end")
        if not self.oracle.keeps_tokens(layer):
            self.attend_all(layer)
        elif self.is_ready(layer, first, end):
            self.attend(layer, first, end - first, with_rows=False)
        elif missing := self.sees_but_missing(self.oracle.source[layer], first, end):
            q, rows = self.random(end - first, self.heads, self.dims[0]), self.random_rows(end - first)
            assert outcome(lambda: self.batch.attend(layer, q, first=first, scale=1))[1] == "ValueError"
            if missing - set(range(first, end)):  # with these rows not all is there either, and they are not stored
                assert outcome(lambda: self.batch.attend(layer, q, *rows, first=first, scale=1))[1] == "ValueError"

    def sees_but_missing(self, layer, first, end):
        """The tokens of the batch that these see, and that are not put yet."""
        batch = self.oracle_batch
        return {
            t
            for t in self.missing(layer)
            for i in range(first, end)
            if batch.seq_ids[t] == batch.seq_ids[i] and batch.sees(layer, i, t, batch.positions[t], causal=True)
        }

    @rule(size=sizes, commit=st.booleans())
    @precondition(lambda self: self.batch)
    def put_and_finish(self, size, commit):
        self.put_rest(size, True)
        self.finish(commit)

    @rule(commit=st.booleans())
    @precondition(lambda self: self.batch)
    def end(self, commit):
        self.finish(commit)

    @rule(data=st.data())
    @precondition(lambda self: self.batch)
    def keep_some(self, data):
        keep = data.draw(st.lists(st.integers(0, len(self.batch) - 1), unique=True), label="keep")
        self.finish(True, keep)

    # ---- edits

    def some_sequence(self, data):
        """Mostly one that holds something."""
        return data.draw(st.sampled_from(self.oracle.sequences * 3 + SEQUENCES), label="seq_id")

    def some_position(self, data, seq_id):
        return data.draw(st.sampled_from(self.interesting(seq_id)), label="position")

    def interesting(self, seq_id):
        """Positions at and beside everything that a sequence holds or has lost."""
        edges = {0, self.oracle.next_position(seq_id)}
        for layer in self.groups.values():
            edges.update(self.oracle.positions(seq_id=seq_id, layer=layer))
            begin, lost = self.oracle.lost_at(layer, seq_id)
            edges |= {begin, lost, lost + getattr(self.oracle.policy[layer], "window", 1) - 1}
        return sorted({p for edge in edges for p in (edge - 1, edge, edge + 1) if 0 <= p <= LAST + 1})

    @rule(data=st.data(), to_the_end=st.booleans(), behind=st.booleans())
    def share(self, data, to_the_end, behind):
        src, dst = self.some_sequence(data), self.some_sequence(data)
        begin = self.oracle.next_position(dst) if behind else self.some_position(data, src)
        end = None if to_the_end else self.some_position(data, src)
        self.both(lambda c: c.share_range(src, dst, begin, end))

    @rule(data=st.data(), dst=sequences, whole=st.booleans())
    def fork(self, data, dst, whole):
        src = self.some_sequence(data)
        if whole:
            self.both(lambda c: c.fork(src, dst))
        else:
            length = self.some_position(data, src)
            self.both(lambda c: c.copy_prefix(src, dst, length))

    @rule(data=st.data(), shift=st.booleans(), to_the_end=st.booleans())
    def remove(self, data, shift, to_the_end):
        seq_id = self.some_sequence(data)
        begin, end = self.some_position(data, seq_id), None if to_the_end else self.some_position(data, seq_id)
        self.both(lambda c: c.remove(begin, end, seq_id=seq_id, shift=shift))

    @rule(data=st.data(), to_the_end=st.booleans(), delta=st.integers(-9, 9) | st.integers(-(2**31), 2**31 - 1))
    def shift(self, data, to_the_end, delta):
        seq_id = self.some_sequence(data)
        begin, end = self.some_position(data, seq_id), None if to_the_end else self.some_position(data, seq_id)
        self.both(lambda c: c.shift(begin, end, delta, seq_id=seq_id))

    @rule(data=st.data(), to_the_end=st.booleans(), divisor=st.integers(1, 4))
    def divide(self, data, to_the_end, divisor):
        seq_id = self.some_sequence(data)
        begin, end = self.some_position(data, seq_id), None if to_the_end else self.some_position(data, seq_id)
        self.both(lambda c: c.divide(begin, end, divisor, seq_id=seq_id))

    @rule()
    def settle(self):
        if self.views and not self.batch:
            assert outcome(self.real.settle)[1] == "BufferError"
            return
        _, _, error = self.both(lambda c: c.settle())
        if not error and not self.transformed:
            for s in self.oracle.sequences:
                assert not any(span.delta for layer in self.oracle.layers for span in self.real.spans(layer, seq_id=s))

    @rule(data=st.data(), count=st.integers(1, 9), skip_missing=st.booleans())
    def inject(self, data, count, skip_missing):
        seq_id, layer = self.some_sequence(data), data.draw(st.integers(0, self.num_layers - 1), label="layer")
        begin = data.draw(st.sampled_from(self.interesting(seq_id)), label="begin")
        rows = [np.swapaxes(x, 0, 1) for x in self.random_rows(count)]
        given = {self.real: self.as_given(rows), self.oracle: rows}
        if begin + count <= LAST:
            real, expected, _ = self.both(
                lambda c: c.inject(layer, begin, *given[c], seq_id=seq_id, skip_missing=skip_missing)
            )
            assert real == expected

    @rule()
    @precondition(lambda self: not self.views)
    def go_on_with_a_copy(self):
        other, error = outcome(lambda: copy.copy(self.real))
        assert error == ("CacheBusyError" if self.batch else None)
        if other:
            self.real.close()
            self.real = other
            self.committed = self.aborted = self.tokens = 0  # statistics begin anew

    @rule(data=st.data(), num_tokens=st.integers(1, 100))
    def reserve(self, data, num_tokens):
        seq_id = self.some_sequence(data)
        before = self.places()
        _, _, error = self.both(lambda c: c.reserve(num_tokens, seq_id=seq_id))
        assert not error or self.places() == before

    @rule(data=st.data())
    def room(self, data):
        seq_id = self.some_sequence(data)
        before = self.places()
        found, expected, error = self.both(lambda c: c.room(seq_id))
        assert error or min(found, 200) == min(expected, LAST + 1 - self.oracle.next_position(seq_id))
        assert self.places() == before

    @rule(data=st.data(), every=st.integers(2, 3))
    def make_holes(self, data, every):
        seq_id = self.some_sequence(data)
        for position in self.oracle.positions(seq_id=seq_id)[::every]:
            self.both(lambda c, p=position: c.remove(p, p + 1, seq_id=seq_id, shift=False))

    @rule(data=st.data())
    def truncate(self, data):
        seq_id = self.some_sequence(data)
        length = self.some_position(data, seq_id)
        self.both(lambda c: c.truncate(length, seq_id=seq_id))

    @rule(data=st.data(), how=st.sampled_from(["one", "one", "all but one", "all"]))
    def forget(self, data, how):
        seq_id = self.some_sequence(data)
        call = {"one": lambda c: c.clear(seq_id), "all but one": lambda c: c.keep(seq_id), "all": lambda c: c.clear()}
        self.both(call[how])

    @rule()
    def compact(self):
        if self.views and not self.batch:
            assert outcome(self.real.compact)[1] == "BufferError"
            return
        _, _, error = self.both(lambda c: c.compact())
        if not error:
            stats = self.real.stats()
            assert stats["wasted_slots"] == stats["blocks_free"] == 0

    # ---- views

    @rule(data=st.data())
    @precondition(lambda self: self.oracle.sequences and not self.transformed)
    def take_views(self, data):
        """Take views of all rows that a sequence holds."""
        seq_id = data.draw(st.sampled_from(self.oracle.sequences), label="seq_id")
        views = []
        for layer in range(self.num_layers):
            spans = self.real.spans(layer, seq_id=seq_id)
            views += [view for span in spans for view in (span.k, span.v)]
            for call in (self.real.keys, self.real.values):
                view, error = outcome(lambda call=call, layer=layer: call(layer, seq_id=seq_id, copy=False))
                off = call == self.real.keys and any(span.delta for span in spans)
                assert not error or (error == "ValueError" and (len(spans) > 1 or off))
                if spans and not error:
                    views.append(view)
        self.views.append([(view, view.copy()) for view in views])

    @rule(data=st.data(), really=st.booleans())
    @precondition(lambda self: self.views)
    def drop_views(self, data, really):
        if really:
            del self.views[data.draw(st.integers(0, len(self.views) - 1), label="views")]

    # ---- everything visible

    @invariant()
    def cache_is_valid(self):
        self.real.validate()

    @invariant()
    def views_show_what_they_showed(self):
        for pairs in self.views:
            for view, before in pairs:
                np.testing.assert_array_equal(view, before)

    @invariant()
    def sequences_are_equal(self):
        real, expected = self.real, self.oracle
        assert real.sequences == expected.sequences
        for s in SEQUENCES:
            for name in ("seq_len", "first_position", "last_position", "next_position"):
                assert getattr(real, name)(s) == getattr(expected, name)(s), name
            for position in self.interesting(s):
                assert real.can_resume(position, seq_id=s) == expected.can_resume(position, seq_id=s), position

    @invariant()
    def rows_are_equal(self):
        for s in self.oracle.sequences:
            for layer in range(self.num_layers):
                positions = self.oracle.positions(seq_id=s, layer=layer)
                assert self.real.positions(seq_id=s, layer=layer).tolist() == positions
                assert self.real.seq_len(s, layer=layer) == len(positions)
                for name in ("first_position", "last_position"):
                    assert getattr(self.real, name)(s, layer=layer) == getattr(self.oracle, name)(s, layer=layer), name
                if positions:
                    self.compare_rows(layer, s, positions)

    @invariant()
    def batch_shows_its_rows(self):
        """Rows of the open batch's sequences: those that are stored, then those that were put."""
        if not self.batch or self.transformed:
            return
        for s in {*self.oracle_batch.seq_ids, SEQUENCES[0]}:
            for layer in range(self.num_layers):
                spans, error = outcome(lambda s=s, layer=layer: self.batch.spans(layer, seq_id=s))
                refused = self.oracle.policy[layer] is None
                assert error == ("ValueError" if refused or s not in self.oracle_batch.seq_ids else None)
                if error:
                    continue
                k, v = self.oracle.stacked(layer, [r for r, _ in self.oracle_batch.rows_of(layer, s)])
                self.assert_rows(self.batch.keys(layer, seq_id=s), k)
                np.testing.assert_array_equal(self.batch.values(layer, seq_id=s), v)
                shown = [p for span in spans for p in span.positions.tolist()]
                assert shown == [r.position for r, _ in self.oracle_batch.rows_of(layer, s)]
                if spans:
                    np.testing.assert_array_equal(np.concatenate([span.v for span in spans], 1), v)

    def compare_views(self, layer, seq_id, positions, k, v):
        self.assert_rows(self.real.keys(layer, seq_id=seq_id), k)
        np.testing.assert_array_equal(self.real.values(layer, seq_id=seq_id), v)
        spans = self.real.spans(layer, seq_id=seq_id)
        assert np.concatenate([span.positions for span in spans]).tolist() == positions
        rotated = [self.rope(layer, span.k, span.delta) if span.delta else span.k for span in spans]
        self.assert_rows(np.concatenate(rotated, 1), k)
        np.testing.assert_array_equal(np.concatenate([span.v for span in spans], 1), v)

    def compare_rows(self, layer, seq_id, positions):
        k, v = self.oracle.gather(layer, seq_id=seq_id)
        found = self.real.gather(layer, seq_id=seq_id)
        self.assert_rows(found[0], k)
        np.testing.assert_array_equal(found[1], v)
        for raw, rows in zip(self.real.gather(layer, seq_id=seq_id, raw=True), found, strict=True):
            np.testing.assert_array_equal(raw, self.encoded(rows))
        if not self.transformed:  # no array can show quantised rows
            self.compare_views(layer, seq_id, positions, k, v)
        for position in {positions[0], positions[len(positions) // 2], max(positions) + 1}:
            if position <= LAST:
                one, expected = (c.get(layer, position, seq_id=seq_id) for c in (self.real, self.oracle))
                assert (one is None) == (expected is None)
                if one:
                    self.assert_rows(one[0], expected[0])
                    np.testing.assert_array_equal(one[1], expected[1])
        begin, end = max(0, min(positions) - 2), min(positions) + 9
        if end <= LAST:
            one, expected = (c.extract(layer, begin, end, seq_id=seq_id) for c in (self.real, self.oracle))
            self.assert_rows(one[0], expected[0])
            np.testing.assert_array_equal(one[1], expected[1])

    @invariant()
    def counters_are_right(self):
        stats = self.real.stats()
        pending = len(self.batch) if self.batch else 0
        live = [self.oracle.live(layer) + pending for layer in self.groups.values()]
        if not any(isinstance(p, oracle.CrossAttention) for p in self.oracle.policy):
            assert stats["live_slots"] == sum(live)
        assert (stats["batches"], stats["aborted"], stats["tokens"]) == (self.committed, self.aborted, self.tokens)
        if self.real.capacity is not None:
            assert self.real.utilization == max(live, default=0) / self.real.capacity

    def teardown(self):
        if not hasattr(self, "views"):
            return
        if self.batch:
            self.finish(commit=False)
        self.views.clear()
        self.real.compact()
        self.rows_are_equal()
        self.cache_is_valid()
        self.real.clear()
        assert self.real.stats()["live_slots"] == 0
        self.real.close()


Machine.TestCase.settings = settings(stateful_step_count=40)
TestMachine = Machine.TestCase


# ---- what random steps find only now and then


def test_the_last_run_is_expired_while_another_sequence_holds_it():
    """The next token then goes on in the block of a run before it, which is full: one more block is needed."""
    cache = kvcache.KVCache(1, 1, 1, None, dtype="f32", policy=kvcache.SlidingWindow(2), max_sequences=2, block_size=4)
    x = np.arange(4, dtype=np.float32)[:, None, None]
    for seq_id, positions in ((0, [10, 11, 12, 13]), (1, [0])):
        with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
            batch.put(0, x[: len(positions)], x[: len(positions)])
    cache.share_range(1, 0)
    with cache.batch(1) as batch:
        batch.put(0, x[2:3], x[2:3])
    assert cache.positions().tolist() == [13, 14]
    assert cache.keys(0).ravel().tolist() == [3, 2]
    assert cache.positions(seq_id=1).tolist() == [0]
    cache.validate()
