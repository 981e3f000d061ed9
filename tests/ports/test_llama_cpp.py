"""llama.cpp's memory: every row of its table, and how positions, windows and copies behave."""

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

from kvcache import (
    CacheFullError,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KVCache,
    NotSupportedError,
    Rope,
    SlidingWindow,
)

table = Table("llama.cpp")
test_every_row_has_a_test = table.all_claimed()

MODEL = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "n_ctx": 16}
INV_FREQ = 100.0 ** -(np.arange(0, 8, 2) / 8)


@pytest.fixture
def cache():
    with KVCache(2, 2, 8, 16, dtype="f32", max_sequences=3, rope=Rope(INV_FREQ)) as cache:
        yield cache


def rotated(keys, by):
    """[heads, tokens, dim], each token rotated by a number of positions; element i pairs with i + dim / 2."""
    angles = np.asarray(by)[:, None] * INV_FREQ
    a, b = keys[..., :4], keys[..., 4:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def check_keys(cache, rows, by, seq_id=0):
    """The stored keys are these rows, [tokens, heads, dim], rotated."""
    keys = cache.gather(1, seq_id=seq_id)[0]
    np.testing.assert_allclose(keys, rotated(rows.swapaxes(0, 1), by), atol=1e-5)


# --- sequences ---------------------------------------------------------------------------------------------------


@table.row("llama_memory_clear(mem, data)")
def test_clear(run, cache):
    store(cache, 3)
    store(cache, 3, seq_id=1)
    run(cache=cache)
    assert cache.sequences == []


@table.row("llama_memory_seq_rm(mem, seq_id, p0, p1)")
def test_seq_rm(run, cache):
    store(cache, 6)
    run(cache=cache, seq_id=0, p0=1, p1=3)
    assert cache.positions().tolist() == [0, 3, 4, 5]
    run(cache=cache, seq_id=0, p0=4, p1=None)
    assert cache.positions().tolist() == [0, 3]


@table.row("llama_memory_seq_rm(mem, -1, p0, p1)")
def test_seq_rm_any(run, cache):
    for seq_id in range(2):
        store(cache, 6, seq_id=seq_id)
    run(cache=cache, p0=2, p1=5)
    assert [cache.positions(seq_id=seq_id).tolist() for seq_id in range(2)] == [[0, 1, 5]] * 2


@table.row("llama_memory_seq_rm(mem, seq_id, -1, -1)")
def test_seq_rm_all(run, cache):
    for seq_id in range(2):
        store(cache, 6, seq_id=seq_id)
    run(cache=cache, seq_id=1)
    assert cache.sequences == [0]


@table.row("llama_memory_seq_cp(mem, src, dst, -1, p1)")
def test_seq_cp_prefix(run, cache):
    k, _ = store(cache, 6)
    run(cache=cache, src=0, dst=1, p1=4)
    check_keys(cache, k[:4], [0] * 4, seq_id=1)
    assert cache.stats()["live_slots"] == 6


@table.row("llama_memory_seq_cp(mem, src, dst, -1, -1)")
def test_seq_cp_all(run, cache):
    store(cache, 6)
    store(cache, 2, seq_id=1)
    run(cache=cache, src=0, dst=1)
    assert cache.positions(seq_id=1).tolist() == [0, 1, 2, 3, 4, 5]


@table.row("llama_memory_seq_cp(mem, src, dst, p0, p1)")
def test_seq_cp_range(run, cache):
    store(cache, 6)
    run(cache=cache, src=0, dst=1, p0=2, p1=5)
    assert cache.positions(seq_id=1).tolist() == [2, 3, 4]
    assert cache.seq_len(0) == 6
    store(cache, 1, positions=[7], seq_id=1)
    run(cache=cache, src=0, dst=1, p0=0, p1=None)  # dst keeps what it holds
    assert cache.positions(seq_id=1).tolist() == [2, 3, 4, 7, 0, 1, 5]
    store(cache, 2)
    with pytest.raises(ValueError, match="position 7"):
        run(cache=cache, src=0, dst=1, p0=6, p1=8)


@table.row("llama_memory_seq_keep(mem, seq_id)")
def test_seq_keep(run, cache):
    for seq_id in range(3):
        store(cache, 2, seq_id=seq_id)
    run(cache=cache, seq_id=1)
    assert cache.sequences == [1]


@table.row("llama_memory_seq_add(mem, seq_id, p0, p1, delta)")
def test_seq_add(run, cache):
    k, _ = store(cache, 5)
    cache.fork(0, 1)
    run(cache=cache, seq_id=0, p0=3, p1=5, delta=4)
    assert cache.positions().tolist() == [0, 1, 2, 7, 8]
    check_keys(cache, k, [0, 0, 0, 4, 4])
    check_keys(cache, k, [0] * 5, seq_id=1)  # moved for this sequence only
    run(cache=cache, seq_id=0, p0=0, p1=None, delta=-2)
    assert cache.positions().tolist() == [0, 5, 6]  # what comes below 0 is dropped
    check_keys(cache, k[2:], [-2, 2, 2])


@table.row("llama_memory_seq_div(mem, seq_id, p0, p1, d)")
def test_seq_div(run, cache):
    k, _ = store(cache, 6)
    run(cache=cache, seq_id=0, p0=2, p1=None, d=2)
    assert cache.positions().tolist() == [0, 1, 1, 1, 2, 2]
    check_keys(cache, k, [0, 0, -1, -2, -2, -3])


@table.row("llama_memory_seq_pos_min(mem, seq_id)")
def test_seq_pos_min(run, cache):
    store(cache, 3, positions=[4, 5, 6], seq_id=1)
    assert [run(cache=cache, seq_id=seq_id) for seq_id in (0, 1)] == [-1, 4]
    with KVCache(2, 2, 8, 16, policy=[SlidingWindow(2), FullAttention()]) as mixed:
        for _ in range(5):
            store(mixed, 1)
        assert run(cache=mixed, seq_id=0) == 0
        assert mixed.first_position(layer=0) == 3


@table.row("llama_memory_seq_pos_max(mem, seq_id)")
def test_seq_pos_max(run, cache):
    store(cache, 3, positions=[4, 5, 6], seq_id=1)
    assert [run(cache=cache, seq_id=seq_id) for seq_id in (0, 1)] == [-1, 6]


@table.row("llama_memory_can_shift(mem)")
def test_can_shift(run, cache):
    assert run(cache=cache) is True
    store(cache, 3)
    cache.shift(0, None, 1)
    with KVCache(2, 2, 8, 16) as untold:
        assert run(cache=untold) is False
        store(untold, 3)
        with pytest.raises(NotSupportedError):
            untold.shift(0, None, 1)
        assert untold.positions().tolist() == [0, 1, 2]


# --- contexts ----------------------------------------------------------------------------------------------------


@table.row("llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: true})")
def test_unified(run):
    with run(**MODEL, n_seq_max=3) as cache:
        store(cache, 10)
        cache.fork(0, 1)  # shares all ten
        store(cache, 3, seq_id=1)
        store(cache, 3, seq_id=2)
        with pytest.raises(CacheFullError, match="capacity"):
            cache.batch(positions=[3], seq_ids=[2])


@table.row("llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: false})")
def test_separate(run):
    with run(**MODEL, n_seq_max=4) as cache:
        for seq_id in range(4):
            store(cache, 4, seq_id=seq_id)
        with pytest.raises(CacheFullError):
            cache.batch(1)


@table.row("llama_init_from_model(model, {n_ctx, type_k, type_v})")
def test_types(run):
    with run(num_layers=2, num_kv_heads=2, head_dim=32, n_ctx=16) as cache:
        k, v = store(cache, 4)
        keys, values = cache.gather(0)
        np.testing.assert_allclose(keys, k.swapaxes(0, 1), atol=0.02)
        np.testing.assert_allclose(values, v.swapaxes(0, 1), atol=0.35)
        assert (cache.layers[0].k_dtype, cache.layers[0].v_dtype) == ("q8_0", "q4_0")


@table.row("llama_init_from_model(model, {n_ctx, swa_full: false})")
def test_swa(run):
    with run(**MODEL | {"num_layers": 3}, n_swa=3) as cache:
        for _ in range(8):
            store(cache, 1)
        assert [cache.positions(layer=layer).tolist() for layer in range(2)] == [[5, 6, 7], list(range(8))]
        assert tuple(layer.policy for layer in cache.layers) == (SlidingWindow(3), FullAttention(), SlidingWindow(3))


@table.row("llama_init_from_model(model, {n_ctx, swa_full: true})")
def test_swa_full(run):
    with run(**MODEL, n_swa=3) as cache:
        for _ in range(16):
            store(cache, 1)
        assert cache.can_resume(0)
        cache.truncate(4)
        with cache.batch(1) as batch:
            for layer in range(2):
                batch.put(layer, *random_rows(1))
            assert (batch.dense(0)[2] == 0).tolist() == [[False, False, True, True, True]]


@table.row("LLAMA_SWA_TYPE_CHUNKED")
def test_chunked(run):
    with run(**MODEL, n_swa=4) as cache:
        assert tuple(layer.policy for layer in cache.layers) == (ChunkedAttention(4),) * 2
        store(cache, 6)
        store(cache, 1)
        assert cache.positions().tolist() == [4, 5, 6]


@table.row("llama_free(ctx)")
def test_free(run, cache):
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


# --- decoding ----------------------------------------------------------------------------------------------------


@table.row("llama_decode(ctx, batch)")
def test_decode(run, cache):
    with run(cache=cache, pos=[0, 1, 0], seq_id=[0, 0, 1]) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
    assert (cache.seq_len(0), cache.seq_len(1)) == (2, 1)
    with pytest.raises(CacheFullError):
        run(cache=cache, pos=range(2, 18), seq_id=[0] * 16)
    with pytest.raises(ValueError, match="position"):
        run(cache=cache, pos=[-1], seq_id=[0])
    assert (cache.seq_len(0), cache.seq_len(1)) == (2, 1)


@table.row("llama_encode(ctx, batch)")
def test_encode(run):
    k, v = random_rows(5)
    with KVCache(2, 2, 8, 16, dtype="f32", policy=[CrossAttention(8), FullAttention()]) as cache:
        with cache.batch(1) as batch:
            run(batch=batch, layer=0, k=k, v=v, seq_id=0)
            batch.put(1, *random_rows(1))
        np.testing.assert_array_equal(cache.gather(0)[0], k.swapaxes(0, 1))


@table.row("llama_set_causal_attn(ctx, false)")
def test_set_causal_attn(run, cache):
    k, v = random_rows(3)
    with cache.batch(3) as batch:
        for layer in range(2):
            out = run(batch=batch, layer=layer, q=np.zeros_like(k), k=k, v=v)
    np.testing.assert_allclose(out, np.stack([v.mean(0)] * 3), atol=1e-6)


# --- state -------------------------------------------------------------------------------------------------------


@table.row("llama_state_seq_get_size(ctx, seq_id)")
def test_state_size(run, cache):
    store(cache, 5, seq_id=2)
    assert run(cache=cache, seq_id=2) == 2 * 2 * 5 * 2 * 8 * 4


@table.row("llama_state_seq_get_data(ctx, dst, size, seq_id)")
def test_state_get(run, cache):
    k, v = store(cache, 5, seq_id=2)
    positions, rows = run(cache=cache, seq_id=2)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    for keys, values in rows:
        np.testing.assert_array_equal(keys.view(np.float32), k.swapaxes(0, 1))
        np.testing.assert_array_equal(values.view(np.float32), v.swapaxes(0, 1))


@table.row("llama_state_seq_set_data(ctx, src, size, dest_seq_id)")
def test_state_set(run, cache):
    store(cache, 5)
    positions, rows = table.rows["llama_state_seq_get_data(ctx, dst, size, seq_id)"](cache=cache, seq_id=0)
    run(cache=cache, positions=positions, rows=rows, dest_seq_id=1)
    for layer in range(2):
        for ours, theirs in zip(cache.gather(layer), cache.gather(layer, seq_id=1), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@table.row("llama_state_seq_save_file(ctx, filepath, seq_id, tokens, n_token_count)")
def test_state_save(run, cache, tmp_path):
    store(cache, 5)
    run(cache=cache, seq_id=0, filepath=tmp_path / "state.npz")
    with np.load(tmp_path / "state.npz") as arrays:
        assert [x.shape for x in arrays.values()] == [(5,)] + [(2, 5, 8 * 4)] * 4


@table.row("llama_state_seq_load_file(ctx, filepath, dest_seq_id, ...)")
def test_state_load(run, cache, tmp_path):
    path = tmp_path / "state.npz"
    store(cache, 5)
    table.rows["llama_state_seq_save_file(ctx, filepath, seq_id, tokens, n_token_count)"](
        cache=cache, seq_id=0, filepath=path
    )
    positions, *rows = run(filepath=path)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    for x, y in zip(rows, [*cache.gather(0), *cache.gather(1)], strict=True):
        np.testing.assert_array_equal(x.view(np.float32), y)


# --- shifting ----------------------------------------------------------------------------------------------------


@table.row("context shift by n_discard")
def test_context_shift(run, cache):
    k, _ = store(cache, 16)
    run(cache=cache, n_keep=2, n_discard=7)
    assert cache.positions().tolist() == list(range(9))
    check_keys(cache, k[[0, 1, *range(9, 16)]], [0] * 2 + [-7] * 7)
    store(cache, 7)  # goes on


@table.row("K-shift")
def test_k_shift(run, cache):
    k, _ = store(cache, 6)
    cache.fork(0, 1)
    cache.remove(1, 3)
    assert {span.delta for span in cache.spans(0)} == {0, -2}
    run(cache=cache)
    assert {span.delta for span in cache.spans(0)} == {0}
    check_keys(cache, k[[0, 3, 4, 5]], [0, -2, -2, -2])
    check_keys(cache, k, [0] * 6, seq_id=1)
