"""KVCache from Python: sequences, edits, views, memory, closing."""

import copy
import dataclasses
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
from support.saved_states import everything

import kvcache


def row(position, seq_id=0, layer=0):
    """The number that fills a token's key; one more fills its value."""
    return position + 100 * seq_id + 1000 * layer


def feed(cache, positions, seq_id=0):
    """Append tokens whose rows say where they stand."""
    positions = np.asarray(positions)
    with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
        for layer in range(cache.num_layers):
            k = np.zeros((len(positions), cache.layers[layer].num_kv_heads, cache.layers[layer].head_dim), np.float32)
            v = np.zeros((len(positions), cache.layers[layer].num_kv_heads, cache.layers[layer].v_head_dim), np.float32)
            k += row(positions, seq_id, layer)[:, None, None]
            v += row(positions, seq_id, layer)[:, None, None] + 1
            batch.put(layer, k, v)


@pytest.fixture
def cache():
    return kvcache.KVCache(2, 2, 8, 64, v_head_dim=4, dtype="f32", max_sequences=None)


# ---- making one


def test_layers():
    """A cache of layers is the cache of the same numbers, and has the layers that it was given."""
    full = kvcache.Layer(2, 32, dtype="q8_0", rope=kvcache.Rope([1.0]))
    window = dataclasses.replace(full, v_head_dim=64, v_dtype="f32", policy=kvcache.SlidingWindow(4))
    layers = [full, window, dataclasses.replace(window, share=1)]
    cache = kvcache.KVCache(layers, max_seq_len=100, max_sequences=2)
    same = kvcache.KVCache(
        3, 2, 32, 100, v_head_dim=[32, 64, 64], dtype="q8_0", v_dtype=["q8_0", "f32", "f32"], share=[None, None, 1],
        policy=[full.policy, window.policy, window.policy], rope=kvcache.Rope([1.0]), max_sequences=2,
    )  # fmt: skip
    assert cache.layers == same.layers == tuple(layers)
    assert (cache.num_layers, cache.max_seq_len, cache.block_size) == (3, 100, same.block_size)
    assert cache.capacity_bytes == same.capacity_bytes
    assert cache.most_bytes(50) == full.most_bytes(50) + window.most_bytes(50) == 50 * 2 * 2 * 34 + 4 * 2 * (34 + 256)
    assert hash(full) == hash(cache.layers[0])


def test_attributes():
    local, full = kvcache.SlidingWindow(16), kvcache.FullAttention()
    cache = kvcache.KVCache(
        np.int64(2), [1, 2], 64, 128, v_head_dim=[32, 64], dtype="bf16", k_dtype=["f16", "f32"], policy=(local, full),
        max_sequences=3, max_bytes=1 << 30, num_threads=2,
    )  # fmt: skip
    assert cache.num_layers == 2
    assert cache.layers == (
        kvcache.Layer(1, 64, v_head_dim=32, k_dtype="f16", v_dtype="bf16", policy=local),
        kvcache.Layer(2, 64, k_dtype="f32", v_dtype="bf16", policy=full),
    )
    assert (cache.max_seq_len, cache.max_sequences, cache.capacity) == (128, 3, 384)
    assert (cache.max_bytes, cache.block_size, cache.num_threads) == (1 << 30, 64, 2)
    assert (cache.keys(0).shape, cache.values(1).shape) == ((1, 0, 64), (2, 0, 64))
    assert cache.strategy == "always"


@pytest.mark.parametrize(
    ("options", "capacity", "block_size"),
    [
        ({"max_seq_len": 100}, 100, 100),
        ({"max_seq_len": 100, "max_sequences": 2}, 200, 64),
        ({"max_seq_len": 100, "max_sequences": None}, None, 64),
        ({}, None, 64),
        ({"max_seq_len": None}, None, 64),
        ({"max_seq_len": None, "capacity": 70}, 70, 64),
        ({"max_seq_len": 100, "policy": kvcache.SlidingWindow(8)}, 100, 64),
        ({"max_seq_len": 100, "block_size": 16}, 100, 16),
        ({"max_seq_len": 20000}, 20000, 20000),
        ({"max_seq_len": 2048, "dtype": "int4"}, 2048, 2048),
        ({"max_seq_len": 2049, "dtype": "int4"}, 2049, 2048),
        ({"max_seq_len": 3000, "dtype": "q5_1"}, 3000, 1536),
        ({"max_seq_len": 3072, "dtype": "q5_1"}, 3072, 1536),
        ({"max_seq_len": 5100, "dtype": "int6"}, 5100, 1024),
        ({"max_seq_len": 16448, "dtype": "q8_0"}, 16448, 2048),
        ({"max_seq_len": 16448, "dtype": "q8_0", "k_dtype": "f16"}, 16448, 16448),
        ({"max_seq_len": 16448, "dtype": "q8_0", "policy": kvcache.SlidingWindow(8)}, 16448, 64),
        ({"max_seq_len": 2**31 - 2, "dtype": "int8"}, 2**31 - 2, 2048),
    ],
)
def test_defaults(options, capacity, block_size):
    cache = kvcache.KVCache(1, 1, 32, **options)
    assert (cache.capacity, cache.block_size) == (capacity, block_size)
    assert (cache.capacity_bytes is None) == (capacity is None)
    with cache.batch(60) as batch:  # what the core takes as block_size shows in the blocks
        batch.put(0, *[np.zeros((60, 1, 32), np.float32)] * 2)
    assert len(cache.blocks(0)) == (4 if block_size == 16 else 1)


