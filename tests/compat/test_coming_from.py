"""docs/coming-from.md: each line of its table is run as it stands there, and does what its row says."""

import ast
import re
from functools import partial

import numpy as np
import pytest
from support.coming_from import PAGE, random_rows, store

import kvcache
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

HEADS, DIM, LENGTH = 2, 8, 16
SHAPE = {"num_layers": 2, "shape": (2, HEADS, DIM), "n_ctx": LENGTH}
INV_FREQ = 100.0 ** -(np.arange(0, DIM, 2) / DIM)


def lines():
    """The lines of the page's table, by row."""
    text = re.search(r"^## llama\.cpp\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
    rows = re.findall(r"^\| (.+?) \| `([^`]+)` \| (?:.* )?\|$", text, re.M)
    assert len(rows) == len(re.findall(r"^\| ", text, re.M)) - 1, "a row is malformed"
    return {there.replace("`", ""): code for there, code in rows}


LINES, CLAIMED = lines(), []


def execute(row, **names):
    """Run a row's line with these names beside those of the shape; return its value, or what it assigns."""
    scope = {"np": np} | {name: getattr(kvcache, name) for name in kvcache.__all__} | SHAPE | names
    statements = ast.parse(LINES[row]).body
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return eval(LINES[row], scope)
    exec(LINES[row], scope)
    targets = [statement.targets[0] for statement in statements if isinstance(statement, ast.Assign)]
    return eval(ast.unparse(targets[-1]), scope) if targets else None


def rows(*claimed):
    """A test of these rows gets the line of each as its argument `run`."""
    CLAIMED.extend(claimed)
    return pytest.mark.parametrize("run", [pytest.param(partial(execute, row), id=row) for row in claimed])


def test_every_row_has_a_test():
    assert sorted(CLAIMED) == sorted(LINES)


@pytest.fixture
def cache():
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32", max_sequences=3, rope=Rope(INV_FREQ)) as cache:
        yield cache


def by_head(x):
    return x.swapaxes(0, 1)


# ---- new caches, and what is read off one

FULL = FullAttention()
NEW = {  # the names that the line uses, and attributes of the cache
    "llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: true})": (
        {"n_seq_max": 3}, {"max_sequences": 3, "capacity": LENGTH, "max_seq_len": LENGTH}),
    "llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: false})": (
        {"n_seq_max": 4}, {"max_sequences": 4, "max_seq_len": 4}),
    "llama_init_from_model(model, {n_ctx, type_k, type_v})": (
        {"shape": (2, 2, 32)}, {"k_dtype": "q8_0", "v_dtype": "q4_0"}),
    "llama_init_from_model(model, {n_ctx, swa_full: false})": (
        {"n_swa": 3}, {"policies": (SlidingWindow(3), FULL)}),
    "llama_init_from_model(model, {n_ctx, swa_full: true})": (
        {"n_swa": 3}, {"policy": SlidingWindow(3, resume_window=LENGTH)}),
    "LLAMA_SWA_TYPE_CHUNKED": ({"n_swa": 4}, {"policy": ChunkedAttention(4)}),
}  # fmt: skip


@rows(*NEW)
def test_new(run, request):
    names, expected = NEW[request.node.callspec.id]
    with run(**names) as cache:
        found = {name: getattr(cache.layers[0], name, None) or getattr(cache, name, None) for name in expected}
        if "policies" in expected:
            found["policies"] = tuple(layer.policy for layer in cache.layers)
        assert found == expected


READ = {  # of a cache with 4 tokens in sequence 0 and 3 in sequence 1
    "llama_memory_seq_pos_min(mem, seq_id)": 0,
    "llama_memory_seq_pos_max(mem, seq_id)": 2,
    "llama_memory_can_shift(mem)": True,
}


@rows(*READ)
def test_what_is_read(run, request, cache):
    store(cache, 4)
    store(cache, 3, seq_id=1)
    assert run(cache=cache, layer=1, seq_id=1) == READ[request.node.callspec.id]


def test_errors():
    assert issubclass(NotSupportedError, NotImplementedError)
    assert not issubclass(CacheFullError, MemoryError)
    with KVCache(2, HEADS, DIM, LENGTH) as cache:
        store(cache, LENGTH)
        for error, call in ((CacheFullError, lambda: cache.batch(1)), (NotSupportedError, lambda: cache.remove(0, 1))):
            with pytest.raises(error):
                call()
        assert cache.seq_len() == LENGTH


# ---- rows that go in


@rows("llama_decode(ctx, batch)")
def test_a_batch(run, cache):
    with run(cache=cache, pos=[0, 1], seq_id=[4, 4]) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(2))
    assert (cache.sequences, cache.seq_len(4)) == ([4], 2)
    with pytest.raises(CacheFullError):
        run(cache=cache, pos=range(2, 18), seq_id=[4] * 16)
    with pytest.raises(ValueError, match="position"):
        run(cache=cache, pos=[-1], seq_id=[4])
    assert cache.seq_len(4) == 2


@pytest.fixture
def encoder():
    policy = [CrossAttention(8), FullAttention()]
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32", policy=policy, max_sequences=2) as cache:
        yield cache


@rows("llama_encode(ctx, batch)")
def test_encoder_put(run, encoder):
    k, v = random_rows(5)
    with encoder.batch(positions=[0], seq_ids=[1]) as batch:
        run(batch=batch, layer=0, k=k, v=v, seq_id=1)
        batch.put(1, *random_rows(1))
    np.testing.assert_array_equal(encoder.gather(0, seq_id=1)[0], by_head(k))


