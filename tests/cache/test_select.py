"""Rows selected by sketches: what `Layer(sketch=True)` and `Batch.attend(select=...)` take and refuse.

tests/c/attend/test_select.c holds which rows these are, and tests/world that no prefix knows their tokens.
"""

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
        np.testing.assert_array_equal(batch.attend(0, Q, select=TOKENS), batch.attend(0, Q))


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
    with pytest.raises(ValueError, match=r"len\(sketch\)=2"):
        kvcache.KVCache.load(tmp_path / "state", sketch=[True, True])
    kvcache.KVCache([kvcache.Layer(2, 40)]).save(tmp_path / "state")
    with pytest.raises(ValueError, match="head_dim=40: for sketches it must be a multiple of 32"):
        kvcache.KVCache.load(tmp_path / "state", sketch=True)


def test_bytes():
    layer = kvcache.Layer(8, 128, sketch=True)
    assert layer.bytes_per_token == kvcache.Layer(8, 128).bytes_per_token + 8 * 34
    assert "sketches" in str(layer)
    assert kvcache.KVCache([layer]).layers[0].sketch