@pytest.mark.parametrize("name", ["num_layers", "policy", "rope", "strategy", "nbytes", "something_else"])
def test_attributes_cannot_be_set(cache, name):
    with pytest.raises(AttributeError):
        setattr(cache, name, 1)


def test_repr(cache):
    feed(cache, range(3))
    feed(cache, range(2), seq_id=1)
    text = repr(cache)
    for part in ("2 layers", "2 KV heads", "8/4", "f32", "FullAttention()", "64", "5 tokens in 2 sequences", "KiB"):
        assert part in text
    mixed = kvcache.KVCache(3, 1, 8, 64, k_dtype="f16", v_dtype="bf16", policy=[kvcache.SlidingWindow(4)] * 2 + [
        kvcache.FullAttention()])  # fmt: skip
    for part in ("2 layers of 1 KV head x 8", "f16/bf16", "SlidingWindow(window=4", "1 layer of"):
        assert part in repr(mixed)
    cache.close()
    assert "closed" in repr(cache)
    batch = mixed.batch(1)
    assert repr(batch) == "<Batch: 1 token, open>"
    batch.abort()
    assert repr(batch) == "<Batch: 1 token, ended>"


# ---- batches


def test_a_batch_says_what_it_is(cache):
    with cache.batch(3) as batch:
        assert len(batch) == 3
        assert batch.positions.tolist() == [0, 1, 2]
        assert batch.seq_ids.tolist() == [0, 0, 0]
        batch.abort()
    batch = cache.batch(positions=np.array([4, 5], np.uint8), seq_ids=(-1, 2**63 - 1))
    assert (batch.positions.dtype, batch.seq_ids.dtype) == (np.int32, np.int64)
    assert batch.seq_ids.tolist() == [-1, 2**63 - 1]
    for array in (batch.positions, batch.seq_ids):
        assert not array.flags.writeable
    batch.abort()


@pytest.mark.parametrize("positions", [[0, 1], (0, 1), range(2), np.arange(2), iter([0, 1]), [np.int8(0), 1]])
def test_positions_are_any_integers(cache, positions):
    batch = cache.batch(positions=positions)
    assert batch.positions.tolist() == [0, 1]


def test_an_exception_in_with_aborts(cache):
    feed(cache, range(3))
    with pytest.raises(ZeroDivisionError), cache.batch(2) as batch:
        batch.put(0, np.ones((2, 2, 8), np.float32), np.full((2, 2, 4), 1 / (len(batch) - 2), np.float32))
    assert cache.seq_len() == 3
    assert cache.stats()["aborted"] == 1
    feed(cache, range(3, 5))


def test_a_with_that_cannot_commit_aborts(cache):
    with pytest.raises(ValueError, match="not put"), cache.batch(2):
        pass
    assert cache.sequences == []
    feed(cache, range(2))


def test_ending_twice_does_nothing(cache):
    with cache.batch(1) as batch:
        batch.abort()
        batch.abort()
        batch.commit()
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, np.ones((1, 2, 8), np.float32), np.ones((1, 2, 4), np.float32))
        batch.commit()
        batch.commit()
        batch.abort()
    assert cache.seq_len() == 1


def test_a_batch_that_is_dropped_is_aborted(cache):
    batch = cache.batch(2)
    del batch
    gc.collect()
    feed(cache, range(2))


# ---- reading rows


