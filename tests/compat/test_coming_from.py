"""docs/coming-from.md: each line of its tables is run as it stands there, and does what its row says."""

import ast
import copy
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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

SECTIONS = ["ZigLlama", "Ollama", "KvCache", "forgellm_runtime", "Edifice", "llama.cpp"]
HEADS, DIM, LENGTH = 2, 8, 16
SHAPE = dict.fromkeys(("num_layers", "n_layers", "l"), 2) | dict.fromkeys(
    ("num_kv_heads", "num_heads", "n_heads", "h"), 2
)
SHAPE |= {"head_dim": DIM, "d": DIM, "shape": (2, HEADS, DIM)}
SHAPE |= dict.fromkeys(("max_seq_len", "max_seq_length", "max_length", "capacity", "n_ctx", "n"), LENGTH)
INV_FREQ = 100.0 ** -(np.arange(0, DIM, 2) / DIM)


def lines():
    """The lines of the page, by section and row."""
    found = {}
    for section in SECTIONS:
        text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
        rows = re.findall(r"^\| (.+?) \| `([^`]+)` \| (?:.* )?\|$", text, re.M)
        found |= {f"{section}: {there.replace('`', '')}": code for there, code in rows}
        assert len(rows) == len(re.findall(r"^\| ", text, re.M)) - 1, "a row is malformed"
    return found


LINES, CLAIMED = lines(), []


def execute(row, **names):
    """Run a row's line with these names beside those of the shape; return its value, or what it assigns."""
    scope = {"copy": copy, "np": np} | {name: getattr(kvcache, name) for name in kvcache.__all__} | SHAPE | names
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


def moved(layer, keys, delta):
    """A shift function for keys that are their position."""
    return keys + np.float32(delta)


@pytest.fixture
def cache():
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32", max_sequences=3, rope=Rope(INV_FREQ)) as cache:
        yield cache


def by_head(x):
    return x.swapaxes(0, 1)


# ---- new caches, and what is read off one

FULL = FullAttention()
NEW = {  # the names that the line uses, and attributes of the cache
    "ZigLlama: ModelKVCache.init(num_layers, num_heads, head_dim, max_seq_len, strategy, allocator)": (
        {"strategy": "always"}, {"k_dtype": "f32", "strategy": "always", "max_seq_len": LENGTH}),
    "Ollama: NewSWAMemCache(windowSize, memorySize, shift)": (
        {"max_sequences": 2, "shift": moved, "windowSize": 4, "memorySize": 7},
        {"policy": SlidingWindow(5, resume_window=8), "rope": moved}),
    "Ollama: NewEncoderCache()": ({"max_len": 8}, {"policy": CrossAttention(8), "k_dtype": "f32"}),
    "Ollama: NewWrapperCache(swa, causal)": (
        {"max_sequences": 2, "swa": SlidingWindow(3), "causal": FULL}, {"policies": (SlidingWindow(3), FULL)}),
    "Ollama: Init(backend, dtype, maxSequences, capacity, maxBatch)": (
        {"dtype": "bf16", "maxSequences": 3}, {"k_dtype": "bf16", "max_sequences": 3, "max_seq_len": LENGTH}),
    "Edifice: init(batch_size: b, num_layers: l, num_heads: h, head_dim: d, max_seq_len: n)": (
        {"b": 3}, {"max_sequences": 3, "capacity": 3 * LENGTH, "k_dtype": "f32", "has_memory": 3 * LENGTH}),
    "llama.cpp: llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: true})": (
        {"n_seq_max": 3}, {"max_sequences": 3, "capacity": LENGTH, "max_seq_len": LENGTH}),
    "llama.cpp: llama_init_from_model(model, {n_ctx, n_seq_max, kv_unified: false})": (
        {"n_seq_max": 4}, {"max_sequences": 4, "max_seq_len": 4}),
    "llama.cpp: llama_init_from_model(model, {n_ctx, type_k, type_v})": (
        {"shape": (2, 2, 32)}, {"k_dtype": "q8_0", "v_dtype": "q4_0"}),
    "llama.cpp: llama_init_from_model(model, {n_ctx, swa_full: false})": (
        {"n_swa": 3}, {"policies": (SlidingWindow(3), FULL)}),
    "llama.cpp: llama_init_from_model(model, {n_ctx, swa_full: true})": (
        {"n_swa": 3}, {"policy": SlidingWindow(3, resume_window=LENGTH)}),
    "llama.cpp: LLAMA_SWA_TYPE_CHUNKED": ({"n_swa": 4}, {"policy": ChunkedAttention(4)}),
}  # fmt: skip


