"""Ollama's kvcache, v0.15.4: every row of its table, and rows of encoders in any shape."""

import math

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

from kvcache import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KVCache,
    SlidingWindow,
)

table = Table("Ollama")
test_every_row_has_a_test = table.all_claimed()


def moved(layer, keys, delta):
    """A shift function for keys that are their position."""
    return keys + np.float32(delta)


def swa(window, memory=None, *, max_sequences=1):
    """The policy that shows what a window of Ollama's shows, and keeps what it keeps."""
    memory = window if memory is None else memory
    return SlidingWindow(window + 1, resume_window=(max(memory, window + 1) if max_sequences > 1 else memory) + 1)


# --- encoders and wrapped caches ---------------------------------------------------------------------------------


def encoder_cache():
    return KVCache(2, 2, 8, 16, dtype="f32", policy=[CrossAttention(8), FullAttention()], max_sequences=2)


def encoder_pass(cache, image=None, *, seq_id=0):
    """One token of a sequence, with an image or without; what it gets of the image."""
    k, v = random_rows(1)
    with cache.batch(positions=[cache.next_position(seq_id)], seq_ids=[seq_id]) as batch:
        if image is not None:
            batch.put(0, *image, seq_id=seq_id)
        out = batch.attend(0, np.zeros((1, 2, 8), np.float32))
        batch.put(1, k, v)
    return out[0]


# --- the table ---------------------------------------------------------------------------------------------------

MODEL = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 16, "max_sequences": 2, "shift": moved}


@pytest.fixture
def cache():
    with KVCache(2, 2, 8, 16, dtype="f32", max_sequences=2, rope=moved) as cache:
        yield cache


@table.row("NewCausalCache(shift)")
def test_new_causal_cache(run):
    with run(**MODEL) as cache:
        store(cache, 16)
        cache.remove(1, 3)
        assert tuple(layer.policy for layer in cache.layers) == (FullAttention(), FullAttention())
        assert cache.seq_len() == 14


@table.row("NewSWACache(windowSize, shift)")
def test_new_swa_cache(run):
    with run(**MODEL, windowSize=4) as cache:
        assert cache.layers[0].policy == SlidingWindow(5)


@table.row("NewSWAMemCache(windowSize, memorySize, shift)")
def test_new_swa_mem_cache(run):
    with run(**MODEL, windowSize=4, memorySize=7) as cache:
        assert cache.layers[0].policy == swa(4, 7)


@table.row("NewChunkedAttentionCache(chunkSize, shift)")
def test_new_chunked_cache(run):
    with run(**MODEL, chunkSize=4) as cache:
        assert cache.layers[0].policy == ChunkedAttention(4, resume_window=16)
        for _ in range(16):
            store(cache, 1)
        assert cache.seq_len() == 16


@table.row("NewEncoderCache()")
def test_new_encoder_cache(run):
    k, v = random_rows(8)
    with run(**MODEL, max_len=8) as cache, cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
            assert batch.dense(layer, layout="THD")[0].tobytes() == k.tobytes()


@table.row("NewWrapperCache(swa, causal)")
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_new_wrapper_cache(run, num_layers):
    with run(**MODEL | {"num_layers": num_layers}, swa=swa(3), causal=FullAttention()) as cache:
        assert tuple(layer.policy for layer in cache.layers) == ((swa(3), FullAttention()) * 3)[:num_layers]


@table.row("Init(backend, dtype, maxSequences, capacity, maxBatch)")
def test_init(run):
    with run(**MODEL, dtype="f16", maxSequences=3) as cache:
        assert (cache.max_seq_len, cache.max_sequences, cache.layers[0].k_dtype) == (16, 3, "f16")


@table.row("SetConfig(config)")
def test_set_config(run, cache):
    k, v = store(cache, 3)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(1))
        keys, values, mask = run(batch=batch, layer=0)
    np.testing.assert_array_equal(keys[:, :3], k.swapaxes(0, 1))
    np.testing.assert_array_equal(values[:, :3], v.swapaxes(0, 1))
    assert mask.tolist() == [[0, 0, 0, 0]]


@table.row("Close()")
def test_close(run, cache):
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


@table.row("StartForward(ctx, batch, false)")
def test_start_forward(run, cache):
    with run(cache=cache, positions=[0, 1, 0], seqs=[4, 4, 5]) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
    assert (cache.seq_len(4), cache.seq_len(5)) == (2, 1)


@table.row("StartForward(ctx, batch, true)")
def test_start_forward_to_reserve(run, cache):
    before = cache.nbytes
    run(cache=cache, num_tokens=16)
    assert cache.nbytes > before
    assert cache.sequences == []
    blocks = cache.stats()["blocks_opened"]
    store(cache, 16)
    assert cache.stats()["blocks_opened"] == blocks


