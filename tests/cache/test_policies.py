"""Policies other than full and sliding attention, their mixes, layers that share rows, values that lie in keys."""

import numpy as np
import pytest
from support.attention import attend
from support.saved_states import feed

import kvcache

HEADS, DIM = 2, 8


def rows(n, seed=0, dim=DIM):
    return np.random.default_rng(seed).standard_normal((3, n, HEADS, dim)).astype(np.float32)


def new_cache(policy, num_layers=1, **options):
    options = {"dtype": "f32", "max_sequences": None} | options
    return kvcache.KVCache(num_layers, HEADS, DIM, None, policy=policy, **options)


def test_policies_are_values():
    assert kvcache.SlidingWindow(np.int32(4)) == kvcache.SlidingWindow(4, 0, None)
    assert kvcache.ChunkedAttention(np.int32(4)) == kvcache.ChunkedAttention(4, None) != kvcache.ChunkedAttention(4, 0)
    assert type(kvcache.ChunkedAttention(np.int32(4)).attention_chunk_size) is int
    assert repr(kvcache.SlidingWindow(np.int32(4))) == "SlidingWindow(window=4, num_sink_tokens=0, resume_window=None)"
    assert repr(kvcache.CrossAttention(np.int8(3))) == "CrossAttention(max_len=3)"
    assert len({kvcache.CrossAttention(3), kvcache.CrossAttention(3)}) == 1
    with pytest.raises(AttributeError):
        kvcache.CrossAttention(4).max_len = 5


# ---- cross-attention


def test_cross_attention_of_several_sequences():
    cache = new_cache([kvcache.FullAttention(), kvcache.CrossAttention(6)], 2)
    q, k, v = rows(5)
    with cache.batch(positions=[0, 0, 0], seq_ids=[7, 8, 9]) as batch:
        batch.put(0, q[:3], q[:3])
        batch.put(1, np.swapaxes(k, 0, 1), np.swapaxes(v, 0, 1), seq_id=8, layout="HTD")
        batch.put(1, np.swapaxes(k[:3], 0, 1)[None], np.swapaxes(v[:3], 0, 1)[None], seq_id=np.int64(7), layout="BHTD")
        with pytest.raises(ValueError, match="sequence 9 has no rows"):
            batch.attend(1, q[:3])
        batch.put(1, k[4:], v[4:], seq_id=9)
        out = batch.attend(1, q[:3])
        np.testing.assert_allclose(out[0], attend(q[:1], k[:3], v[:3])[0], atol=1e-5)
        np.testing.assert_allclose(out[1], attend(q[1:2], k, v)[0], atol=1e-5)
        np.testing.assert_allclose(out[2], v[4], atol=1e-6)
    assert [cache.seq_len(s, layer=1) for s in (7, 8, 9)] == [3, 5, 1]