@rows(*NEW)
def test_new(run, request):
    names, expected = NEW[request.node.callspec.id]
    with run(**names) as cache:
        found = {name: getattr(cache.layers[0], name, None) or getattr(cache, name, None) for name in expected}
        if "policies" in expected:
            found["policies"] = tuple(layer.policy for layer in cache.layers)
        if tokens := expected.get("has_memory"):
            row = sum(layer.num_kv_heads * 2 * layer.head_dim * 4 for layer in cache.layers)
            found["has_memory"] = tokens if cache.nbytes >= tokens * row else cache.nbytes
        assert found == expected


def test_an_allocator_is_given_in_c():
    header = Path(kvcache.get_include(), "kvcache.h").read_text()
    assert "const kvc_allocator *allocator;" in re.search(r"struct kvc_config \{(.*?)\} kvc_config", header, re.S)[1]


READ = {  # of a cache with 4 tokens in sequence 0 and 3 in sequence 1
    "llama.cpp: llama_memory_seq_pos_min(mem, seq_id)": 0,
    "llama.cpp: llama_memory_seq_pos_max(mem, seq_id)": 2,
    "llama.cpp: llama_memory_can_shift(mem)": True,
    "llama.cpp: llama_state_seq_get_size(ctx, seq_id)": 2 * 2 * 3 * HEADS * DIM * 4,
}


@rows(*READ)
def test_what_is_read(run, request, cache):
    store(cache, 4)
    store(cache, 3, seq_id=1)
    assert run(cache=cache, layer=1, sequence_id=1, seq_id=1) == READ[request.node.callspec.id]


@rows("Ollama: CanResume(seq, pos)")
def test_can_resume(run, cache):
    store(cache, 5)
    assert [run(cache=cache, seq=0, pos=position) for position in (0, 5, 6)] == [True, True, False]
    assert [run(cache=cache, seq=7, pos=position) for position in (0, 1)] == [True, False]


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


@rows(
    "ZigLlama: MultiSequenceKVCache.getOrCreateSequence(sequence_id)",
    "Ollama: StartForward(ctx, batch, false)",
    "llama.cpp: llama_decode(ctx, batch)",
)
def test_a_batch(run, cache):
    names = {"cache": cache, "sequence_id": 4}
    with run(positions=[0, 1], seqs=[4, 4], pos=[0, 1], seq_id=[4, 4], **names) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(2))
    assert (cache.sequences, cache.seq_len(4)) == ([4], 2)
    with pytest.raises(CacheFullError):
        run(positions=range(2, 18), seqs=[4] * 16, pos=range(2, 18), seq_id=[4] * 16, **names)
    with pytest.raises(ValueError, match="position"):
        run(positions=[-1], seqs=[4], pos=[-1], seq_id=[4], **names)
    assert cache.seq_len(4) == 2


@rows("forgellm_runtime: append(layer, k_data, v_data)")
def test_append(run, cache):
    given = [list(random_rows(3, seed=layer)) for layer in range(2)]
    with cache.batch(3) as batch:
        for layer, (k, v) in enumerate(given):
            flat = {"k_data": k.ravel(), "v_data": v.ravel()}
            run(batch=batch, layer=layer, layer_id=layer, k=k, v=v, keys=k, values=v, **flat)
    for layer, (k, v) in enumerate(given):
        np.testing.assert_array_equal(cache.keys(layer), by_head(k))
        np.testing.assert_array_equal(cache.values(layer), by_head(v))


@rows("ZigLlama: LayerKVCache.append(key, value)")
def test_append_of_one_token(run, cache):
    k, v = random_rows(1)
    with cache.batch(1) as batch:
        for layer in range(2):
            run(batch=batch, layer=layer, key=k[0], value=v[0])
    np.testing.assert_array_equal(cache.keys(1), by_head(k))