def test_views(cache):
    feed(cache, range(3))
    paged = kvcache.KVCache(1, 2, 8, 64, block_size=2)
    feed(paged, range(3))
    view = cache.keys(0, copy=False)
    assert view.shape == (2, 3, 8)
    assert not view.flags.owndata
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    assert np.shares_memory(view, cache.keys(0))
    assert not np.shares_memory(view, cache.keys(0, copy=True))
    assert not np.shares_memory(view, cache.values(0))
    assert cache.keys(0, copy=np.True_).flags.writeable
    assert paged.keys(0).flags.owndata
    np.testing.assert_array_equal(paged.keys(0), view)
    with pytest.raises(ValueError, match="spans"):
        paged.keys(0, copy=False)


def test_an_empty_sequence_has_an_empty_view(cache):
    for copied in (None, False, True):
        array = cache.values(1, seq_id=8, copy=copied)
        assert array.shape == (2, 0, 4)
        assert array.flags.writeable == bool(copied)
    assert cache.gather(0)[0].shape == (2, 0, 8)
    assert cache.spans(0) == []


@pytest.mark.parametrize("block_size", [16, 1024])
def test_gather_into_arrays(block_size):
    """Gathering from a row on writes the given parts of larger arrays, and nothing else of them."""
    cache = kvcache.KVCache(2, 2, 48, 1024, block_size=block_size, dtype="bf16")
    x = np.random.default_rng(0).standard_normal((700, 2, 48), dtype=np.float32)
    with cache.batch(700) as batch:
        for layer in range(2):
            batch.put(layer, x, 2 * x)
    want = cache.gather(1)
    for first, num in ((0, 700), (5, 690), (699, 1), (700, 0)):
        out = np.full((2, 720, 48), 7, np.float32), np.full((720, 2, 48), 7, np.float16)
        k, v = out[0][:, 9 : 9 + num], np.full((2, num, 48), 7, np.float32)
        assert cache.gather(1, first=first, out=(k, v))[0] is k
        np.testing.assert_array_equal(k, want[0][:, first : first + num])
        np.testing.assert_array_equal(v, want[1][:, first : first + num])
        assert (out[0][:, :9] == 7).all()
        assert (out[0][:, 9 + num :] == 7).all()
        heads_last = np.swapaxes(out[1], 0, 1)[:, :num]
        cache.gather(1, first=first, out=[np.empty((2, num, 48), np.float16), heads_last])
        np.testing.assert_array_equal(heads_last, want[1][:, first : first + num].astype(np.float16))
        assert cache.gather(1, first=first)[0].shape == (2, 700 - first, 48)


def test_spans():
    cache = kvcache.KVCache(1, 2, 8, 64, block_size=4, dtype="f32")
    feed(cache, range(10))
    spans = cache.spans(0)
    assert [span.positions.tolist() for span in spans] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [span.delta for span in spans] == [0, 0, 0]
    np.testing.assert_array_equal(np.concatenate([span.k for span in spans], 1), cache.keys(0))
    np.testing.assert_array_equal(np.concatenate([span.v for span in spans], 1), cache.values(0))
    assert spans[0].positions.dtype == np.int32
    assert not spans[0].k.flags.writeable
    assert repr(spans[2]) == "Span(k (2, 2, 8), v (2, 2, 8), positions from 8, delta 0)"
    with pytest.raises(AttributeError):
        spans[0].delta = 1


def test_compact_and_close_wait_for_views(cache):
    feed(cache, range(4))
    for make in (lambda: cache.keys(0, copy=False), lambda: cache.spans(0), lambda: cache.values(1)[0]):
        view = make()
        with pytest.raises(BufferError):
            cache.compact()
        with pytest.raises(BufferError):
            cache.close()
        del view
    cache.compact()
    copied = cache.keys(0, copy=True)
    cache.close()
    assert copied[0, :, 0].tolist() == [0, 1, 2, 3]


# ---- memory


def test_measures(cache):
    limited = kvcache.KVCache(2, 2, 8, 64, dtype="f32")
    assert limited.capacity_bytes == 2 * 64 * 2 * (8 + 8) * 4
    assert cache.capacity_bytes is None
    assert limited.utilization == 0
    empty = limited.nbytes
    feed(limited, range(32))
    assert limited.utilization == 0.5
    assert limited.nbytes > empty
    assert all(isinstance(n, int) for n in limited.stats().values())
    assert limited.stats()["tokens"] == limited.stats()["live_slots"] == 32


# ---- the end


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_pickles_of_a_batch(cache, make):
    batch = cache.batch(1)
    with pytest.raises(TypeError, match="neither copied nor pickled: commit it"):
        make(batch)
    batch.abort()


