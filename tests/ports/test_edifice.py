"""Edifice.Blocks.KVCache, batched [batch, heads, seq, dim]: every row of its table."""

import numpy as np
import pytest
from support.coming_from import Table

from kvcache import CacheFullError, KVCache

table = Table("Edifice")
test_every_row_has_a_test = table.all_claimed()

B, H, D = 3, 2, 8


@pytest.fixture
def cache():
    with KVCache(2, H, D, 16, dtype="f32", max_sequences=B) as cache:
        yield cache


def random_array(tokens, heads=H, seed=0):
    return np.random.default_rng(seed).standard_normal((B, heads, tokens, D), np.float32)


def lock_step(cache, tokens):
    """The next tokens of every sequence."""
    first = cache.next_position(0)
    return cache.batch(positions=np.tile(np.arange(first, first + tokens), B), seq_ids=np.repeat(np.arange(B), tokens))


def update_all(cache, tokens, seed=0):
    k, v = random_array(tokens, seed=seed), random_array(tokens, seed=seed + 100)
    with lock_step(cache, tokens) as batch:
        for layer in range(2):
            batch.put(layer, k, v, layout="BHTD")
    return k, v


def attention_in_numpy(q, k, v):
    """Compute softmax(q k / sqrt(d)) v over all rows, as Edifice's cached attention does."""
    k, v = (np.repeat(x, q.shape[1] // H, axis=1).astype(float) for x in (k, v))
    scores = np.einsum("bhtd,bhnd->bhtn", q, k) / np.sqrt(D)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhtn,bhnd->bhtd", p / p.sum(-1, keepdims=True), v)


@table.row("init(batch_size: b, num_layers: l, num_heads: h, head_dim: d, max_seq_len: n)")
def test_init(run):
    with run(b=B, l=2, h=H, d=D, n=16) as cache:
        taken, blocks = cache.nbytes, cache.stats()["blocks_opened"]
        update_all(cache, 9)
        update_all(cache, 7)
        assert (cache.sequences, cache.stats()["blocks_opened"]) == ([0, 1, 2], blocks)
        assert taken >= 2 * 2 * B * H * 16 * D * 4
        with pytest.raises(CacheFullError):
            lock_step(cache, 1)


@table.row("init(batch_size: b, num_layers: l, num_heads: h, head_dim: d)")
def test_init_default_length(run):
    with run(b=B, l=2, h=H, d=D) as cache:
        assert (cache.max_seq_len, cache.max_sequences) == (2048, B)
        assert [layer.k_dtype for layer in cache.layers] == ["f32", "f32"]


@table.row("init(batch_size: b, num_layers: l, num_heads: h, head_dim: d, max_seq_len: n, type: t)")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_init_type(run, dtype):
    with run(b=B, l=2, h=H, d=D, n=16, t=dtype) as cache:
        assert [(layer.k_dtype, layer.v_dtype) for layer in cache.layers] == [(dtype, dtype)] * 2
        with pytest.raises(CacheFullError):
            cache.batch(positions=range(17))


@table.row("update(state, layer_idx, new_k, new_v)")
def test_update(run, cache):
    before_k, before_v = update_all(cache, 4)
    new_k, new_v = random_array(2, seed=1), random_array(2, seed=2)
    with lock_step(cache, 2) as batch:
        for layer in range(2):
            run(batch=batch, layer_idx=layer, new_k=new_k, new_v=new_v)
        k, v, mask = batch.dense(0, layout="BHTD", mask="bool")
    np.testing.assert_array_equal(k, np.concatenate([before_k, new_k], 2))
    np.testing.assert_array_equal(v, np.concatenate([before_v, new_v], 2))
    assert mask.tolist() == [[[True] * 5 + [False], [True] * 6]] * B
    assert cache.seq_len(2) == 6


@table.row("get(state, layer_idx)")
def test_get(run, cache):
    k, v = update_all(cache, 4)
    got_k, got_v = run(cache=cache, layer_idx=1, batch_size=B)
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)


@table.row("reset(state)")
def test_reset(run, cache):
    update_all(cache, 4)
    run(cache=cache)
    assert cache.seq_len() == 0
    k, _ = update_all(cache, 2, seed=5)
    np.testing.assert_array_equal(cache.gather(0, seq_id=1)[0], k[1])


@table.row("seq_length(state)")
def test_seq_length(run, cache):
    assert run(cache=cache) == 0
    update_all(cache, 4)
    update_all(cache, 1)
    assert run(cache=cache) == 5


@table.row("build_cached_attention(num_heads: h, head_dim: d, layer_idx: i)")
def test_cached_attention(run, cache):
    before_k, before_v = update_all(cache, 4)
    attention = [run(i=layer) for layer in range(2)]
    q = random_array(3, heads=2 * H, seed=7)
    k, v = random_array(3, seed=8), random_array(3, seed=9)
    with lock_step(cache, 3) as batch:
        outs = [attention[layer](batch, q, k, v) for layer in range(2)]
    expected = attention_in_numpy(q, np.concatenate([before_k, k], 2), np.concatenate([before_v, v], 2))
    for out in outs:
        assert out.shape == (B, 2 * H, 3, D)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert cache.seq_len(1) == 7  # stored and attended