@table.row("SetLayer(layer)")
def test_set_layer(run, cache):
    rows = [list(random_rows(1, seed=layer)) for layer in range(2)]
    with cache.batch(1) as batch:
        for layer, (k, v) in enumerate(rows):
            run(batch=batch, layer=layer, k=k, v=v)
    assert [cache.keys(layer).ravel().tolist() for layer in range(2)] == [k.ravel().tolist() for k, _ in rows]


@table.row("Put(ctx, key, value)")
def test_put(run, cache):
    k, v = random_rows(3)
    with cache.batch(3) as batch:
        for layer in range(2):
            run(batch=batch, layer=layer, k=k, v=v)
    np.testing.assert_array_equal(cache.values(1), v.swapaxes(0, 1))


@table.row("Get(ctx)")
def test_get(run, cache):
    k, v = random_rows(3)
    with cache.batch(positions=[2, 0, 1], seq_ids=[0, 0, 0]) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
        keys, values, mask = run(batch=batch, layer=1)
    np.testing.assert_array_equal(keys, k[[1, 2, 0]].astype(np.float16))
    np.testing.assert_array_equal(values, v[[1, 2, 0]].astype(np.float16))
    assert (mask == 0).tolist() == [[True, True, True], [True, False, False], [True, True, False]]


@table.row("SetCausal(ctx, CausalOptions{Except: indices})")
def test_set_causal(run, cache):
    with cache.batch(3) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
        _, _, mask = run(batch=batch, layer=0, indices=[0])
    assert (mask == 0).tolist() == [[True, True, True], [True, True, False], [True, True, True]]


@table.row("CopyPrefix(srcSeq, dstSeq, len)")
def test_copy_prefix(run, cache):
    k, _ = store(cache, 5)
    run(cache=cache, srcSeq=0, dstSeq=1, len=3)
    np.testing.assert_array_equal(cache.gather(0, seq_id=1)[0], k[:3].swapaxes(0, 1))
    with pytest.raises(ValueError, match="must differ"):
        run(cache=cache, srcSeq=0, dstSeq=0, len=3)
    assert cache.seq_len(0) == 5


@table.row("CanResume(seq, pos)")
def test_can_resume(run, cache):
    store(cache, 5)
    assert [run(cache=cache, seq=0, pos=position) for position in (0, 5, 6)] == [True, True, False]
    assert [run(cache=cache, seq=7, pos=position) for position in (0, 1)] == [True, False]


@table.row("Remove(seq, beginIndex, endIndex)")
def test_remove(run, cache):
    k, v = store(cache, 5)
    run(cache=cache, seq=0, beginIndex=1, endIndex=3)
    kept = v[[0, 3, 4]].swapaxes(0, 1)
    np.testing.assert_array_equal(cache.gather(0)[1], kept)
    np.testing.assert_allclose(
        cache.gather(0)[0], k[[0, 3, 4]].swapaxes(0, 1) + np.float32([0, -2, -2])[:, None], atol=1e-6
    )
    run(cache=cache, seq=7, beginIndex=1, endIndex=3)  # unknown


@table.row("Remove(seq, beginIndex, math.MaxInt32)")
def test_remove_the_rest(run, cache):
    store(cache, 5)
    run(cache=cache, seq=0, beginIndex=2)
    assert cache.positions().tolist() == [0, 1]


@table.row("EncoderCache.Put(ctx, key, value)")
def test_encoder_put(run):
    k, v = random_rows(5)
    with encoder_cache() as cache:
        with cache.batch(positions=[0], seq_ids=[1]) as batch:
            run(batch=batch, layer=0, k=k, v=v, seq=1)
            batch.put(1, *random_rows(1))
        np.testing.assert_array_equal(cache.gather(0, seq_id=1)[0], k.swapaxes(0, 1))


