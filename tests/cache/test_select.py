"""Rows selected by sketches: what `Layer(sketch=True)` and `Batch.attend(select=...)` take, refuse and change."""

import numpy as np
import pytest

import kvcache

TOKENS, ROWS = 300, 40
RNG = np.random.default_rng(3)
K = RNG.standard_normal((TOKENS, 2, 64), np.float32)
V = np.broadcast_to(np.eye(TOKENS, 320, dtype=np.float32)[:, None], (TOKENS, 2, 320))  # shows which rows are read
Q = RNG.standard_normal((1, 8, 64), np.float32)


def cache_of(**options):
    layer = kvcache.Layer(2, 64, v_head_dim=320, dtype="f32", **{"sketch": True} | options)
    cache = kvcache.KVCache([layer], max_seq_len=1024)
    with cache.batch(TOKENS - 1) as batch:
        batch.put(0, K[:-1], V[:-1])
    return cache


def test_a_part_of_the_rows_is_read():
    with cache_of().batch(1) as batch:
        out = batch.attend(0, Q, K[-1:], V[-1:], select=ROWS)
        for head in range(8):
            read = np.flatnonzero(out[0, head])
            assert len(read) == 80 + ROWS
            assert set(range(16)) | set(range(TOKENS - 64, TOKENS)) <= set(read)
        weight = np.exp(K[:, 0] @ Q[0, :4].T / 8)
        pieces = (weight / weight.sum(0)).sum(1)[16 : TOKENS - 64].reshape(-1, 4).sum(1)
        best = 16 + 4 * np.argmax(pieces)
        assert out[0, 0, best : best + 4].all()


def test_few_rows_are_all_read():
    with cache_of().batch(1) as batch:
        dense = batch.attend(0, Q, K[-1:], V[-1:])
        np.testing.assert_array_equal(batch.attend(0, Q, select=TOKENS), dense)


def test_prompts_are_dense():
    cache = cache_of()
    queries = np.repeat(Q, 9, axis=0)
    with cache.batch(9) as batch:
        dense = batch.attend(0, queries, K[:9], V[:9])
        np.testing.assert_array_equal(batch.attend(0, queries, select=ROWS), dense)


def test_prefixes_keep_no_token_that_selected():
    cache = kvcache.KVCache(1, 2, 64, max_sequences=None, max_seq_len=1024, block_size=16, sketch=True)
    prefixes = kvcache.PrefixCache(cache, fingerprint="zeros")
    tokens = list(range(320))
    seq_id, _ = prefixes.acquire(tokens)
    for count, first in ((304, 0), (16, 15)):
        zeros = np.zeros((count, 2, 64), np.float32)
        with cache.batch(count, seq_ids=[seq_id] * count) as batch:
            batch.put(0, zeros, zeros)
            if first:
                batch.attend(0, Q, first=first, select=ROWS)  # the last token
    prefixes.release(seq_id, tokens)
    assert prefixes.lookup([*tokens, 7]) == 319


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"v_head_dim": 0}, kvcache.NotSupportedError, "sketch=True: there are keys alone"),
        ({"value_in_key": True}, kvcache.NotSupportedError, "sketch=True: values lie in the keys"),
        ({"head_dim": 40}, ValueError, "head_dim=40"),
        (
            {"policy": kvcache.SlidingWindow(4096)},
            kvcache.NotSupportedError,
            r"policy=SlidingWindow\(window=4096\) .* at least 8192 positions: leave sketch out",
        ),
        ({"policy": kvcache.CrossAttention(10)}, kvcache.NotSupportedError, "sketch=True: with policy=CrossAttention"),
        ({"sketch": 2}, TypeError, "sketch=2: must be True or False"),
    ],
)
def test_bad_layers(options, error, says):
    arguments = {"head_dim": 64, "sketch": True, "dtype": "f32"} | options
    with pytest.raises(error, match=says):
        kvcache.Layer(2, **arguments)


def test_bad_calls():
    with cache_of().batch(1) as batch:
        with pytest.raises(ValueError, match="select=0"):
            batch.attend(0, Q, K[-1:], V[-1:], select=0)
        with pytest.raises(ValueError, match="select=320, and chosen is given"):
            batch.attend(0, Q, K[-1:], V[-1:], select=320, chosen=[[0]])
        batch.put(0, K[-1:], V[-1:])
    with cache_of(sketch=False).batch(1) as batch:
        with pytest.raises(kvcache.NotSupportedError, match=f"select={ROWS}: layer 0 has no sketches: .* sketch=True"):
            batch.attend(0, Q, K[-1:], V[-1:], select=ROWS)
        batch.put(0, K[-1:], V[-1:])


def test_sketches_are_made_of_loaded_keys(tmp_path):
    cache = cache_of()
    cache.save(tmp_path / "state")
    with cache.batch(1) as batch:
        wanted = batch.attend(0, Q, K[-1:], V[-1:], select=ROWS)
    with kvcache.KVCache.load(tmp_path / "state", sketch=True) as loaded, loaded.batch(1) as batch:
        np.testing.assert_array_equal(batch.attend(0, Q, K[-1:], V[-1:], select=ROWS), wanted)
    with kvcache.KVCache.load(tmp_path / "state") as loaded:
        assert not loaded.layers[0].sketch
    assert kvcache.KVCache.load(tmp_path / "state", sketch=[True]).layers[0].sketch
    for sketch, error, says in (
        ([True, True], ValueError, r"len\(sketch\)=2"),
        (2, TypeError, "sketch=2: must be True or False"),
    ):
        with pytest.raises(error, match=says):
            kvcache.KVCache.load(tmp_path / "state", sketch=sketch)


def test_loaded_layers_that_can_have_no_sketches(tmp_path):
    cache = kvcache.KVCache([kvcache.Layer(2, 40)])
    cache.save(tmp_path / "state")
    with pytest.raises(ValueError, match="head_dim=40: for sketches it must be a multiple of 32"):
        kvcache.KVCache.load(tmp_path / "state", sketch=True)


def test_bytes():
    layer = kvcache.Layer(8, 128, sketch=True)
    assert layer.bytes_per_token == kvcache.Layer(8, 128).bytes_per_token + 8 * 34
    assert "sketches" in str(layer)
    assert kvcache.KVCache([layer]).layers[0].sketch