@rows("Ollama: EncoderCache.Put(ctx, key, value)", "llama.cpp: llama_encode(ctx, batch)")
def test_encoder_put(run, encoder):
    k, v = random_rows(5)
    with encoder.batch(positions=[0], seq_ids=[1]) as batch:
        run(batch=batch, layer=0, k=k, v=v, seq=1, seq_id=1)
        batch.put(1, *random_rows(1))
    np.testing.assert_array_equal(encoder.gather(0, seq_id=1)[0], by_head(k))


@rows("Edifice: update(state, layer_idx, new_k, new_v)")
def test_update(run, cache):
    new_k, new_v = (x.reshape(3, 2, HEADS, DIM).swapaxes(1, 2) for x in random_rows(6))  # 3 sequences in lock step
    with cache.batch(positions=[0, 1] * 3, seq_ids=np.repeat(range(3), 2)) as batch:
        for layer in range(2):
            run(batch=batch, layer_idx=layer, new_k=new_k, new_v=new_v)
    for seq_id in range(3):
        np.testing.assert_array_equal(cache.gather(1, seq_id=seq_id), [new_k[seq_id], new_v[seq_id]])


@rows("KvCache: store_key(layer, head, pos, key)")
def test_store_head_by_head(run, cache):
    k, v = random_rows(1)
    with cache.batch(1) as batch:
        for layer in range(2):
            for slots, rows in zip(batch.slots(layer), (k, v), strict=True):
                slots[:, 0] = rows[0]
            for head in (1, 0):  # in any order
                run(batch=batch, layer=layer, head=head, key=-k[0, head])
            batch.written(layer, 0, 1)
    for layer in range(2):
        np.testing.assert_array_equal(cache.keys(layer)[:, 0], -k[0])
        np.testing.assert_array_equal(cache.values(layer)[:, 0], v[0])


@rows("KvCache: store_key(layer, head, pos, key), of a pos below seq_len")
def test_store_key_again(run, cache):
    k, v = store(cache, 5)
    key = np.arange(DIM, dtype=np.float32)
    run(cache=cache, layer=1, head=1, pos=3, key=key)
    np.testing.assert_array_equal(cache.keys(0), by_head(k))
    k[3, 1] = key
    np.testing.assert_array_equal(cache.keys(1), by_head(k))
    np.testing.assert_array_equal(cache.values(1), by_head(v))


@rows("KvCache: inject_block(layer, start_pos, block_size, keys, values)")
def test_inject_block(run, cache):
    k, v = store(cache, 6)
    keys, values = (by_head(x) for x in random_rows(4, seed=1))
    flat = {"keys": keys.ravel(), "values": values.ravel()}
    assert run(cache=cache, layer=1, start_pos=4, **flat) == 2
    np.testing.assert_array_equal(cache.keys(1), np.concatenate([by_head(k)[:, :4], keys[:, :2]], 1))
    np.testing.assert_array_equal(cache.values(1)[:, 4:], values[:, :2])
    np.testing.assert_array_equal(cache.values(0), by_head(v))  # the other layer is as it was
    assert run(cache=cache, layer=1, start_pos=14, **flat) == 0  # past max_seq_len, too


@rows("KvCache: inject_block(layer, 0, n, keys, values) in each layer, then set_seq_len(n)")
def test_inject_blocks_into_a_fresh_cache(run, cache):
    k, _ = store(cache, 8)
    blocks = [[x.ravel() for x in cache.extract(layer, 0, 4)] for layer in range(2)]  # flat, as there
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32") as fresh:
        run(cache=fresh, n=4, blocks=blocks)
        assert fresh.seq_len() == 4
        store(fresh, 10)
        run(cache=fresh, n=4, blocks=blocks)
        assert fresh.seq_len() == LENGTH
        np.testing.assert_array_equal(fresh.keys(1)[:, :4], by_head(k[:4]))
        np.testing.assert_array_equal(fresh.keys(1)[:, 14:], by_head(k[:2]))  # the others lie past max_seq_len