@pytest.mark.parametrize("shape", [(3, 2, 2, 8), (1, 1, 3, 2, 2, 8), (6, 16), (2, 8)])
def test_encoder_rows_of_any_shape_come_back_bit_for_bit(shape):
    k, v = (x[: np.prod(shape) // 16].reshape(shape) for x in rows(6)[:2])
    k.flat[:4] = np.inf, -0.0, 1e-45, np.nan
    with new_cache(kvcache.CrossAttention(6)).batch(1) as batch:
        both = np.concatenate([v, k], axis=-1)[..., ::-1, :]  # of any strides
        for given in ((k, v), (both[..., shape[-1] :], both[..., : shape[-1]])):
            batch.put(0, *given)
            for found, x in zip(batch.dense(0, layout="THD"), given, strict=False):
                assert found.tobytes() == x.tobytes()


def test_a_fork_of_nothing_is_an_error_unless_it_is_asked_for():
    cache = new_cache([kvcache.FullAttention(), kvcache.CrossAttention(6)], 2)
    q, k, v = rows(5)
    with cache.batch(1) as batch:
        batch.put(0, q[:1], q[:1])
    for copy in (cache.fork, lambda *ids, **how: cache.copy_prefix(*ids, 2, **how)):
        with pytest.raises(ValueError, match="src is sequence 7, which holds nothing"):
            copy(7, 0)
        assert cache.seq_len(0) == 1
        copy(0, 1)
        copy(7, 1, missing_ok=True)
        assert cache.seq_len(1) == 0
        with pytest.raises(ValueError, match="both sequence 7"):
            copy(7, 7, missing_ok=True)
        with pytest.raises(ValueError, match="length"):
            cache.copy_prefix(7, 0, -1, missing_ok=True)
        for src in (0, 7):
            with pytest.raises(ValueError, match=f"dst={2**63}"):
                copy(src, 2**63, missing_ok=True)
        assert cache.seq_len(0) == 1
    cache.fork(0, 1)
    cache.copy_prefix(7, 1, 0)  # no token is asked for
    assert cache.seq_len(1) == 0
    with cache.batch(1, seq_ids=[3]) as batch:
        batch.put(0, q[:1], q[:1])
        batch.put(1, k, v, seq_id=3)
    cache.copy_prefix(3, 4, 0)
    cache.fork(4, 5)  # an encoder's rows are something
    assert cache.seq_len(5, layer=1) == 5
    never = kvcache.KVCache(1, 2, 8, 64, strategy="disabled")
    never.fork(0, 1)  # the runner need not know what a strategy stores


@pytest.mark.parametrize("how", [{}, {"missing_ok": True}])
def test_sharing_a_range_of_nothing_is_an_error_unless_it_is_asked_for(how):
    """The cache refuses it as `fork` does. Other mistakes are still errors."""
    cache = kvcache.KVCache(1, 2, 8, 64, max_sequences=3, strategy="always" if how else kvcache.LongSequencesOnly(0))
    x = np.ones((1, 2, 8), np.float32)
    for seq_id in (0, 1):
        with cache.batch(1, seq_ids=[seq_id]) as batch:
            batch.put(0, x, x)
    if how:
        with pytest.raises(ValueError, match="src is sequence 7, which holds nothing"):
            cache.share_range(7, 8)
    for end in (None, 2**31 - 1):
        cache.share_range(7, 8, 0, end, **how)
        with pytest.raises(ValueError, match="at position 0, dst, sequence 1, holds another row than src, sequence 0"):
            cache.share_range(0, 1, 0, end, **how)
        with pytest.raises(ValueError, match="both sequence 7"):
            cache.share_range(7, 7, 0, end, **how)
        with pytest.raises(ValueError, match=f"dst={2**63}"):
            cache.share_range(7, 2**63, 0, end, **how)
    with pytest.raises(ValueError, match="end"):
        cache.share_range(7, 8, 3, 2, **how)
    assert cache.sequences == [0, 1]


def test_nothing_missing_hides_another_row():
    cache, last, x = kvcache.KVCache(1, 2, 8, max_sequences=None), 2**31 - 2, np.ones((1, 2, 8), np.float32)
    for seq_id in (0, 1):
        with cache.batch(positions=[last], seq_ids=[seq_id]) as batch:
            batch.put(0, x, x)
    with pytest.raises(ValueError, match=f"at position {last}, dst, sequence 1, holds another row"):
        cache.share_range(0, 1, missing_ok=True)


# ---- no attention, shared rows, mixes


def test_layers_without_attention():
    cache = new_cache([None, kvcache.FullAttention(), None], 3)
    feed(cache, 0, 3)
    assert tuple(layer.policy for layer in cache.layers) == (None, kvcache.FullAttention(), None)
    assert cache.keys(0).shape == (HEADS, 0, DIM)
    assert cache.get(2, 0) is None
    assert cache.positions().tolist() == []
    assert cache.positions(layer=1).tolist() == [0, 1, 2]
    assert "no attention" in repr(cache)


def test_shared_rows():
    local, full = kvcache.SlidingWindow(4), kvcache.FullAttention()
    cache = new_cache([local, full, local, full], 4, share=(None, None, 0, 1))
    q, k, v = rows(6)
    with cache.batch(6) as batch:
        for layer in (0, 1):
            batch.put(layer, k + layer, v - layer)
        for layer in range(4):
            np.testing.assert_array_equal(batch.attend(layer, q), batch.attend(layer % 2, q))
        np.testing.assert_array_equal(batch.dense(2)[0], batch.dense(0)[0])
    assert all(np.shares_memory(cache.values(layer), cache.values(layer - 2)) for layer in (2, 3))
    assert "reads another's rows" in repr(cache)


# ---- values that lie in keys


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_values_in_keys(dtype):
    dim, v_dim = 96, 64
    cache = kvcache.KVCache(1, 1, dim, 64, v_head_dim=v_dim, value_in_key=True, dtype=dtype)
    plain = kvcache.KVCache(1, 1, dim, 64, v_head_dim=v_dim, dtype=dtype)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 4, dim), np.float32), rng.standard_normal((5, 1, dim), np.float32)
    with cache.batch(5) as batch, plain.batch(5) as other:
        out = batch.attend(0, q, k, scale=0.1)
        other.put(0, k, k[..., :v_dim])
        np.testing.assert_allclose(out, other.attend(0, q, scale=0.1), rtol=1e-5, atol=1e-6)
    with cache.batch(2) as batch:
        batch.put(0, k[:1], k[:1, :, :v_dim])  # no harm if it is given
        batch.put(0, np.swapaxes(k[1:2], 0, 1), layout="HTD", first=1)
    keys, values = cache.gather(0)
    np.testing.assert_array_equal(values, keys[..., :v_dim])
    np.testing.assert_array_equal(cache.extract(0, 1, 3)[1], keys[:, 1:3, :v_dim])
    np.testing.assert_array_equal(cache.get(0, 6)[1], keys[:, 6, :v_dim])
    if dtype != "q8_0":
        assert np.shares_memory(cache.keys(0, copy=False), cache.values(0, copy=False))
        np.testing.assert_array_equal(cache.values(0), cache.keys(0)[..., :v_dim])
    assert cache.capacity_bytes * (dim + v_dim) == plain.capacity_bytes * dim
    cache.inject(0, 2, np.zeros((1, 2, dim), np.float16))
    assert not cache.get(0, 3)[1].any()
    assert cache.get(0, 4)[1].any()
    assert "values in keys" in repr(cache)
