"""forgellm_runtime's KVCache, token-major f32 in Rust: every row of its table, and its unit tests."""

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


# --- its unit tests, word for word -------------------------------------------------------------------------------


class Ported:
    """ForgeLLM's methods, each with the line of its row."""

    def __init__(self, *shape):
        self.shape = shape
        self.cache = table.rows["KVCache::new(num_layers, num_kv_heads, head_dim)"](
            num_layers=shape[0], num_kv_heads=shape[1], head_dim=shape[2]
        )
        self.batch = None

    @classmethod
    def with_capacity(cls, num_layers, num_kv_heads, head_dim, max_seq_len):
        ported = cls(num_layers, num_kv_heads, head_dim)
        row = table.rows["KVCache::with_capacity(num_layers, num_kv_heads, head_dim, max_seq_len)"]
        ported.cache = row(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, max_seq_len=max_seq_len)
        return ported

    def append(self, layer, k_data, v_data):
        self.batch = self.batch or self.cache.batch(1)
        names = {"batch": self.batch, "layer": layer, "num_kv_heads": self.shape[1], "head_dim": self.shape[2]}
        table.rows["append(layer, k_data, v_data)"](k_data=k_data, v_data=v_data, **names)

    def advance(self):
        table.rows["advance()"](batch=self.batch)
        self.batch = None

    def __getattr__(self, name):
        if name in ("k", "v"):
            return lambda layer: table.rows[f"{name}(layer)"](cache=self.cache, layer=layer)
        return lambda: table.rows[f"{name}()"](cache=self.cache, layer=0)


def test_create_and_append():
    cache = Ported(2, 4, 16)
    assert cache.is_empty()
    assert cache.len() == 0
    assert cache.entry_size() == 64

    # Append one token to both layers
    kv_data = np.full(64, 1.0, np.float32)
    cache.append(0, kv_data, kv_data)
    cache.append(1, kv_data, kv_data)
    cache.advance()

    assert cache.len() == 1
    assert len(cache.k(0)) == 64
    assert len(cache.v(1)) == 64


def test_append_multiple_tokens():
    cache = Ported(1, 2, 8)

    for token_idx in range(5):
        data = np.full(16, token_idx, np.float32)
        cache.append(0, data, data)
        cache.advance()

    assert cache.len() == 5
    assert len(cache.k(0)) == 80  # 5 tokens * 2 heads * 8 dim
    # First entry should be 0.0, last should be 4.0
    assert cache.k(0)[0] == 0.0
    assert cache.k(0)[64] == 4.0


def test_clear_cache():
    cache = Ported(2, 4, 16)
    data = np.full(64, 1.0, np.float32)
    cache.append(0, data, data)
    cache.append(1, data, data)
    cache.advance()
    assert cache.len() == 1

    cache.clear()
    assert cache.len() == 0
    assert cache.is_empty()
    assert len(cache.k(0)) == 0


def test_with_capacity_of_a_model():
    cache = Ported.with_capacity(16, 8, 64, 2048)
    assert cache.is_empty()
    assert cache.num_layers() == 16
    assert cache.entry_size() == 512


# --- and how it behaves ------------------------------------------------------------------------------------------


def test_layers_stay_independent(cache):
    rows = [list(random_rows(1, heads=4, dim=16, seed=layer)) for layer in range(2)]
    with cache.batch(1) as batch:
        for layer, (k, v) in enumerate(rows):
            batch.put(layer, k, v)
    for layer, (k, v) in enumerate(rows):
        np.testing.assert_array_equal(cache.keys(layer), k.swapaxes(0, 1))
        np.testing.assert_array_equal(cache.values(layer), v.swapaxes(0, 1))
