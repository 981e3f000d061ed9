"""Layers of keys alone (`v_head_dim` 0) in Python: put without values, and values of width 0.

tests/world compares what edits, states and prefixes do with such rows. refusals.txt has what is refused.
"""

import dataclasses

import numpy as np

import kvcache
from kvcache import state

HEADS, DIM, INDEX_DIM, TOKENS = 4, 32, 64, 9
ROPE = kvcache.Rope(10_000.0 ** (-np.arange(0, 16, 2) / 16))


def layers(dtype="f32"):
    keys = kvcache.Layer(1, INDEX_DIM, v_head_dim=0, dtype=dtype, rope=ROPE)
    return [kvcache.Layer(HEADS, DIM, dtype="f32", rope=False), keys, dataclasses.replace(keys, share=1)]


def put_plain(batch):
    batch.put(0, *np.ones((2, len(batch), HEADS, DIM), np.float32))


def fed(dtype="f32"):
    cache = kvcache.KVCache(layers(dtype), max_sequences=None, block_size=4)
    with cache.batch(TOKENS) as batch:
        put_plain(batch)
        batch.put(1, np.random.default_rng(0).standard_normal((TOKENS, 1, INDEX_DIM)).astype(np.float32))
    return cache


def test_a_layer_says_that_it_holds_keys_alone():
    layer = kvcache.Layer(1, 128, v_head_dim=0, dtype="int8", k_transform="hadamard")
    assert str(layer) == "1 KV head x 128, hadamard int8, FullAttention(), keys alone"
    assert (layer.v_head_dim, layer.bytes_per_token, layer.most_bytes(10)) == (0, 130, 1300)
    assert (layer.v_dtype, layer.v_transform) == ("int8", "hadamard")
    assert repr(layer).startswith("Layer(num_kv_heads=1, head_dim=128, v_head_dim=0, ")


def test_types_of_values_that_there_are_not_tell_no_layers_apart():
    given = kvcache.Layer(1, 64, v_head_dim=0, k_dtype="q8_0", v_dtype="f16", v_transform="hadamard")
    assert given == kvcache.Layer(1, 64, v_head_dim=0, dtype="q8_0")
    cache = kvcache.KVCache(2, [4, 1], [32, 128], v_head_dim=[32, 0], k_dtype=["f16", "int8"], v_dtype="f16")
    assert cache.layers[1] == kvcache.Layer(1, 128, v_head_dim=0, dtype="int8")
    assert "1 layer of 1 KV head x 128, int8, FullAttention(), keys alone" in repr(cache)


def test_rows_come_back_without_values_and_can_be_put(tmp_path):
    cache, other = fed("int8"), kvcache.KVCache(layers("int8"))
    raw, floats = cache.gather(1, raw=True), cache.gather(1, dtype="f16")
    assert [(rows.shape, rows.dtype) for rows in floats] == [((1, TOKENS, n), np.float16) for n in (INDEX_DIM, 0)]
    assert (raw[1].shape, raw[1].dtype) == ((1, TOKENS, 0), np.uint8)
    assert [rows.shape for rows in cache.extract(2, 3, 12)] == [(1, 9, INDEX_DIM), (1, 9, 0)]
    assert [rows.shape for rows in cache.get(1, 3)] == [(1, INDEX_DIM), (1, 0)]
    with other.batch(TOKENS) as batch:
        put_plain(batch)
        batch.put(1, *raw, layout="HTD")
    assert other.inject(1, 2, *(rows[:, 2:5] for rows in floats)) == 3
    assert other.inject(1, 2, raw[0][:, 2:5]) == 3
    np.testing.assert_array_equal(other.gather(1, raw=True)[0], raw[0])
    cache.save(tmp_path / "keys")
    found = state.inspect(tmp_path / "keys", verify=True)
    assert found.layers == tuple(layers("int8"))
    names = {tensor.name for tensor in found.tensors}
    assert {"layer.1.k", "layer.1.k.scale", "layer.0.v"} <= names
    assert not any(name.startswith("layer.1.v") for name in names)


def test_arrays_of_the_caller():
    cache = fed()
    k, v = np.empty((1, TOKENS, INDEX_DIM), np.float32), np.empty((1, TOKENS, 0), np.float32)
    assert cache.gather(1, out=(k, v))[0] is k
    np.testing.assert_array_equal(k, cache.gather(2)[0])


def test_views():
    cache = fed()
    assert cache.keys(1).shape == (1, TOKENS, INDEX_DIM)
    for values in (cache.values(1), cache.values(1, copy=True), *(span.v for span in cache.spans(1))):
        assert (values.shape[0], values.shape[2]) == (1, 0)
    assert not cache.spans(1)[0].v.flags.writeable
    assert sum(span.v.shape[1] for span in cache.spans(1)) == TOKENS
    with cache.batch(1, seq_ids=[7]) as batch:
        k, v = batch.slots(1)
        assert (k.shape, v.shape) == ((1, 1, INDEX_DIM), (1, 1, 0))
        k[:], v[:] = 3, 4
        batch.written(1, 0, 1)
        put_plain(batch)
        assert batch.keys(2, seq_id=7)[0, 0, 0] == 3
        assert batch.values(2, seq_id=7).shape == (1, 1, 0)
        assert batch.spans(1, seq_id=7)[0].v.shape == (1, 1, 0)
    assert (cache.keys(1, seq_id=7) == 3).all()