@rows("Ollama: StartForward(ctx, batch, true)")
def test_reserve(run, cache):
    before = cache.nbytes
    run(cache=cache, num_tokens=LENGTH)
    assert cache.nbytes > before
    assert cache.sequences == []


# ---- rows that come out


@rows("KvCache: keys_for(layer, head, seq_len)")
def test_keys_for(run, cache):
    k, _ = store(cache, 5)
    keys = run(cache=cache, layer=1, head=1, seq_len=4)
    np.testing.assert_array_equal(keys, k[:4, 1])
    assert keys.flags.c_contiguous  # one slice of seq_len x head_dim


@rows("forgellm_runtime: k(layer)")
def test_k(run, cache):
    k, _ = store(cache, 3)
    assert run(cache=cache, layer=0).tolist() == k.ravel().tolist()


@pytest.fixture
def running(cache):
    """An open batch of a token behind 3 others, and all keys of a layer, [tokens, heads, dim]."""
    k, _ = store(cache, 3)
    more, v = random_rows(1, seed=1)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, more, v)
        yield SimpleNamespace(batch=batch, k=np.concatenate([k, more]), v=v)


@rows("KvCache: keys_for(layer, head, seq_len + 1), before advance()")
def test_keys_with_the_running_token(run, running):
    keys = run(batch=running.batch, layer=1, head=1)
    np.testing.assert_array_equal(keys, running.k[:, 1])
    assert keys.flags.c_contiguous
    assert not keys.flags.owndata


@rows("ZigLlama: LayerKVCache.get(position)")
def test_get(run, cache):
    k, v = store(cache, 3)
    key, value = run(cache=cache, layer=1, position=2)
    np.testing.assert_array_equal(key, k[2])
    np.testing.assert_array_equal(value, v[2])
    assert cache.get(1, 3) is None


@rows(
    "ZigLlama: KVCacheEntry.get(start_pos, length)",
    "KvCache: extract_block(layer, start_pos, block_size)",
)
def test_extract(run, cache):
    k, v = store(cache, 6)
    names = {"layer": 1, "layer_id": 1, "sequence_id": 0, "length": 4, "block_size": 4}
    for found, rows in zip(run(cache=cache, start_pos=4, **names), (k, v), strict=True):
        assert found.shape == (HEADS, 4, DIM)
        np.testing.assert_array_equal(found[:, :2], by_head(rows[4:]))
        assert not found[:, 2:].any()
    assert not any(x.any() for x in run(cache=cache, start_pos=14, **names))  # past max_seq_len, too


@rows("ZigLlama: SlidingWindowKVCache.getWithWindow(sequence_id, layer_id, position)")
def test_get_with_window(run):
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32", policy=SlidingWindow(4)) as cache:
        k, v = store(cache, 6)
        keys, values = run(cache=cache, layer_id=0, sequence_id=0)
        np.testing.assert_array_equal(keys, by_head(k[2:]))
        np.testing.assert_array_equal(values, by_head(v[2:]))


@rows("Ollama: Get(ctx)")
def test_dense(run, cache):
    k, v = random_rows(3)
    with cache.batch(positions=[2, 0, 1], seq_ids=[0, 0, 0]) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
        *found, mask = run(batch=batch, layer=1)
    for x, rows in zip(found, (k, v), strict=True):
        np.testing.assert_array_equal(x, rows[[1, 2, 0]].astype(x.dtype))
    assert (mask == 0).tolist() == [[True, True, True], [True, False, False], [True, True, False]]


@rows("Ollama: SetCausal(ctx, CausalOptions{Except: indices})")
def test_set_causal(run, cache):
    with cache.batch(3) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
        _, _, mask = run(batch=batch, layer=0, indices=[0])
    assert (mask == 0).tolist() == [[True, True, True], [True, True, False], [True, True, True]]


@rows("llama.cpp: llama_set_causal_attn(ctx, false)")
def test_set_causal_attn(run, cache):
    k, v = random_rows(3)
    with cache.batch(3) as batch:
        for layer in range(2):
            out = run(batch=batch, layer=layer, q=np.zeros_like(k), k=k, v=v)
    np.testing.assert_allclose(out, np.stack([v.mean(0)] * 3), atol=1e-6)


