"""KvCache, the head-major f32 cache in Rust: every row of its table."""

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

from kvcache import CacheFullError, KVCache

table = Table("KvCache")
test_every_row_has_a_test = table.all_claimed()

SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 16}


@pytest.fixture
def cache():
    with KVCache(**SHAPE, dtype="f32") as cache:
        yield cache


@table.row("KvCache::new(num_layers, num_kv_heads, head_dim, max_seq_len)")
def test_new(run):
    with run(**SHAPE) as cache:
        assert (cache.seq_len(), cache.max_seq_len) == (0, 16)
        assert [layer.k_dtype for layer in cache.layers] == ["f32", "f32"]


@table.row("store_key(layer, head, pos, key)")
def test_store_key(run, cache):
    k, v = random_rows(1)
    store(cache, 3)
    with cache.batch(1) as batch:
        batch.put(0, k, v)
        batch.slots(1)[1][:, 0] = v[0]
        for head in (1, 0):  # head by head, in any order
            run(batch=batch, layer=1, head=head, key=k[0, head])
        batch.written(1, 0, 1)
    assert cache.seq_len() == 4
    for layer in range(2):
        np.testing.assert_array_equal(cache.keys(layer)[:, 3], k[0])
        np.testing.assert_array_equal(cache.values(layer)[:, 3], v[0])


@table.row("store_key(layer, head, pos, key), of a pos below seq_len")
def test_store_key_again(run, cache):
    k, v = store(cache, 5)
    key = np.arange(8, dtype=np.float32)
    run(cache=cache, layer=1, head=1, pos=3, key=key)
    k[3, 1] = key
    np.testing.assert_array_equal(cache.keys(1), k.swapaxes(0, 1))
    np.testing.assert_array_equal(cache.values(1), v.swapaxes(0, 1))
    assert cache.keys(0)[1, 3].tolist() != key.tolist()


@table.row("store_value(layer, head, pos, value)")
def test_store_value(run, cache):
    k, v = random_rows(1)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.slots(layer)[0][:, 0] = k[0]
            for head in range(2):
                run(batch=batch, layer=layer, head=head, value=v[0, head])
            batch.written(layer, 0, 1)
    for layer in range(2):
        np.testing.assert_array_equal(cache.values(layer)[:, 0], v[0])


@table.row("keys_for(layer, head, seq_len)")
def test_keys_for(run, cache):
    k, _ = store(cache, 5)
    keys = run(cache=cache, layer=1, head=1, seq_len=4)
    np.testing.assert_array_equal(keys, k[:4, 1])
    assert keys.flags.c_contiguous  # one slice of seq_len x head_dim
    assert not keys.flags.owndata


@table.row("values_for(layer, head, seq_len)")
def test_values_for(run, cache):
    _, v = store(cache, 5)
    values = run(cache=cache, layer=0, head=0, seq_len=5)
    np.testing.assert_array_equal(values, v[:, 0])
    assert values.flags.c_contiguous


@table.row("keys_for(layer, head, seq_len + 1), before advance()")
def test_keys_for_the_running_token(run, cache):
    k, _ = store(cache, 5)
    more, v = random_rows(1, seed=1)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, more, v)
            keys = run(batch=batch, layer=layer, head=1)
            np.testing.assert_array_equal(keys, np.concatenate([k, more])[:, 1])
            assert keys.flags.c_contiguous
            assert not keys.flags.owndata


@table.row("advance()")
def test_advance(run, cache):
    k, v = random_rows(1)
    batch = cache.batch(1)
    for layer in range(2):
        batch.put(layer, k, v)
    assert cache.seq_len() == 0
    run(batch=batch)
    assert cache.seq_len() == 1


@table.row("clear()")
def test_clear(run, cache):
    store(cache, 5)
    run(cache=cache)
    assert cache.seq_len() == 0
    store(cache, 16)


@table.row("seq_len()")
def test_seq_len(run, cache):
    store(cache, 5)
    assert run(cache=cache) == 5


@table.row("max_seq_len()")
def test_max_seq_len(run, cache):
    assert run(cache=cache) == 16
    store(cache, 16)
    with pytest.raises(CacheFullError):
        cache.batch(1)


@table.row("set_seq_len(n)")
def test_set_seq_len(run, cache):
    k, _ = store(cache, 5)
    run(cache=cache, n=3)
    np.testing.assert_array_equal(cache.keys(0), k[:3].swapaxes(0, 1))
    run(cache=cache, n=100)  # clamped: to what there is
    assert cache.seq_len() == 3


@table.row("num_layers()")
def test_num_layers(run, cache):
    assert run(cache=cache) == 2


@table.row("num_kv_heads()")
def test_num_kv_heads(run, cache):
    assert run(cache=cache, layer=0) == 2


@table.row("head_dim()")
def test_head_dim(run, cache):
    assert run(cache=cache, layer=1) == 8


@table.row("memory_bytes()")
def test_memory_bytes(run):
    rows = 4 * 8 * 1024 * 128 * 4 * 2
    with KVCache(4, 8, 128, 1024, dtype="f32") as cache:
        assert rows <= run(cache=cache) < rows * 1.01  # cache lines between the heads


@table.row("utilization_ratio()")
def test_utilization_ratio(run, cache):
    assert run(cache=cache) == 0
    store(cache, 4)
    assert run(cache=cache) == pytest.approx(4 / 16)


