"""ZigLlama's inference.kv_cache: every row of its table."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

import kvcache
from kvcache import Adaptive, CacheFullError, KVCache, SlidingWindow

table = Table("ZigLlama")
test_every_row_has_a_test = table.all_claimed()

SHAPE = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "max_seq_len": 16}
SHAPE_THERE = {"n_layers": 2, "n_heads": 2, "head_dim": 8, "max_seq_length": 16}


def new_cache(**options):
    return KVCache(2, 2, 8, 16, dtype="f32", **options)


def feed(cache, tokens, seq_id=0):
    """One step of a runner that asks the cache what to feed, and gets a sequence of `tokens` tokens that far.

    A value is its position, and queries weigh all that they see alike: what comes out is half of theirs.
    """
    first = cache.next_position(seq_id)
    positions = np.arange(first, tokens)
    q, k = np.zeros((tokens - first, 4, 8), np.float32), np.ones((tokens - first, 2, 8), np.float32)
    with cache.batch(positions=positions, seq_ids=[seq_id] * (tokens - first)) as batch:
        for layer in range(2):
            out = batch.attend(layer, q, k, k * positions[:, None, None].astype(np.float32))
            np.testing.assert_allclose(out, np.broadcast_to(positions[:, None, None] / 2, out.shape), atol=1e-5)
    return tokens - first


# --- the model's cache, and its strategies -----------------------------------------------------------------------


@table.row("ModelKVCache.init(num_layers, num_heads, head_dim, max_seq_len, strategy, allocator)")
def test_init(run):
    with run(**SHAPE, strategy="always") as cache:
        assert [(layer.num_kv_heads, layer.head_dim) for layer in cache.layers] == [(2, 8)] * 2
        assert (cache.max_seq_len, tuple(layer.k_dtype for layer in cache.layers)) == (16, ("f32", "f32"))
    header = Path(kvcache.get_include(), "kvcache.h").read_text()
    assert "const kvc_allocator *allocator;" in re.search(r"struct kvc_config \{(.*?)\} kvc_config", header, re.S)[1]


@table.row("CacheStrategy.Always")
def test_always(run):
    with run(**SHAPE) as cache:
        assert [feed(cache, n) for n in (3, 4, 5)] == [3, 1, 1]


@table.row("CacheStrategy.LongSequenceOnly")
def test_long_sequences_only(run):
    with run(**SHAPE, threshold=4) as cache:
        assert [feed(cache, n) for n in (3, 4, 5, 6, 7)] == [3, 4, 5, 1, 1]
        assert cache.seq_len() == 7
        assert "sequence 0 is stored: its length, 5 tokens" in cache.explain()


@table.row("CacheStrategy.Adaptive")
def test_adaptive(run, monkeypatch):
    with run(**SHAPE) as cache:
        assert [feed(cache, n) for n in (3, 4)] == [3, 1]  # some bytes are always to be had
        assert "sequence 0 is stored" in cache.explain()
        monkeypatch.setattr("kvcache.system.available_memory", lambda: (0, "of a test"))
        assert [feed(cache, n) for n in (5, 6, 7)] == [1, 6, 7]  # enables, and disables
        assert "sequence 0 is not stored" in cache.explain()
        monkeypatch.setattr("kvcache.system.available_memory", lambda: (2**30, "of a test"))
        assert [feed(cache, n) for n in (8, 9)] == [8, 1]
    with KVCache(2, 2, 8, 2**24, strategy=Adaptive(fraction=1e-12)) as cache:
        assert [feed(cache, n) for n in (3, 4)] == [3, 4]
        assert "sequence 0 is not stored" in cache.explain()


@table.row("CacheStrategy.Disabled")
def test_disabled(run):
    with run(**SHAPE) as cache:
        assert [feed(cache, n) for n in (3, 4, 5)] == [3, 4, 5]
        assert (cache.next_position(), cache.seq_len(), cache.get(0, 0)) == (0, 0, None)
        empty, rows = cache.nbytes, 16 * 2 * 8 * 2 * 2
        with cache.batch(16) as batch:  # "saves memory"
            for layer in range(2):
                batch.attend(layer, np.ones((16, 4, 8), np.float32), *np.ones((2, 16, 2, 8), np.float32))
                assert rows <= cache.nbytes - empty < 2 * rows
        assert cache.nbytes == empty


@table.row("ModelKVCache.deinit()")
def test_deinit(run):
    cache = new_cache()
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


@table.row("ModelKVCache.clear()")
def test_clear(run):
    with new_cache() as cache:
        store(cache, 3)
        run(cache=cache)
        assert (cache.seq_len(), cache.get(0, 0)) == (0, None)
        store(cache, 16)


@table.row("ModelKVCache.compact()")
def test_compact(run):
    with new_cache() as cache:
        store(cache, 16)
        before = cache.nbytes
        cache.clear()
        run(cache=cache)
        assert cache.nbytes < before


# --- a layer -----------------------------------------------------------------------------------------------------


@table.row("LayerKVCache.append(key, value)")
def test_append(run):
    k, v = random_rows(1)
    with new_cache() as cache:
        with cache.batch(1) as batch:
            for layer in range(2):
                run(batch=batch, layer=layer, key=k[0], value=v[0])  # one token, [num_heads, head_dim]
        np.testing.assert_array_equal(cache.keys(1), k.swapaxes(0, 1))


@table.row("LayerKVCache.get(position)")
def test_get(run):
    with new_cache() as cache:
        k, v = store(cache, 3)
        key, value = run(cache=cache, layer=1, position=2)
        np.testing.assert_array_equal(key, k[2])
        np.testing.assert_array_equal(value, v[2])
        assert run(cache=cache, layer=1, position=3) is None


@table.row("LayerKVCache.get(position), of the token appended last")
def test_get_of_the_running_token(run):
    with new_cache() as cache:
        store(cache, 3)
        k, v = random_rows(1, seed=1)
        with cache.batch(1) as batch:
            for layer in range(2):
                batch.put(layer, k, v)
                key, value = run(batch=batch, layer=layer)
                np.testing.assert_array_equal(key, k[0])
                np.testing.assert_array_equal(value, v[0])


@table.row("KVCacheEntry")
def test_entry(run):
    with new_cache() as cache:
        k, v = store(cache, 3)
        key, value = run(cache=cache, layer=0, position=1)
        assert (key.tolist(), value.tolist()) == (k[1].tolist(), v[1].tolist())


@table.row("KVCacheEntry.init(allocator, max_length, n_heads, head_dim, layer_id)")
def test_entry_init(run):
    with run(max_length=4, n_heads=2, head_dim=8) as cache:
        taken = cache.nbytes
        store(cache, 4)
        assert cache.nbytes == taken >= 4 * 2 * 8 * 2 * 4
        assert (cache.num_layers, cache.max_seq_len) == (1, 4)


@table.row("KVCacheEntry.append(keys, values)")
def test_entry_append(run):
    keys, values = random_rows(5)
    with KVCache(1, 2, 8, 16, dtype="f32") as cache:
        with cache.batch(5) as batch:
            run(batch=batch, layer_id=0, keys=keys, values=values)
        np.testing.assert_array_equal(cache.values(0), values.swapaxes(0, 1))


@table.row("KVCacheEntry.get(start_pos, length)")
def test_entry_get(run):
    with new_cache() as cache:
        k, v = store(cache, 6)
        keys, values = run(cache=cache, layer_id=0, start_pos=2, length=3)
        np.testing.assert_array_equal(keys, k[2:5].swapaxes(0, 1))
        np.testing.assert_array_equal(values, v[2:5].swapaxes(0, 1))


@table.row("KVCacheEntry.clear()")
def test_entry_clear(run):
    with new_cache() as cache:
        store(cache, 3)
        run(cache=cache)
        assert cache.seq_len() == 0


@table.row("KVCacheEntry.deinit()")
def test_entry_deinit(run):
    cache = new_cache()
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


# --- many sequences ----------------------------------------------------------------------------------------------


@table.row("MultiSequenceKVCache.init(allocator, n_layers, n_heads, head_dim, max_seq_length)")
def test_many_init(run):
    with run(**SHAPE_THERE, max_sequences=2) as cache:
        store(cache, 1, seq_id=2**63 - 1)
        store(cache, 1, seq_id=-(2**63))
        with pytest.raises(CacheFullError, match="max_sequences"):
            cache.batch(positions=[0], seq_ids=[7])
    with run(**SHAPE_THERE, max_sequences=None) as cache:
        for seq_id in range(100):
            store(cache, 1, seq_id=seq_id)


@table.row("MultiSequenceKVCache.getOrCreateSequence(sequence_id)")
def test_get_or_create(run):
    with new_cache(max_sequences=2) as cache:
        for positions in ([0, 1], [2]):
            with run(cache=cache, positions=positions, sequence_id=5) as batch:
                k, v = random_rows(len(positions))
                for layer in range(2):
                    batch.put(layer, k, v)
        assert (cache.sequences, cache.seq_len(5)) == ([5], 3)


@table.row("MultiSequenceKVCache.appendToSequence(sequence_id, layer_id, keys, values)")
def test_append_to_sequence(run):
    keys, values = random_rows(3)
    with new_cache(max_sequences=2) as cache:
        with cache.batch(positions=[0, 0, 1], seq_ids=[4, 9, 9]) as batch:
            for layer in range(2):
                run(batch=batch, layer_id=layer, keys=keys, values=values)
        np.testing.assert_array_equal(cache.keys(0, seq_id=4), keys[:1].swapaxes(0, 1))
        np.testing.assert_array_equal(cache.keys(0, seq_id=9), keys[1:].swapaxes(0, 1))


@table.row("MultiSequenceKVCache.getFromSequence(sequence_id, layer_id, start_pos, length)")
def test_get_from_sequence(run):
    with new_cache(max_sequences=2) as cache:
        k, v = store(cache, 3, seq_id=8)
        keys, values = run(cache=cache, sequence_id=8, layer_id=1, start_pos=1, length=2)
        np.testing.assert_array_equal(keys, k[1:].swapaxes(0, 1))
        np.testing.assert_array_equal(values, v[1:].swapaxes(0, 1))
        assert not any(x.any() for x in run(cache=cache, sequence_id=9, layer_id=1, start_pos=1, length=2))


@table.row("MultiSequenceKVCache.getSequenceLength(sequence_id)")
def test_sequence_length(run):
    with new_cache(max_sequences=2) as cache:
        store(cache, 3, seq_id=8)
        assert [run(cache=cache, sequence_id=i) for i in (8, 9)] == [3, 0]


@table.row("MultiSequenceKVCache.clearSequence(sequence_id)")
def test_clear_sequence(run):
    with new_cache(max_sequences=2) as cache:
        store(cache, 3, seq_id=8)
        store(cache, 2, seq_id=9)
        run(cache=cache, sequence_id=8)
        run(cache=cache, sequence_id=1)  # one that nobody knows: nothing happens, as there
        assert cache.sequences == [9]


@table.row("MultiSequenceKVCache.removeSequence(sequence_id)")
def test_remove_sequence(run):
    with new_cache(max_sequences=2) as cache:
        store(cache, 3, seq_id=8)
        run(cache=cache, sequence_id=8)
        assert cache.sequences == []


@table.row("MultiSequenceKVCache.getMemoryUsage()")
def test_memory_usage(run):
    with new_cache() as cache:
        before = run(cache=cache)
        store(cache, 16)
        assert run(cache=cache) - before >= 2 * 16 * 2 * 8 * 2 * 4


@table.row("MultiSequenceKVCache.deinit()")
def test_many_deinit(run):
    cache = new_cache(max_sequences=None)
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len(3)


# --- a sliding window --------------------------------------------------------------------------------------------


@table.row("SlidingWindowKVCache.init(allocator, n_layers, n_heads, head_dim, window_size)")
def test_window_init(run):
    with run(n_layers=2, n_heads=2, head_dim=8, window_size=4) as cache:
        for _ in range(100):
            store(cache, 1)
        assert cache.positions().tolist() == [96, 97, 98, 99]
        assert [(layer.k_dtype, layer.v_dtype) for layer in cache.layers] == [("f32", "f32")] * 2


@table.row("SlidingWindowKVCache.appendWithSliding(sequence_id, layer_id, keys, values)")
def test_append_with_sliding(run):
    keys, values = random_rows(1)
    with new_cache(policy=SlidingWindow(4)) as cache:
        k, _ = store(cache, 6)
        with cache.batch(1) as batch:
            for layer in range(2):
                run(batch=batch, layer_id=layer, keys=keys, values=values)
        np.testing.assert_array_equal(cache.gather(0)[0], np.concatenate([k[3:], keys]).swapaxes(0, 1))


@table.row("SlidingWindowKVCache.getWithWindow(sequence_id, layer_id, position)")
def test_get_with_window(run):
    with new_cache(policy=SlidingWindow(4), max_sequences=2) as cache:
        k, v = store(cache, 6, seq_id=3)
        keys, values = run(cache=cache, layer_id=0, sequence_id=3, window_size=4)
        np.testing.assert_array_equal(keys, k[2:].swapaxes(0, 1))
        np.testing.assert_array_equal(values, v[2:].swapaxes(0, 1))
        store(cache, 1, seq_id=3)
        assert run(cache=cache, layer_id=0, sequence_id=3, window_size=4)[0].shape == (2, 4, 8)


@table.row("SlidingWindowKVCache.deinit()")
def test_window_deinit(run):
    cache = new_cache(policy=SlidingWindow(4))
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


# --- figures and errors ------------------------------------------------------------------------------------------


@table.row("KVCacheStats.compute(cache)")
def test_stats(run):
    with new_cache() as cache:
        store(cache, 3)
        assert run(cache=cache)["tokens"] == 3


@table.row("KVCacheStats.print()")
def test_print(run, capsys):
    with new_cache() as cache:
        store(cache, 3)
        run(cache=cache)
        assert "3 tokens in 1 sequence" in capsys.readouterr().out


@table.row("KVCacheUtils.estimateMemoryUsage(n_sequences, max_seq_length, n_layers, n_heads, head_dim)")
def test_estimate(run):
    rows = 3 * 512 * 4 * 8 * 128 * 2 * 4
    assert rows <= run(n_sequences=3, max_seq_length=512, n_layers=4, n_heads=8, head_dim=128) < rows * 1.05


@table.row("KVCacheUtils.recommendedWindowSize(model_context_length, available_memory_mb)")
def test_recommended_window(run):
    with KVCache(4, 8, 128, 2**16) as cache:
        window = run(cache=cache, available_memory_mb=64, model_context_length=cache.max_seq_len)
    with KVCache(4, 8, 128, window) as cache:
        assert 60 * 2**20 < cache.capacity_bytes <= 64 * 2**20
        assert run(cache=cache, available_memory_mb=4096, model_context_length=2048) == 2048  # never more than that


@table.row("error.CacheFull")
def test_cache_full(run):
    with new_cache() as cache:
        store(cache, 16)
        with pytest.raises(run()):
            cache.batch(1)
        assert cache.seq_len() == 16
    with new_cache(policy=SlidingWindow(4)) as cache:  # may expire: never full
        for _ in range(20):
            store(cache, 1)


@table.row("error.OutOfMemory")
def test_out_of_memory(run):
    assert run() is MemoryError
    assert not issubclass(kvcache.CacheFullError, run())
