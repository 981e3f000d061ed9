"""Batches beyond put and attend: trees, attention in both directions, sequences in lock step, rows in place."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from support.attention import attend

import kvcache

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 4


def new_cache(**options):
    options = {"v_head_dim": V_DIM, "dtype": "f32", "max_sequences": None} | options
    return kvcache.KVCache(1, KV_HEADS, DIM, 64, **options)


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n, HEADS, DIM), np.float32)
    k = rng.standard_normal((n, KV_HEADS, DIM), np.float32)
    return q, k, rng.standard_normal((n, KV_HEADS, V_DIM), np.float32)


def feed(cache, n, seq_id=0, seed=0):
    first = cache.next_position(seq_id)
    with cache.batch(positions=range(first, first + n), seq_ids=[seq_id] * n) as batch:
        batch.attend(0, *rows(n, seed))


def by_hand(q, dense):
    """Attention over what `dense` returns."""
    k, v, mask = dense
    return attend(q, k.swapaxes(0, 1), v.swapaxes(0, 1), bias=mask)


# ---- directions


@pytest.mark.parametrize("given", [True, np.True_, [True, False, True], np.array([True, False, True])])
def test_non_causal(given):
    cache = new_cache()
    feed(cache, 2)
    q, k, v = rows(3, seed=1)
    flags = [True] * 3 if isinstance(given, bool | np.bool_) else list(given)
    with cache.batch(3) as batch:
        batch.put(0, k, v)
        out = batch.attend(0, q, non_causal=given)
        _, _, mask = dense = batch.dense(0, non_causal=given)
        for of_range in (flags[1:], np.array(flags)):  # one for each query, or for each token of the batch
            np.testing.assert_array_equal(batch.attend(0, q[1:], first=1, non_causal=of_range), out[1:])
        causal = batch.attend(0, q)
        for nobody in (False, np.False_, [False] * 3, None):
            np.testing.assert_array_equal(batch.attend(0, q, non_causal=nobody), causal)
    assert [(row == 0).sum() for row in mask] == [5 if flag else 3 + i for i, flag in enumerate(flags)]
    np.testing.assert_allclose(out, by_hand(q, dense), atol=1e-5)
    assert (out != causal).any()


# ---- masked ranges


def test_hidden():
    """Attention and `dense` see the same rows. Tests in C say which."""
    q, k, v = rows(12, seed=2)
    array = np.array([[0, 2, 5], [0, 7, 8]], np.int32)
    with new_cache().batch(12) as batch:
        out = batch.attend(0, q, k, v, masked=[(0, 7, 8), (0, 3, 5), (0, 2, 4)])
        np.testing.assert_array_equal(batch.attend(0, q, masked=array), out)
        *_, mask = dense = batch.dense(0, masked=array)
        assert np.isneginf(mask[:, [2, 3, 4, 7]]).all()
        np.testing.assert_allclose(out, by_hand(q, dense), atol=1e-5)
        for nothing in (None, [], np.empty((0, 3), int), [(0, 5, 5)], [(0, 500, 2**60)]):
            np.testing.assert_array_equal(batch.attend(0, q, masked=nothing), batch.attend(0, q))
        out, lse = batch.attend(0, q, masked=[(0, 0, 2**60)], return_lse=True)
        assert not out.any()
        assert np.isneginf(lse).all()


# ---- dense


def several(new, **options):
    """Begin a batch of three sequences, two of which hold rows; return it with the rows to put."""
    cache = new_cache(**options)
    feed(cache, 5, seq_id=9)
    feed(cache, 2, seq_id=4, seed=1)
    positions = [cache.next_position(i) + t for i in (9, 4, 7) for t in range(new)]
    batch = cache.batch(positions=positions, seq_ids=np.repeat([9, 4, 7], new))
    return batch, rows(3 * new, seed=2)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["HTD", "THD", "BHTD"])
def test_dense_of_any_type_and_layout(layout, dtype):
    """Into new arrays, and into arrays of the caller."""
    batch, (_, k, v) = several(2)
    batch.put(0, k, v)
    expected = batch.dense(0, layout=layout)
    plain = batch.dense(0) if layout == "THD" else expected
    of_type = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    for kind in ("f32", "bool", None):
        right = [x.astype(of_type) for x in expected[:2]] + [expected[2] if kind == "f32" else expected[2] == 0]
        options = {"layout": layout, "mask": kind}
        out = [np.full_like(x, 7) for x in right[: 2 if kind is None else 3]]
        wide = np.full((*out[0].shape[:-1], DIM + 3), 7, of_type)
        out[0] = wide[..., :DIM]
        given = batch.dense(0, out=out, **options)
        assert all(x is to for x, to in zip(given, out, strict=False))
        assert (wide[..., DIM:] == 7).all()
        for found in (batch.dense(0, dtype=dtype, **options), given, batch.dense(0, out=out[:2], **options)):
            assert (found[2] is None) == (kind is None)
            for x, wanted in zip(found, right, strict=True):
                assert x is None or x.dtype == wanted.dtype
                assert x is None or np.array_equal(x, wanted)
    for x, wanted in zip(plain[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(x, wanted.swapaxes(0, 1) if layout == "THD" else wanted)
    batch.abort()


@pytest.mark.parametrize("non_causal", [None, True])
def test_dense_of_each_sequence_by_itself(non_causal):
    new = 3
    batch, (q, k, v) = several(new)
    out = batch.attend(0, q, k, v, non_causal=non_causal)
    keys, values, mask = batch.dense(0, layout="BHTD", non_causal=non_causal)
    seen = batch.dense(0, layout="BHTD", non_causal=non_causal, mask="bool")[2]
    assert (keys.shape, values.shape) == ((3, KV_HEADS, 8, DIM), (3, KV_HEADS, 8, V_DIM))
    assert (mask.shape, seen.dtype) == ((3, new, 8), np.bool_)
    np.testing.assert_array_equal(seen, mask == 0)
    for s, length in enumerate((8, 5, 3)):
        np.testing.assert_allclose(
            out[s * new : (s + 1) * new],
            by_hand(q[s * new : (s + 1) * new], (keys[s], values[s], mask[s])),
            atol=1e-5,
        )
        assert not any(x[s, :, length:].any() for x in (keys, values, seen))
    batch.abort()


# ---- lock step


def lock_step(x):
    """[B * T, heads, dim] as [B, heads, T, dim], for three sequences."""
    return np.ascontiguousarray(np.swapaxes(x.reshape(3, -1, *x.shape[1:]), 1, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_lock_step(dtype):
    q, k, v = (x.astype(dtype) for x in rows(6))
    positions, seq_ids = [0, 1] * 3, [0, 0, 1, 1, 2, 2]
    cache, other = new_cache(), new_cache()
    with other.batch(positions=positions, seq_ids=seq_ids) as batch:
        expected, expected_lse = batch.attend(0, q, k, v, return_lse=True)
    q, k, v = map(lock_step, (q, k, v))
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        out, lse = batch.attend(0, q, k, v, layout="BHTD", return_lse=True)
        np.testing.assert_array_equal(out, lock_step(expected))
        np.testing.assert_array_equal(lse, lock_step(expected_lse[..., None])[..., 0])
        given = np.zeros((3, HEADS, 2, 2 * V_DIM), dtype)[..., :V_DIM]
        assert batch.attend(0, q, layout="BHTD", out=given) is given
        np.testing.assert_array_equal(given, out)
        np.testing.assert_array_equal(batch.attend(0, q[1:2], first=2, layout="BHTD"), out[1:2])
    assert (out.shape, lse.shape) == ((3, HEADS, 2, V_DIM), (3, HEADS, 2))
    for seq_id in range(3):
        np.testing.assert_array_equal(cache.keys(0, seq_id=seq_id), other.keys(0, seq_id=seq_id))
        np.testing.assert_array_equal(cache.values(0, seq_id=seq_id), v[seq_id].astype(np.float32))


# ---- rows in place


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_slots(dtype):
    cache, other = new_cache(dtype=dtype, block_size=4), new_cache(dtype=dtype)
    q, k, v = rows(6)
    with cache.batch(6) as batch:
        first = 0
        while first < 6:
            views = batch.slots(0, first=first)
            n = views[0].shape[1]
            for view, given in zip(views, (k, v), strict=True):
                assert view.shape == (KV_HEADS, n, given.shape[-1])
                view[:] = np.swapaxes(given[first : first + n], 0, 1)
            batch.written(0, first, n)
            first += n
        out = batch.attend(0, q)
    with other.batch(6) as batch:
        np.testing.assert_array_equal(out, batch.attend(0, q, k, v))
    np.testing.assert_array_equal(cache.keys(0), other.keys(0))
    np.testing.assert_array_equal(cache.values(0), other.values(0))
    assert views[0].dtype == other.keys(0).dtype


def test_slots_of_quantised_types_are_bytes():
    cache = kvcache.KVCache(1, 2, 64, 16, v_head_dim=32, k_dtype="q8_0", v_dtype="q4_0")
    with cache.batch(2) as batch:
        k, v = batch.slots(0)
        assert (k.shape, v.shape, k.dtype, v.dtype) == ((2, 2, 68), (2, 2, 18), np.uint8, np.uint8)
        k[:], v[:] = 0, 0
        k[..., 0:2] = np.array([1], np.float16).view(np.uint8)  # the scale of the first block
        k[..., 2:34] = 3
        batch.written(0, 0, 2)
    keys, values = cache.gather(0)
    assert (keys[..., :32] == 3).all()
    assert not keys[..., 32:].any()
    assert not values.any()


def fill(batch):
    k, v = batch.slots(0)
    k[:], v[:] = 1, 2
    batch.written(0, 0, len(batch))
    return k, v


@pytest.mark.parametrize("keep", [None, [0, 1, 2, 3], [2], []])
def test_slots_outlive_their_batch(keep):
    """Whatever becomes of the tokens, their memory is not handed out anew while it can be looked at; None: aborted."""
    cache = new_cache(block_size=4)
    batch = cache.batch(4)
    k, v = fill(batch)
    part = k[:, 1:]
    if keep is None:
        batch.abort()
    else:
        batch.commit(keep=keep)
    assert cache.seq_len() == len(keep or [])
    for view in (k, v):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 0
    feed(cache, 3, seq_id=1)
    for call in (cache.compact, cache.close):
        with pytest.raises(BufferError):
            call()
    cache.clear()
    feed(cache, 3)
    assert (part == 1).all()
    assert (v == 2).all()
    del k, v, view, part
    cache.compact()
    cache.validate()
    cache.close()


def test_slots_of_a_batch_that_is_dropped():
    cache = new_cache()
    k, _ = fill(cache.batch(2))
    assert cache.seq_len() == 0
    feed(cache, 2, seq_id=1)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    k[:] = 3
    assert (k == 3).all()


def test_slots_that_were_dropped_hinder_nothing():
    cache = new_cache()
    batch = cache.batch(2)
    for _ in range(3):
        fill_again = batch.slots(0)
    del fill_again
    batch.abort()
    feed(cache, 2)
    cache.compact()


# ---- room