@table.row("extract_block(layer, start_pos, block_size)")
def test_extract_block(run, cache):
    k, v = store(cache, 6)
    keys, values = run(cache=cache, layer=0, start_pos=4, block_size=4)
    assert keys.shape == values.shape == (2, 4, 8)
    np.testing.assert_array_equal(keys[:, :2], k[4:].swapaxes(0, 1))
    np.testing.assert_array_equal(values[:, :2], v[4:].swapaxes(0, 1))
    assert not keys[:, 2:].any()
    assert not values[:, 2:].any()
    past = run(cache=cache, layer=0, start_pos=14, block_size=4)  # past max_seq_len, too
    assert not any(x.any() for x in past)


@table.row("inject_block(layer, start_pos, block_size, keys, values)")
def test_inject_block(run, cache):
    k, v = store(cache, 6)
    keys, values = (x.swapaxes(0, 1) for x in random_rows(4, seed=1))
    with pytest.raises(IndexError, match="nothing at 2 of 4 positions in layer 1: 6 to 7"):
        cache.inject(1, 4, keys, values)
    flat = {"keys": keys.ravel(), "values": values.ravel(), "num_kv_heads": 2, "head_dim": 8}
    assert run(cache=cache, layer=1, start_pos=4, **flat) == 2
    np.testing.assert_array_equal(cache.keys(1)[:, :4], k[:4].swapaxes(0, 1))
    np.testing.assert_array_equal(cache.keys(1)[:, 4:], keys[:, :2])
    np.testing.assert_array_equal(cache.values(1)[:, 4:], values[:, :2])
    np.testing.assert_array_equal(cache.values(0), v.swapaxes(0, 1))  # the other layer is as it was
    assert cache.seq_len() == 6
    assert run(cache=cache, layer=1, start_pos=14, **flat) == 0  # past max_seq_len, too


@table.row("inject_block(layer, 0, n, keys, values) in each layer, then set_seq_len(n)")
def test_inject_blocks_into_a_fresh_cache(run, cache):
    store(cache, 8)
    blocks = [[x.ravel() for x in cache.extract(layer, 0, 4)] for layer in range(2)]  # flat, as there
    with KVCache(**SHAPE, dtype="f32") as fresh:
        run(cache=fresh, n=4, num_kv_heads=2, head_dim=8, blocks=blocks)
        assert fresh.seq_len() == 4
        for layer in range(2):
            np.testing.assert_array_equal(fresh.keys(layer), cache.keys(layer)[:, :4])
            np.testing.assert_array_equal(fresh.values(layer), cache.values(layer)[:, :4])
        store(fresh, 10)
        run(cache=fresh, n=4, num_kv_heads=2, head_dim=8, blocks=blocks)  # of which 2 lie past max_seq_len
        assert fresh.seq_len() == 16
        np.testing.assert_array_equal(fresh.keys(1)[:, 14:], cache.keys(1)[:, :2])


@table.row("KvCachePolicy::Standard")
def test_policy_standard(run):
    with run(**SHAPE) as cache:
        assert tuple(layer.k_dtype for layer in cache.layers) == ("f32", "f32")


@table.row("KvCachePolicy::Fp16")
def test_policy_fp16(run):
    with run(**SHAPE) as cache:
        store(cache, 2)
        assert cache.keys(0).dtype == np.float16


@table.row("KvCachePolicy::SlidingWindow(n)")
def test_policy_sliding_window(run):
    with run(**SHAPE, n=3) as cache:
        for _ in range(20):
            store(cache, 1)
        assert cache.positions().tolist() == [17, 18, 19]
        assert tuple(layer.k_dtype for layer in cache.layers) == ("f32", "f32")


@table.row("PagedKvCache::new(num_layers, num_kv_heads, head_dim, max_seq_len)")
def test_paged_new(run):
    with run(num_layers=2, num_kv_heads=2, head_dim=8, max_seq_len=1024) as cache:
        assert cache.block_size == 256
        assert cache.stats()["blocks_in_use"] == 0


@table.row("PagedKvCache::keys_for(layer, head, seq_len)")
def test_paged_keys_for(run):
    with KVCache(**SHAPE, dtype="f32", block_size=4) as cache:
        k, _ = store(cache, 9)
        np.testing.assert_array_equal(run(cache=cache, layer=1, head=1, seq_len=6), k[:6, 1])


@table.row("PagedKvCache::values_for(layer, head, seq_len)")
def test_paged_values_for(run):
    with KVCache(**SHAPE, dtype="f32", block_size=4) as cache:
        _, v = store(cache, 9)
        np.testing.assert_array_equal(run(cache=cache, layer=0, head=0, seq_len=9), v[:, 0])


@table.row("PagedKvCache::clear()")
def test_paged_clear(run):
    with KVCache(**SHAPE, block_size=4) as cache:
        store(cache, 9)
        run(cache=cache)
        assert (cache.seq_len(), cache.stats()["blocks_free"]) == (0, 0)


@table.row("PagedKvCache::with_page_size(num_layers, num_kv_heads, head_dim, max_seq_len, page_size)")
def test_with_page_size(run):
    with run(**SHAPE, page_size=4) as cache:
        k, _ = store(cache, 9)
        assert [span.k.shape[1] for span in cache.spans(0)] == [4, 4, 1]
        np.testing.assert_array_equal(cache.gather(0)[0], k.swapaxes(0, 1))


@table.row("PagedKvCache::page_size()")
def test_page_size(run):
    with KVCache(**SHAPE, block_size=4) as cache:
        assert run(cache=cache) == 4


@table.row("PagedKvCache::total_pages()")
def test_total_pages(run):
    with KVCache(**SHAPE, block_size=4) as cache:
        store(cache, 9)
        assert run(cache=cache) == 3


@table.row("PagedKvCache::memory_usage_bytes()")
def test_memory_usage_bytes(run):
    with KVCache(**SHAPE, block_size=4) as cache:
        before = run(cache=cache)
        store(cache, 9)
        assert run(cache=cache) > before
