"""Rows selected by sketches, in Python: `Layer(sketch=True)`, `Batch.attend(select=...)` and loaded states.

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


def test_a_part_of_the_rows_is_read(tmp_path):
    """Also of a loaded state, whose keys have their sketches made."""
    cache, path = kvcache.KVCache([kvcache.Layer(2, 64, v_head_dim=320, dtype="f32", sketch=True)]), tmp_path / "state"
    with cache.batch(TOKENS - 1) as batch:
        batch.put(0, K[:-1], V[:-1])
    cache.save(path)
    outs = []
    for one in (cache, kvcache.KVCache.load(path, sketch=True), kvcache.KVCache.load(path, sketch=[True])):
        with one.batch(1) as batch:
            outs.append(batch.attend(0, Q, K[-1:], V[-1:], select=ROWS))
            np.testing.assert_array_equal(batch.attend(0, Q, select=TOKENS), batch.attend(0, Q))
    np.testing.assert_array_equal(outs, [outs[0]] * 3)
    for head in range(8):
        read = np.flatnonzero(outs[0][0, head])
        assert len(read) == 80 + ROWS
        assert set(range(16)) | set(range(TOKENS - 64, TOKENS)) <= set(read)
    assert not kvcache.KVCache.load(path).layers[0].sketch
    with pytest.raises(ValueError, match=r"len\(sketch\)=2"):
        kvcache.KVCache.load(path, sketch=[True, True])
    kvcache.KVCache([kvcache.Layer(2, 40)]).save(path)
    with pytest.raises(ValueError, match="head_dim=40: for sketches it must be a multiple of 32"):
        kvcache.KVCache.load(path, sketch=True)


def test_bytes():
    layer = kvcache.Layer(8, 128, sketch=True)
    assert layer.bytes_per_token == kvcache.Layer(8, 128).bytes_per_token + 8 * 34
    assert "sketches" in str(layer)
    assert kvcache.KVCache([layer]).layers[0].sketch