def test_no_pickles_of_a_cache(cache):
    with pytest.raises(TypeError, match=r"pickled: save\(\).*copy\.copy\(\)"):
        pickle.dumps(cache)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_is_independent(way):
    policy = [kvcache.FullAttention(), kvcache.SlidingWindow(20), kvcache.CrossAttention(9)]
    rope = kvcache.Rope(1 / 100 ** np.linspace(0, 1, 16))
    options = {"max_sequences": 4, "capacity": 2000, "max_bytes": 1 << 24, "block_size": 16, "num_threads": 2}
    cache = kvcache.KVCache(3, 2, 32, 900, policy=policy, rope=rope, dtype="q8_0", **options)
    x = np.random.default_rng(0).standard_normal((400, 2, 32)).astype(np.float32)
    with cache.batch(400) as batch:
        for layer in range(3):
            batch.put(layer, *[x[: 7 if layer == 2 else 400]] * 2)
    cache.fork(0, 1)
    cache.remove(10, 30, seq_id=1)
    before = everything(cache)
    other = way(cache)
    assert type(other) is kvcache.KVCache
    for name in ("layers", "max_seq_len", *options, "strategy"):
        assert getattr(other, name) == getattr(cache, name)
    assert other.nbytes <= cache.nbytes
    assert other.stats()["tokens"] == 0
    assert other.stats()["live_slots"] == cache.stats()["live_slots"]  # what was shared is
    assert everything(other) == before
    other.shift(0, None, 3, seq_id=1)
    other.clear(0)
    assert everything(cache) == before
    kept = everything(other)
    cache.clear()
    cache.close()
    assert everything(other) == kept
    other.validate()


def test_a_copy_moves_keys_by_the_same_function():
    calls = []

    def nudge(layer, keys, delta):
        calls.append(delta)
        if delta == 13:
            raise ZeroDivisionError
        return keys + delta

    cache = kvcache.KVCache(1, 1, 8, 64, rope=nudge)
    feed(cache, range(4))
    other = copy.deepcopy(cache)
    del cache, nudge
    gc.collect()
    keys = other.keys(0).copy()
    other.shift(0, None, 2)
    np.testing.assert_array_equal(other.keys(0), keys + 2)
    with pytest.raises(ZeroDivisionError):
        other.shift(0, None, 13)
    assert calls == [2, 13]


def test_an_open_batch_and_a_view_die_with_their_cache():
    cache = kvcache.KVCache(1, 1, 8, 64)
    feed(cache, range(2))
    batch, view = cache.batch(1), cache.keys(0, copy=False)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    batch.put(0, np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32))
    batch.commit()
    assert view.shape == (1, 2, 8)


# ---- threads


@pytest.fixture
def shrinking(request):
    """A cache where other threads, one unless told, go on removing the first row of sequence 0, which had 64."""
    cache = kvcache.KVCache(1, 1, 2, None, dtype="f32", max_sequences=None)
    rows = np.repeat(np.arange(64, dtype=np.float32), 2).reshape(64, 1, 2)
    with cache.batch(positions=range(64), seq_ids=[1] * 64) as batch:
        batch.put(0, rows, rows)
    cache.fork(1, 0)
    stop = threading.Event()

    def shrink():
        while not stop.is_set():
            cache.fork(1, 0)
            for i in range(62):
                cache.remove(i, i + 1, shift=False)

    threads = [threading.Thread(target=shrink) for _ in range(getattr(request, "param", 1))]
    for thread in threads:
        thread.start()
    yield cache
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("shrinking", [3], indirect=True)
def test_get_beside_removals_finds_the_row_it_was_asked_for(shrinking):
    for _ in range(10_000):
        k, v = shrinking.get(0, 63)
        assert k.tolist() == v.tolist() == [[63, 63]]


@pytest.mark.parametrize("read", [lambda c: c.gather(0)[1], lambda c: c.keys(0), lambda c: c.values(0, copy=True)])
def test_copies_beside_removals_are_of_one_moment(shrinking, read):
    for _ in range(1_000):
        rows = read(shrinking)[0, :, 0].tolist()
        assert len(rows) > 1
        assert rows == list(range(64 - len(rows), 64))


def test_what_ends_a_with_is_not_replaced():
    batches = []

    def begin_and_fail(cache):
        batches.append(cache.batch(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), kvcache.KVCache(1, 1, 8, 64) as cache:
        begin_and_fail(cache)
    batches.pop().abort()
    cache.close()
    with pytest.raises(kvcache.CacheBusyError), kvcache.KVCache(1, 1, 8, 64) as cache:
        batches.append(cache.batch(1))