@pytest.mark.parametrize(
    "shape", [(6, 2, 8), (3, 2, 2, 8), (1, 6, 2, 8), (1, 3, 2, 2, 8), (1, 1, 3, 2, 2, 8), (6, 16), (2, 8), (2, 16)]
)
def test_encoder_rows_come_back_bit_for_bit(shape):
    k, v = (rows.reshape(shape) for rows in random_rows(math.prod(shape) // 16))
    k.flat[:4] = np.inf, -0.0, 1e-45, np.nan
    with encoder_cache() as cache, cache.batch(1) as batch:
        batch.put(0, k, v)
        batch.put(1, *random_rows(1))
        for found, put in zip(batch.dense(0, layout="THD"), (k, v), strict=False):
            assert found.tobytes() == put.tobytes()
        both = np.concatenate([v, k], axis=-1)[..., ::-1, :]  # of any strides
        batch.put(0, both[..., shape[-1] :], both[..., : shape[-1]])
        keys, values, _ = batch.dense(0, layout="THD")
        assert keys.tobytes() == k[..., ::-1, :].tobytes()
        assert values.tobytes() == v[..., ::-1, :].tobytes()


@pytest.mark.parametrize("take", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 16), (3, 2, 2, 8), (1, 3, 2, 2, 8)])
def test_encoder_rows_of_tensors(shape, take):
    torch = pytest.importorskip("torch")
    k = torch.arange(6 * 16).reshape(6, 2, 8).to(getattr(torch, take)).transpose(0, 1).contiguous().transpose(0, 1)
    with encoder_cache() as cache, cache.batch(1) as batch:
        batch.put(0, k.reshape(shape), k.reshape(shape))
        batch.put(1, *random_rows(1))
        np.testing.assert_array_equal(batch.dense(0, layout="THD")[0], k.float())


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 2, 8), (6, 2, 8)),
        ((2, 3, 2, 8), (3, 2, 2, 8)),
        ((6, 16), (6, 2, 8)),
        *((shape, shape) for shape in [(2, 3, 4, 8), (16,), (6, 17), (4, 8), (1, 1, 6, 2, 9), (2, 0, 2, 8)]),
    ],
)
def test_encoder_rows_of_shapes_that_do_not_match(shapes):
    with encoder_cache() as cache, cache.batch(1) as batch:
        with pytest.raises(ValueError, match=r"k|v"):
            batch.put(0, *(np.zeros(shape, np.float32) for shape in shapes))
        with pytest.raises((TypeError, ValueError), match=r"[kv]: an array|k and v"):
            batch.put(0, np.zeros(shapes[0], np.float32), [[1.0]])
        with pytest.raises(ValueError, match=r"axes"):  # of tokens
            batch.put(1, *(np.zeros((1, 1, 2, 8), np.float32) for _ in range(2)))
        batch.abort()


@table.row("EncoderCache.Get(ctx)")
def test_encoder_get(run):
    image = list(random_rows(5))
    with encoder_cache() as cache:
        encoder_pass(cache, image)
        with cache.batch(2) as batch:
            out = run(batch=batch, layer=0, q=np.zeros((2, 2, 8), np.float32))
            batch.put(1, *random_rows(2))
    np.testing.assert_allclose(out, np.stack([image[1].mean(0)] * 2), atol=1e-6)


@table.row("EncoderCache.EncoderCached()")
def test_encoder_cached(run):
    with encoder_cache() as cache:
        assert not run(cache=cache, seq=0, layer=0)
        encoder_pass(cache, list(random_rows(5)))
        assert run(cache=cache, seq=0, layer=0)


@table.row("EncoderCache.Remove(seq, beginIndex, endIndex)")
def test_encoder_remove(run):
    with encoder_cache() as cache:
        encoder_pass(cache, list(random_rows(5)))
        assert cache.seq_len(0, layer=0) == 5
        run(cache=cache, seq=0)
        assert cache.seq_len(0, layer=0) == 0


@table.row("EncoderCache.CopyPrefix(srcSeq, dstSeq, len)")
def test_encoder_copy_prefix(run):
    image = list(random_rows(5))
    with encoder_cache() as cache:
        encoder_pass(cache, image)
        run(cache=cache, srcSeq=0, dstSeq=1, len=1)
        cache.clear(0)
        np.testing.assert_allclose(encoder_pass(cache, seq_id=1), image[1].mean(0), atol=1e-6)


@table.row("EncoderCache.CanResume(seq, pos)")
def test_encoder_can_resume(run):
    with encoder_cache() as cache:
        for _ in range(3):
            encoder_pass(cache, list(random_rows(5)))
        assert all(run(cache=cache, seq=0, pos=position) for position in range(4))


@table.row("WrapperCache.SetLayerType(layerType)")
def test_set_layer_type(run):
    with KVCache(2, 2, 8, 16, dtype="f32", policy=[SlidingWindow(2), FullAttention()]) as cache:
        for _ in range(4):
            with cache.batch(1) as batch:
                for layer in range(2):
                    k, v = random_rows(1)
                    run(batch=batch, layer=layer, k=k, v=v)
        assert [cache.seq_len(layer=layer) for layer in range(2)] == [2, 4]


@table.row("WrapperCache.UnderlyingCache()")
def test_underlying_cache(run):
    with KVCache(2, 2, 8, 16, policy=[SlidingWindow(2), FullAttention()]) as cache:
        assert run(cache=cache, layer=1) == FullAttention()


@table.row("ErrKvCacheFull")
def test_err_full(run, cache):
    with pytest.raises(run()):
        cache.batch(17)


@table.row("ErrNotSupported")
def test_err_not_supported(run):
    with KVCache(2, 2, 8, 16) as cache:
        store(cache, 3)
        with pytest.raises(run()):
            cache.remove(0, 1)
        with pytest.raises(NotImplementedError):
            cache.remove(0, 1)
