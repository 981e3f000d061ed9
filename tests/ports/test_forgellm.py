"""forgellm_runtime's KVCache, token-major f32 in Rust: every row of its table."""

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

from kvcache import KVCache

table = Table("forgellm_runtime")
test_every_row_has_a_test = table.all_claimed()

SHAPE = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 16}


@pytest.fixture
def cache():
    with KVCache(2, 4, 16, 32, dtype="f32", max_sequences=2) as cache:
        yield cache


@table.row("KVCache::new(num_layers, num_kv_heads, head_dim)")
def test_new(run):
    with run(**SHAPE) as cache:
        store(cache, 5000)
        assert (cache.seq_len(), cache.max_seq_len) == (5000, None)


@table.row("KVCache::with_capacity(num_layers, num_kv_heads, head_dim, max_seq_len)")
def test_with_capacity(run):
    with run(num_layers=16, num_kv_heads=8, head_dim=64, max_seq_len=2048) as cache:
        assert cache.seq_len() == 0
        assert (cache.num_layers, cache.max_seq_len) == (16, 2048)
        assert cache.nbytes >= 16 * 2048 * 8 * 64 * 2 * 4


@table.row("append(layer, k_data, v_data)")
def test_append(run, cache):
    k, v = (x.ravel() for x in random_rows(1, heads=4, dim=16))
    with cache.batch(1) as batch:
        for layer in range(2):
            run(batch=batch, layer=layer, k_data=k, v_data=v, num_kv_heads=4, head_dim=16)
    assert cache.keys(0).shape == (4, 1, 16)
    assert cache.values(1).ravel().tolist() == v.tolist()
    k, v = random_rows(3, heads=4, dim=16)
    with cache.batch(3) as batch:  # a prompt at once
        for layer in range(2):
            run(batch=batch, layer=layer, k_data=k.ravel(), v_data=v.ravel(), num_kv_heads=4, head_dim=16)
    np.testing.assert_array_equal(cache.keys(1)[:, 1:], k.swapaxes(0, 1))


@table.row("advance()")
def test_advance(run, cache):
    k, v = random_rows(1, heads=4, dim=16)
    batch = cache.batch(1)
    batch.put(0, k, v)
    with pytest.raises(ValueError, match="layer"):
        run(batch=batch)  # the other layer was left out
    batch.put(1, k, v)
    run(batch=batch)
    assert cache.seq_len() == 1


@table.row("k(layer)")
def test_k(run, cache):
    k, _ = store(cache, 3)
    assert run(cache=cache, layer=0).tolist() == k.ravel().tolist()


@table.row("v(layer)")
def test_v(run, cache):
    _, v = store(cache, 3)
    assert run(cache=cache, layer=1).tolist() == v.ravel().tolist()


@table.row("k(layer), before advance()")
def test_k_of_the_running_token(run, cache):
    k, _ = store(cache, 3)
    more, v = random_rows(1, heads=4, dim=16, seed=1)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, more, v)
            assert run(batch=batch, layer=layer).tolist() == np.concatenate([k, more]).ravel().tolist()


@table.row("len()")
def test_len(run, cache):
    store(cache, 3)
    assert run(cache=cache) == 3


@table.row("is_empty()")
def test_is_empty(run, cache):
    assert run(cache=cache) is True
    store(cache, 3)
    assert run(cache=cache) is False


@table.row("num_layers()")
def test_num_layers(run, cache):
    assert run(cache=cache) == 2


@table.row("clear()")
def test_clear(run, cache):
    store(cache, 3)
    run(cache=cache)
    assert cache.seq_len() == 0


@table.row("entry_size()")
def test_entry_size(run, cache):
    assert run(cache=cache, layer=0) == 64


@table.row("clone()")
def test_clone(run, cache):
    k, _ = store(cache, 3)
    with run(cache=cache) as clone:
        more, _ = store(cache, 2, seed=1)
        np.testing.assert_array_equal(clone.gather(0)[0], k.swapaxes(0, 1))
        np.testing.assert_array_equal(cache.gather(0)[0], np.concatenate([k, more]).swapaxes(0, 1))
        clone.clear()
    assert cache.seq_len() == 5