@rows("Edifice: build_cached_attention(num_heads: h, head_dim: d, layer_idx: i)")
def test_cached_attention(run, cache):
    """Over all rows, as Edifice's: what is stored, and every new token."""
    _, v = store(cache, 4)
    new_k, new_v = (by_head(x)[None] for x in random_rows(3, seed=8))
    with cache.batch(3) as batch:
        outs = [run(i=layer)(batch, np.zeros_like(new_k), new_k, new_v) for layer in range(2)]
    for out in outs:  # [batch, heads, tokens, dim]; such queries weigh all alike
        mean = np.concatenate([by_head(v), new_v[0]], 1).mean(1, keepdims=True)
        np.testing.assert_allclose(out[0], np.repeat(mean, 3, 1), atol=1e-5)


# ---- rows of encoders


@pytest.fixture
def encoder():
    policy = [CrossAttention(8), FullAttention()]
    with KVCache(2, HEADS, DIM, LENGTH, dtype="f32", policy=policy, max_sequences=2) as cache:
        yield cache


# ---- edits


@rows("llama.cpp: llama_memory_clear(mem, data)")
def test_clear(run, cache):
    for seq_id in range(2):
        store(cache, 3, seq_id=seq_id)
    run(cache=cache)
    assert cache.sequences == []
    store(cache, LENGTH)


@rows("llama.cpp: llama_memory_seq_rm(mem, seq_id, -1, -1)")
def test_clear_of_one(run, cache):
    for seq_id in range(2):
        store(cache, 3, seq_id=seq_id)
    for seq_id in (1, 7):  # one that nobody knows: nothing happens, as there
        run(cache=cache, sequence_id=seq_id, seq_id=seq_id)
    assert cache.sequences == [0]


@rows("llama.cpp: llama_free(ctx)")
def test_close(run, cache):
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


@rows("forgellm_runtime: clone()")
def test_clone(run, cache):
    k, _ = store(cache, 3)
    with run(cache=cache) as clone:
        store(cache, 2, seed=1)
        np.testing.assert_array_equal(clone.keys(0), by_head(k))
        clone.clear()
    assert cache.seq_len() == 5


@rows("llama.cpp: llama_memory_seq_cp(mem, src, dst, -1, p1)")
def test_copy_prefix(run, cache):
    k, _ = store(cache, 5)
    run(cache=cache, srcSeq=0, dstSeq=1, len=3, src=0, dst=1, p1=3)
    np.testing.assert_array_equal(cache.keys(0, seq_id=1), by_head(k[:3]))
    assert cache.stats()["live_slots"] == 5
    with pytest.raises(ValueError, match="must differ"):
        run(cache=cache, srcSeq=0, dstSeq=0, len=3, src=0, dst=0, p1=3)


@rows("llama.cpp: llama_memory_seq_cp(mem, src, dst, -1, -1)")
def test_fork(run, cache):
    store(cache, 6)
    store(cache, 2, seq_id=1)
    run(cache=cache, src=0, dst=1)
    assert cache.positions(seq_id=1).tolist() == [0, 1, 2, 3, 4, 5]


@rows("llama.cpp: llama_memory_seq_cp(mem, src, dst, p0, p1)")
def test_share_range(run, cache):
    store(cache, 6)
    run(cache=cache, src=0, dst=1, p0=2, p1=5)
    store(cache, 1, positions=[7], seq_id=1)
    run(cache=cache, src=0, dst=1, p0=0, p1=None)  # dst keeps what it holds
    assert cache.positions(seq_id=1).tolist() == [2, 3, 4, 7, 0, 1, 5]
    store(cache, 2)
    with pytest.raises(ValueError, match="position 7"):
        run(cache=cache, src=0, dst=1, p0=6, p1=8)


@rows("llama.cpp: llama_memory_seq_keep(mem, seq_id)")
def test_keep(run, cache):
    for seq_id in range(3):
        store(cache, 2, seq_id=seq_id)
    run(cache=cache, seq_id=1)
    assert cache.sequences == [1]


