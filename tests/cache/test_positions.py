"""Tokens that move: shift, divide, remove; keys rotated late, at once, or by a function; extract and inject."""

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from support.rotation import rotated

import kvcache

HEADS, DIM = 2, 16
FREQS = 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
ROPES = {
    "halves": kvcache.Rope(FREQS),
    "interleaved": kvcache.Rope(FREQS, interleaved=True),
    "slice": kvcache.Rope(FREQS[:3], first_dim=4),
    "interleaved slice": kvcache.Rope(FREQS[2:5].tolist(), True, np.int8(10)),
}


def raw(n, seed=0):
    """Keys without rotation and values, [n, HEADS, DIM]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)


def new_cache(rope, num_layers=1, dtype="f32", **options):
    return kvcache.KVCache(num_layers, HEADS, DIM, None, dtype=dtype, rope=rope, max_sequences=None, **options)


def feed(cache, keys, values, positions, rope=None, seq_id=0):
    positions = np.asarray(positions)
    if rope is not None:
        keys = rotated(keys, positions[:, None], rope).astype(np.float32)
    with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, keys, values)


def check_rows(cache, keys, values, rope=None, seq_id=0, atol=2e-6):
    """Return whether each row is its key, rotated for its position."""
    positions = cache.positions(seq_id=seq_id)
    if rope is not None:
        keys = rotated(keys, positions[:, None], rope)
    k, v = cache.gather(0, seq_id=seq_id)
    np.testing.assert_allclose(k, np.swapaxes(keys, 0, 1), atol=atol)
    np.testing.assert_array_equal(v, np.swapaxes(values, 0, 1))
    cache.validate()


# ---- Rope as a value


def test_a_rope_is_a_value():
    rope = ROPES["halves"]
    assert rope == kvcache.Rope(FREQS.tolist()) == kvcache.Rope(iter(FREQS.tolist()), np.False_, np.int64(0))
    assert hash(rope) == hash(kvcache.Rope(tuple(FREQS)))
    assert rope != kvcache.Rope(FREQS, interleaved=True)
    assert rope.inv_freq == tuple(FREQS)
    assert (rope.interleaved, rope.first_dim) == (False, 0)
    assert kvcache.Rope(np.ones(1, np.float16)).inv_freq == (1.0,)
    assert repr(kvcache.Rope([0.5])) == "Rope(1 frequency of 0.5, interleaved=False, first_dim=0)"
    assert repr(rope).startswith("Rope(8 frequencies from 1 to 0.000316")
    with pytest.raises(AttributeError):
        rope.first_dim = 1


def test_ropes_of_a_cache():
    def function(layer, keys, delta):
        return keys

    ropes = [None, False, ROPES["halves"], function]
    cache = new_cache(ropes, num_layers=4)
    assert cache.rope == tuple(ropes)
    for text in ("no rotation", "Rope(8 frequencies", "rope function"):
        assert text in repr(cache)


# ---- moving


@pytest.mark.parametrize("name", ROPES)
def test_shift(name):
    rope, (keys, values) = ROPES[name], raw(12)
    cache = new_cache(rope, block_size=4)
    feed(cache, keys, values, range(12), rope)
    cache.shift(4, 8, 100)
    assert cache.positions().tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9, 10, 11]
    check_rows(cache, keys, values, rope)
    cache.shift(104, None, -98)
    cache.shift(8, 12, 1)
    assert cache.positions().tolist() == [0, 1, 2, 3, 6, 7, 9, 10, 9, 10, 11, 12]
    check_rows(cache, keys, values, rope)
    assert cache.stats()["rows_moved"] == 0
    k, v = cache.get(0, 9)  # of the two there, the later
    np.testing.assert_allclose(k, rotated(keys[8], 9, rope), atol=2e-6)
    np.testing.assert_array_equal(v, values[8])


def test_tokens_below_zero_are_dropped():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope)
    feed(cache, keys, values, range(6), rope)
    cache.shift(0, None, -2)
    assert cache.positions().tolist() == [0, 1, 2, 3]
    check_rows(cache, keys[2:], values[2:], rope)
    cache.shift(0, None, -(2**31))
    assert cache.sequences == []


@pytest.mark.parametrize("name", ROPES)
def test_divide(name):
    rope, (keys, values) = ROPES[name], raw(11)
    cache = new_cache(rope, block_size=4)
    feed(cache, keys, values, range(11), rope)
    cache.divide(2, 9, 3)
    assert cache.positions().tolist() == [0, 1, 0, 1, 1, 1, 2, 2, 2, 9, 10]
    check_rows(cache, keys, values, rope)
    cache.divide(0, None, 1)
    check_rows(cache, keys, values, rope)


def test_without_rotation_keys_stay_as_they_are():
    keys, values = raw(6)
    cache = new_cache(False)
    feed(cache, keys, values, range(6))
    cache.shift(0, None, 7)
    cache.divide(0, None, 2)
    cache.remove(3, 4)
    assert cache.positions().tolist() == [3, 3, 4, 4, 5]
    check_rows(cache, keys[1:], values[1:])
    assert cache.keys(0, copy=False).shape == (HEADS, 5, DIM)


@pytest.mark.parametrize("name", ROPES)
def test_remove_moves_later_tokens(name):
    rope, (keys, values) = ROPES[name], raw(12)
    cache = new_cache(rope)
    feed(cache, keys, values, range(12), rope)
    cache.remove(1, 4)
    cache.remove(6, 8)
    assert cache.positions().tolist() == list(range(7))
    stay = [0, 4, 5, 6, 7, 8, 11]
    check_rows(cache, keys[stay], values[stay], rope)
    assert {span.delta for span in cache.spans(0)} == {0, -3, -5}
    assert cache.next_position() == 7
    assert cache.can_resume(7)


def test_several_sequences_see_the_same_rows_elsewhere():
    rope, (keys, values) = ROPES["halves"], raw(8)
    cache = new_cache(rope, block_size=4)
    feed(cache, keys, values, range(8), rope)
    for seq_id in (1, 2):
        cache.fork(0, seq_id)
        cache.remove(0, 2 * seq_id, seq_id=seq_id)
    for seq_id in range(3):
        assert cache.positions(seq_id=seq_id).tolist() == list(range(8 - 2 * seq_id))
        check_rows(cache, keys[2 * seq_id :], values[2 * seq_id :], rope, seq_id)
    assert cache.stats()["live_slots"] == 8
    more = raw(1, seed=1)
    for seq_id in range(3):
        feed(cache, *more, [8 - 2 * seq_id], rope, seq_id)
        both = [np.concatenate([x[2 * seq_id :], y]) for x, y in zip((keys, values), more, strict=True)]
        check_rows(cache, *both, rope, seq_id)
    cache.settle()
    for seq_id in range(3):
        both = [np.concatenate([x[2 * seq_id :], y]) for x, y in zip((keys, values), more, strict=True)]
        check_rows(cache, *both, rope, seq_id)
        assert {span.delta for span in cache.spans(0, seq_id=seq_id)} == {0}


def attention(q, k, v, scale):
    """q [tokens, heads, dim] over all of k, v [heads, n, dim], in float64."""
    group = q.shape[1] // k.shape[0]
    k, v = np.repeat(k, group, 0).astype(np.float64), np.repeat(v, group, 0).astype(np.float64)
    scores = np.einsum("thd,hnd->thn", q.astype(np.float64), k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("thn,hnd->thd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("name", ROPES)
def test_queries_see_keys_where_they_stand(name):
    rope, (keys, values) = ROPES[name], raw(60)
    cache = new_cache(rope)
    feed(cache, keys, values, range(60), rope)
    cache.remove(5, 15)
    cache.remove(20, 33)
    keys, values = (np.delete(x, [*range(5, 15), *range(30, 43)], 0) for x in (keys, values))
    q, _ = raw(2, seed=1)
    q = np.concatenate([q, q[:, ::-1]], 1)
    new_keys, new_values = raw(2, seed=2)
    at = cache.next_position() + np.arange(2)
    with cache.batch(2) as batch:
        out = batch.attend(0, q, rotated(new_keys, at[:, None], rope).astype(np.float32), new_values)
    k, v = np.concatenate([keys, new_keys]), np.concatenate([values, new_values])
    k = np.swapaxes(rotated(k, cache.positions()[:, None], rope), 0, 1)
    expected = [
        attention(q[i : i + 1], k[:, : 38 + i], np.swapaxes(v, 0, 1)[:, : 38 + i], DIM**-0.5)[0] for i in range(2)
    ]
    np.testing.assert_allclose(out, expected, atol=1e-5)


# ---- views


def test_keys_that_wait_for_their_rotation_have_no_view():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope)
    feed(cache, keys, values, range(6), rope)
    cache.remove(0, 2)
    with pytest.raises(ValueError, match=r"copy=False.* -2.*settle\(\)"):
        cache.keys(0, copy=False)
    assert cache.values(0, copy=False).shape == (HEADS, 4, DIM)
    for copy in (None, True):
        k = cache.keys(0, copy=copy)
        assert k.flags.owndata
        np.testing.assert_allclose(np.swapaxes(k, 0, 1), rotated(keys[2:], np.arange(4)[:, None], rope), atol=2e-6)
    stored = np.swapaxes(cache.spans(0)[0].k, 0, 1)
    np.testing.assert_allclose(stored, rotated(keys[2:], np.arange(2, 6)[:, None], rope), atol=2e-6)
    del stored, k
    cache.settle()
    view = cache.keys(0, copy=False)
    np.testing.assert_allclose(np.swapaxes(view, 0, 1), rotated(keys[2:], np.arange(4)[:, None], rope), atol=2e-6)
    cache.shift(1, None, 1)
    with pytest.raises(BufferError):
        cache.settle()
    assert np.shares_memory(view, cache.spans(0)[0].k)


def test_copies_are_of_the_stored_type():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope, dtype="bf16")
    feed(cache, keys, values, range(6), rope)
    cache.remove(0, 2)
    assert cache.keys(0).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(cache.keys(0), cache.gather(0, dtype="bf16")[0])


# ---- functions


def test_a_function_moves_keys():
    calls = []

    def move(layer, keys, delta):
        calls.append((layer, keys.shape, keys.dtype, delta))
        return keys + (10 * delta + layer)

    cache = new_cache(move, num_layers=2, block_size=4)
    keys, values = raw(6)
    feed(cache, keys, values, range(6))
    cache.shift(2, None, 3)
    assert {(layer, delta) for layer, _, _, delta in calls} == {(0, 3), (1, 3)}
    assert {dtype for _, _, dtype, _ in calls} == {np.dtype(np.float32)}
    for layer in range(2):
        assert sum(shape[1] for at, shape, _, _ in calls if at == layer) == 4
        k = np.swapaxes(cache.gather(layer)[0], 0, 1)
        np.testing.assert_array_equal(k[:2], keys[:2])
        np.testing.assert_array_equal(k[2:], keys[2:] + np.float32(30 + layer))
    cache.divide(5, None, 2)
    assert cache.positions().tolist() == [0, 1, 2, 3, 3, 4]
    moves = np.array([2 - 5, 3 - 6, 3 - 7, 4 - 8], np.float32)[:, None, None]
    np.testing.assert_allclose(
        np.swapaxes(cache.gather(0)[0], 0, 1)[2:], keys[2:] + 30 + 10 * moves, rtol=1e-6, atol=1e-5
    )
    assert cache.keys(0).shape == (HEADS, 6, DIM)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_function_may_return_any_float(dtype):
    cache = new_cache(lambda layer, keys, delta: np.asfortranarray(keys * 2, dtype))
    feed(cache, np.ones((3, HEADS, DIM), np.float32), np.ones((3, HEADS, DIM), np.float32), range(3))
    cache.shift(0, None, 1)
    assert (cache.keys(0) == 2).all()


def test_a_function_leaves_other_sequences_and_views_alone():
    cache = new_cache(lambda layer, keys, delta: keys + delta)
    keys, values = raw(6)
    feed(cache, keys, values, range(6))
    cache.fork(0, 1)
    view = cache.keys(0, copy=False)
    cache.remove(0, 2, seq_id=1)
    np.testing.assert_array_equal(np.swapaxes(view, 0, 1), keys)
    np.testing.assert_array_equal(np.swapaxes(cache.keys(0, seq_id=1), 0, 1), keys[2:] - 2)
    cache.validate()


def test_a_function_may_keep_what_it_gets():
    got = []

    def move(layer, keys, delta):
        got.append(keys)
        return keys

    cache = new_cache(move)
    keys, values = raw(3)
    feed(cache, keys, values, range(3))
    cache.shift(0, None, 5)
    del cache
    gc.collect()
    np.testing.assert_array_equal(np.concatenate(got, 1), np.swapaxes(keys, 0, 1))


def test_errors_of_a_function_in_threads():
    """Each thread gets its own."""
    barrier = threading.Barrier(2, timeout=30)

    def fail(layer, keys, delta):
        barrier.wait()
        raise KeyError(delta)

    cache = new_cache(fail)
    keys, values = raw(3)
    for seq_id in (1, 2):
        feed(cache, keys, values, range(3), seq_id=seq_id)
    caught = {}

    def edit(seq_id):
        try:
            cache.shift(0, None, seq_id, seq_id=seq_id)
        except KeyError as error:
            caught[seq_id] = error.args

    threads = [threading.Thread(target=edit, args=(seq_id,)) for seq_id in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught == {1: (1,), 2: (2,)}
    check_rows(cache, keys, values, seq_id=1)


def test_interrupts_go_through():
    def interrupt(layer, keys, delta):
        raise KeyboardInterrupt

    cache = new_cache(interrupt)
    feed(cache, *raw(3), range(3))
    with pytest.raises(KeyboardInterrupt):
        cache.shift(0, None, 1)
    assert cache.positions().tolist() == [0, 1, 2]


def test_a_function_that_knows_its_cache_does_not_keep_it():
    class Mover:
        def __call__(self, layer, keys, delta):
            return keys

    mover = Mover()
    cache = mover.cache = new_cache(mover)
    feed(cache, *raw(3), range(3))
    mover.batch = cache.batch(1)
    gone = weakref.ref(mover)
    del mover, cache
    gc.collect()
    assert gone() is None


# ---- extract and inject


def test_extract():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope, dtype="f32")
    feed(cache, keys, values, [2, 3, 5, 5, 9, 10], rope)
    cache.shift(9, None, -2)
    k, v = cache.extract(0, 1, 10)
    assert (k.shape, v.shape, k.dtype, v.dtype) == ((HEADS, 9, DIM), (HEADS, 9, DIM), np.float32, np.float32)
    there = {2: 0, 3: 1, 5: 3, 7: 4, 8: 5}
    for position in range(1, 10):
        i = there.get(position)
        expected = np.zeros((HEADS, DIM)) if i is None else rotated(keys[i], position, rope)
        np.testing.assert_allclose(k[:, position - 1], expected, atol=2e-6)
        np.testing.assert_array_equal(v[:, position - 1], 0 if i is None else values[i])
    assert cache.extract(0, 4, 4)[0].shape == (HEADS, 0, DIM)
    assert not cache.extract(0, 0, 3, seq_id=8)[0].any()


def test_inject():
    rope, (keys, values) = ROPES["halves"], raw(6)
    cache = new_cache(rope, block_size=4)
    feed(cache, keys, values, [0, 1, 2, 4, 5, 6], rope)
    cache.fork(0, 1)
    view = cache.keys(0, copy=False)[:, :4] if len(cache.spans(0)) == 1 else cache.spans(0)[0].k
    before = view.copy()
    cache.shift(4, None, 10)
    new_keys, new_values = raw(14, seed=1)
    k = np.swapaxes(rotated(new_keys, np.arange(2, 16)[:, None], rope).astype(np.float32), 0, 1)
    assert cache.inject(0, 2, k, np.swapaxes(new_values, 0, 1), skip_missing=True) == 3
    expected = [np.concatenate([x[:2], y[[0, 12, 13]], x[5:]]) for x, y in ((keys, new_keys), (values, new_values))]
    assert cache.positions().tolist() == [0, 1, 2, 14, 15, 16]
    check_rows(cache, *expected, rope, atol=5e-6)
    check_rows(cache, keys, values, rope, seq_id=1)
    np.testing.assert_array_equal(view, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_inject_of_any_array(dtype):
    cache = new_cache(False)
    feed(cache, *raw(4), range(4))
    k = np.arange(HEADS * 2 * DIM).reshape(DIM, 2, HEADS).T.astype(dtype)
    assert cache.inject(0, 1, k, -k) == 2
    assert cache.inject(0, 1, k[::-1], -k[..., ::-1], seq_id=5, skip_missing=True) == 0  # holds nothing
    got = cache.extract(0, 1, 3)
    np.testing.assert_array_equal(got[0], k.astype(np.float32))
    np.testing.assert_array_equal(got[1], -k.astype(np.float32))
    assert cache.sequences == [0]


def test_inject_where_nothing_is_stored():
    cache = new_cache(False, block_size=4)
    feed(cache, *raw(6), [0, 1, 3, 4, 7, 9])
    before = cache.extract(0, 0, 12)
    new = np.ones((HEADS, 12, DIM), np.float32)
    with pytest.raises(
        IndexError, match=r"nothing at 6 of 12 positions in layer 0: 2, 5 to 6, 8, 10 to 11; .* skip_missing"
    ):
        cache.inject(0, 0, new, new)
    with pytest.raises(IndexError, match=r"sequence 5 holds nothing at 2 of 2 positions in layer 0: 0 to 1;"):
        cache.inject(0, 0, new[:, :2], new[:, :2], seq_id=5)
    with pytest.raises(IndexError, match=r"nothing at 994 of 1000 positions in layer 0: 2, 5 to 6, 8, 10 to 999;"):
        cache.inject(0, 0, *[np.broadcast_to(new[:, :1], (HEADS, 1000, DIM))] * 2)
    for got, expected in zip(cache.extract(0, 0, 12), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert cache.inject(0, 3, new[:, :2], new[:, :2]) == 2
    assert cache.inject(0, 0, new, new, skip_missing=True) == 6
    assert cache.extract(0, 0, 10)[0][:, :, 0].tolist() == [[1, 1, 0, 1, 1, 0, 0, 1, 0, 1]] * HEADS


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_rewriting_on_several_threads(dtype):
    """inject, settle, divide and a function's shift: the bits are those of one thread."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((700, 4, 64)).astype(np.float32)

    def nudge(layer, keys, delta):
        return keys + delta

    rows = []
    for rope in (kvcache.Rope(1 / 100 ** np.linspace(0, 1, 32)), nudge):
        for threads in (1, 3):
            cache = kvcache.KVCache(
                2, 4, 64, None, dtype=dtype, rope=rope, max_sequences=None, block_size=300, num_threads=threads
            )
            with cache.batch(700) as batch:
                for layer in range(2):
                    batch.put(layer, x, x)
            cache.fork(0, 1)
            cache.shift(100, None, 7)
            cache.shift(300, None, 5)
            cache.divide(400, 600, 2)
            cache.inject(1, 0, x[:90].swapaxes(0, 1), x[:90].swapaxes(0, 1))
            cache.inject(0, 120, x[:170].swapaxes(0, 1), x[:170].swapaxes(0, 1))
            cache.inject(0, 120, x[:170].swapaxes(0, 1), x[:170].swapaxes(0, 1), seq_id=1)
            cache.settle()
            cache.validate()
            rows.append([cache.gather(layer, seq_id=s) for layer in range(2) for s in range(2)])
    for one, several in (rows[:2], rows[2:]):
        np.testing.assert_equal(several, one)