# ---- rows that come out


@rows("llama_set_causal_attn(ctx, false)")
def test_set_causal_attn(run, cache):
    k, v = random_rows(3)
    with cache.batch(3) as batch:
        for layer in range(2):
            out = run(batch=batch, layer=layer, q=np.zeros_like(k), k=k, v=v)
    np.testing.assert_allclose(out, np.stack([v.mean(0)] * 3), atol=1e-6)


# ---- edits


@rows("llama_memory_clear(mem, data)")
def test_clear(run, cache):
    for seq_id in range(2):
        store(cache, 3, seq_id=seq_id)
    run(cache=cache)
    assert cache.sequences == []
    store(cache, LENGTH)


@rows("llama_memory_seq_rm(mem, seq_id, -1, -1)")
def test_clear_of_one(run, cache):
    for seq_id in range(2):
        store(cache, 3, seq_id=seq_id)
    for seq_id in (1, 7):  # one that nobody knows: nothing happens, as there
        run(cache=cache, seq_id=seq_id)
    assert cache.sequences == [0]


@rows("llama_free(ctx)")
def test_close(run, cache):
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


@rows("llama_memory_seq_cp(mem, src, dst, -1, p1)")
def test_copy_prefix(run, cache):
    k, _ = store(cache, 5)
    run(cache=cache, src=0, dst=1, p1=3)
    np.testing.assert_array_equal(cache.keys(0, seq_id=1), by_head(k[:3]))
    assert cache.stats()["live_slots"] == 5
    with pytest.raises(ValueError, match="must differ"):
        run(cache=cache, src=0, dst=0, p1=3)


@rows("llama_memory_seq_cp(mem, src, dst, -1, -1)")
def test_fork(run, cache):
    store(cache, 6)
    store(cache, 2, seq_id=1)
    run(cache=cache, src=0, dst=1)
    assert cache.positions(seq_id=1).tolist() == [0, 1, 2, 3, 4, 5]


@rows("llama_memory_seq_cp(mem, src, dst, p0, p1)")
def test_share_range(run, cache):
    store(cache, 6)
    run(cache=cache, src=0, dst=1, p0=2, p1=5)
    store(cache, 1, positions=[7], seq_id=1)
    run(cache=cache, src=0, dst=1, p0=0, p1=None)  # dst keeps what it holds
    assert cache.positions(seq_id=1).tolist() == [2, 3, 4, 7, 0, 1, 5]
    store(cache, 2)
    with pytest.raises(ValueError, match="position 7"):
        run(cache=cache, src=0, dst=1, p0=6, p1=8)


@rows("llama_memory_seq_keep(mem, seq_id)")
def test_keep(run, cache):
    for seq_id in range(3):
        store(cache, 2, seq_id=seq_id)
    run(cache=cache, seq_id=1)
    assert cache.sequences == [1]


@rows("llama_memory_seq_rm(mem, seq_id, p0, p1)", "llama_memory_seq_rm(mem, -1, p0, p1)")
def test_remove_without_moving(run, request, cache):
    for seq_id in range(2):
        store(cache, 6, seq_id=seq_id)
    run(cache=cache, seq_id=0, p0=1, p1=3)
    found = [cache.positions(seq_id=seq_id).tolist() for seq_id in range(2)]
    assert found == [[0, 3, 4, 5], [0, 3, 4, 5] if "-1" in request.node.callspec.id else [0, 1, 2, 3, 4, 5]]


def rotated(keys, by):
    """[heads, tokens, dim], each token rotated by a number of positions; element i pairs with i + dim / 2."""
    angles = np.asarray(by)[:, None] * INV_FREQ
    a, b = keys[..., : DIM // 2], keys[..., DIM // 2 :]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def check_moved(cache, k, positions, by, seq_id=0):
    assert cache.positions(seq_id=seq_id).tolist() == positions
    np.testing.assert_allclose(cache.gather(1, seq_id=seq_id)[0], rotated(by_head(k), by), atol=1e-5)


@rows("llama_memory_seq_add(mem, seq_id, p0, p1, delta)")
def test_shift(run, cache):
    k, _ = store(cache, 5)
    cache.fork(0, 1)
    run(cache=cache, seq_id=0, p0=3, p1=5, delta=4)
    check_moved(cache, k, [0, 1, 2, 7, 8], [0, 0, 0, 4, 4])
    check_moved(cache, k, [0, 1, 2, 3, 4], [0] * 5, seq_id=1)  # moved for this sequence only
    run(cache=cache, seq_id=0, p0=0, p1=None, delta=-2)
    check_moved(cache, k[2:], [0, 5, 6], [-2, 2, 2])  # what comes below 0 is dropped


@rows("llama_memory_seq_div(mem, seq_id, p0, p1, d)")
def test_divide(run, cache):
    k, _ = store(cache, 6)
    run(cache=cache, seq_id=0, p0=2, p1=None, d=2)
    check_moved(cache, k, [0, 1, 1, 1, 2, 2], [0, 0, -1, -2, -2, -3])


@rows("context shift by n_discard")
def test_context_shift(run, cache):
    k, _ = store(cache, LENGTH)
    run(cache=cache, n_keep=2, n_discard=7)
    check_moved(cache, k[[0, 1, *range(9, 16)]], list(range(9)), [0] * 2 + [-7] * 7)
    store(cache, 7)  # goes on