@rows("llama.cpp: llama_memory_seq_rm(mem, seq_id, p0, p1)", "llama.cpp: llama_memory_seq_rm(mem, -1, p0, p1)")
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


@rows("llama.cpp: llama_memory_seq_add(mem, seq_id, p0, p1, delta)")
def test_shift(run, cache):
    k, _ = store(cache, 5)
    cache.fork(0, 1)
    run(cache=cache, seq_id=0, p0=3, p1=5, delta=4)
    check_moved(cache, k, [0, 1, 2, 7, 8], [0, 0, 0, 4, 4])
    check_moved(cache, k, [0, 1, 2, 3, 4], [0] * 5, seq_id=1)  # moved for this sequence only
    run(cache=cache, seq_id=0, p0=0, p1=None, delta=-2)
    check_moved(cache, k[2:], [0, 5, 6], [-2, 2, 2])  # what comes below 0 is dropped


@rows("llama.cpp: llama_memory_seq_div(mem, seq_id, p0, p1, d)")
def test_divide(run, cache):
    k, _ = store(cache, 6)
    run(cache=cache, seq_id=0, p0=2, p1=None, d=2)
    check_moved(cache, k, [0, 1, 1, 1, 2, 2], [0, 0, -1, -2, -2, -3])


@rows("llama.cpp: context shift by n_discard")
def test_context_shift(run, cache):
    k, _ = store(cache, LENGTH)
    run(cache=cache, n_keep=2, n_discard=7)
    check_moved(cache, k[[0, 1, *range(9, 16)]], list(range(9)), [0] * 2 + [-7] * 7)
    store(cache, 7)  # goes on


@rows("llama.cpp: K-shift")
def test_settle(run, cache):
    k, _ = store(cache, 6)
    cache.fork(0, 1)
    cache.remove(1, 3)
    assert {span.delta for span in cache.spans(0)} == {0, -2}
    run(cache=cache)
    assert {span.delta for span in cache.spans(0)} == {0}
    check_moved(cache, k[[0, 3, 4, 5]], [0, 1, 2, 3], [0, -2, -2, -2])


# ---- state

GET_DATA = "llama.cpp: llama_state_seq_get_data(ctx, dst, size, seq_id)"
SAVE_FILE = "llama.cpp: llama_state_seq_save_file(ctx, filepath, seq_id, tokens, n_token_count)"


@rows(GET_DATA)
def test_state_get(run, cache):
    k, v = store(cache, 5, seq_id=2)
    positions, found = run(cache=cache, seq_id=2)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    for keys, values in found:
        np.testing.assert_array_equal(keys.view(np.float32), by_head(k))
        np.testing.assert_array_equal(values.view(np.float32), by_head(v))


@rows("llama.cpp: llama_state_seq_set_data(ctx, src, size, dest_seq_id)")
def test_state_set(run, cache):
    store(cache, 5)
    positions, rows = execute(GET_DATA, cache=cache, seq_id=0)
    run(cache=cache, positions=positions, rows=rows, dest_seq_id=1)
    for layer in range(2):
        np.testing.assert_array_equal(cache.gather(layer), cache.gather(layer, seq_id=1))


@rows(SAVE_FILE)
def test_state_save(run, cache, tmp_path):
    store(cache, 5)
    run(cache=cache, seq_id=0, filepath=tmp_path / "state.npz")
    with np.load(tmp_path / "state.npz") as arrays:
        assert [x.shape for x in arrays.values()] == [(5,)] + [(HEADS, 5, DIM * 4)] * 4


@rows("llama.cpp: llama_state_seq_load_file(ctx, filepath, dest_seq_id, ...)")
def test_state_load(run, cache, tmp_path):
    store(cache, 5)
    execute(SAVE_FILE, cache=cache, seq_id=0, filepath=tmp_path / "state.npz")
    positions, *found = run(filepath=tmp_path / "state.npz")
    assert positions.tolist() == [0, 1, 2, 3, 4]
    for x, y in zip(found, [*cache.gather(0), *cache.gather(1)], strict=True):
        np.testing.assert_array_equal(x.view(np.float32), y)