def test_settle_of_nothing():
    cache = new_cache(None)
    cache.settle()
    feed(cache, *raw(2), range(2))
    cache.settle()
    assert cache.seq_len() == 2


# ---- attention over keys of many deltas


def scattered(options, changes, rows=300, heads=2, dim=64):
    """Make a cache whose sequence 0 changes delta `changes` times in its first 200 rows."""
    rng = np.random.default_rng(9)
    cache = kvcache.KVCache(1, heads, dim, None, max_sequences=None, **options)
    x = rng.standard_normal((rows, heads, dim)).astype(np.float32)
    step = 200 // (changes + 1)
    positions = [i + min(i // step, changes) for i in range(rows)]
    with cache.batch(positions=positions, seq_ids=[0] * rows) as batch:
        batch.put(0, x, x[:, ::-1])
    for change in range(changes):
        cache.remove(step * (change + 1), step * (change + 1) + 1)  # a gap
    assert cache.positions().tolist() == list(range(rows))
    assert len({span.delta for span in cache.spans(0)} if options.get("dtype") == "f32" else {}) in (0, changes + 1)
    return cache


def queries(count, heads=8, dim=64):
    return np.random.default_rng(count).standard_normal((count, heads, dim)).astype(np.float32)


def attended(cache, q, seq_ids=(0,)):
    """Attend with the same number of tokens of each of these sequences."""
    count = len(q) // len(seq_ids)
    positions = [cache.next_position(s) + i for s in seq_ids for i in range(count)]
    with cache.batch(positions=positions, seq_ids=[s for s in seq_ids for _ in range(count)]) as batch:
        x = np.zeros((len(q), 2, q.shape[2]), np.float32)  # which every type holds
        out = batch.attend(0, q, x, x)
        batch.abort()
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("changes", [1, 3, 20, 199])
def test_attention_over_many_deltas(changes, dtype, interleaved):
    """The result is that over keys that were rotated at once, for few query rows and for many."""
    rope = kvcache.Rope(1 / 100 ** np.linspace(0, 1, 20), interleaved=interleaved, first_dim=8)
    cache = scattered({"rope": rope, "dtype": dtype}, changes)
    keys, values = cache.gather(0)
    plain = kvcache.KVCache(1, 2, 64, None, dtype="f32")
    with plain.batch(300) as batch:
        batch.put(0, keys, values, layout="HTD")
    for count in (1, 3, 40):
        q = queries(count)
        tolerance = 2e-6 if dtype in ("f32", "f16", "bf16") else 2e-2  # integer products round the queries
        np.testing.assert_allclose(attended(cache, q), attended(plain, q), rtol=0, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("changes", [2, 30, 199])
def test_many_deltas_in_any_company(changes, dtype):
    """The bits are the same for any threads and blocks, and among forks that share the rows."""
    rope = kvcache.Rope(1 / 100 ** np.linspace(0, 1, 32))
    alone = [attended(scattered({"rope": rope, "dtype": dtype}, changes), queries(n)) for n in (1, 24)]
    for options in ({"block_size": 7}, {"num_threads": 3, "block_size": 1000}):
        cache = scattered({"rope": rope, "dtype": dtype, **options}, changes)
        for out in alone:
            np.testing.assert_array_equal(attended(cache, queries(len(out))), out)
        for fork in range(1, 40):
            cache.fork(0, fork)
            if fork % 3 == 0:
                cache.remove(150 + fork, 152 + fork, seq_id=fork)
        for out in alone[:1]:
            together = attended(cache, np.concatenate([queries(1)] * 40), range(40))
            np.testing.assert_array_equal(together[0], out[0])
            np.testing.assert_array_equal(together[1], out[0])
