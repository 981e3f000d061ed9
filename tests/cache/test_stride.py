"""Layers with a row for every n-th token: beside an ordinary layer, a window and index keys of the same stride."""

import copy as copying
import dataclasses

import numpy as np
import pytest

import kvcache
from kvcache import FullAttention, KVCache, Layer, NotSupportedError, SlidingWindow

N, DIM, HEADS = 4, 8, 2


def layers(rope=False, stride=N):
    """An ordinary layer, a window, a layer with a stride, and its index keys."""
    strided = Layer(HEADS, DIM, dtype="f32", policy=FullAttention(stride=stride), rope=rope)
    return [
        Layer(HEADS, DIM, dtype="f32", rope=rope),
        Layer(HEADS, DIM, dtype="f32", policy=SlidingWindow(6, resume_window=24), rope=rope),
        strided,
        dataclasses.replace(strided, num_kv_heads=1, v_head_dim=0),
    ]


def make(block_size=8, rope=False, **options):
    return KVCache(layers(rope), block_size=block_size, **{"max_sequences": None, **options})


def row(position, layer, tag=0):
    """Return the keys that a layer holds of the token at a position; its values are the negated keys."""
    rng = np.random.default_rng((position, layer, tag))
    return rng.standard_normal((HEADS, DIM)).astype(np.float32)


def rows_of(positions, layer, tag=0):
    return np.array([row(p, layer, tag) for p in positions]).reshape(-1, HEADS, DIM).astype(np.float32)


def complete(positions, stride=N):
    return [int(p) for p in positions if (p + 1) % stride == 0]


def put_all(batch, tag=0):
    positions = batch.positions
    for layer in range(4):
        k = rows_of(complete(positions) if layer > 1 else positions, layer, tag)
        if layer == 3:
            batch.put(layer, k[:, :1])
        else:
            batch.put(layer, k, -k)


def feed(cache, n, tag=0, **options):
    with cache.batch(n, **options) as batch:
        put_all(batch, tag)


def softmax_over(q, k, v, scale):
    scores = np.einsum("hd,thd->ht", q, k) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def expected(q, position, stored):
    """Attention of a query at a position over the strided rows at `stored` positions that it sees."""
    seen = [p for p in stored if p <= position]
    k = rows_of(seen, 2)
    return softmax_over(q, k, -k, DIM**-0.5) if seen else np.zeros((HEADS, DIM))


def check(cache, positions, seq_id=0):
    """The strided layers hold rows of these tokens, and only of complete blocks."""
    stored = complete(positions)
    for layer in (2, 3):
        assert cache.positions(seq_id=seq_id, layer=layer).tolist() == stored
        assert cache.seq_len(seq_id=seq_id, layer=layer) == len(stored)
        k, _ = cache.gather(layer, seq_id=seq_id)
        wanted = rows_of(stored, layer).transpose(1, 0, 2)
        np.testing.assert_array_equal(k, wanted if layer == 2 else wanted[:1])


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 40])
def test_rows_come_with_the_token_that_completes_a_block(step):
    cache = make()
    for at in range(0, 40, step):
        feed(cache, min(step, 40 - at))
        check(cache, range(min(at + step, 40)))
    assert cache.next_position() == 40
    assert (cache.first_position(layer=2), cache.last_position(layer=2)) == (3, 39)


def test_a_query_sees_the_complete_blocks():
    cache = make()
    q = np.random.default_rng(1).standard_normal((23, HEADS, DIM)).astype(np.float32)
    feed(cache, 10)
    with cache.batch(13) as batch:
        put_all(batch)
        out, lse = batch.attend(2, q[10:], return_lse=True)
        for i, p in enumerate(batch.positions):
            np.testing.assert_allclose(out[i], expected(q[10 + i], p, complete(range(23))), atol=2e-6)
        positions = batch.attend(0, q[10:]), batch.attend(1, q[10:])
        assert np.isfinite(lse).all()
        assert np.isfinite(positions).all()


def test_a_query_before_the_first_block_sees_nothing():
    cache = make()
    q = np.ones((3, HEADS, DIM), np.float32)
    with cache.batch(3) as batch:
        put_all(batch)
        out, lse = batch.attend(2, q, return_lse=True)
        assert not out.any()
        assert np.isneginf(lse).all()


def test_rows_are_put_with_queries_and_in_parts():
    cache = make()
    k = rows_of(complete(range(11)), 2)
    q = np.ones((11, HEADS, DIM), np.float32)
    with cache.batch(11) as batch:
        out = batch.attend(2, q, k, -k)
        np.testing.assert_allclose(out[10], expected(q[10], 10, [3, 7]), atol=2e-6)
        batch.put(3, rows_of([3], 3)[:, :1])
        with pytest.raises(ValueError, match="put in layer 3 before"):
            batch.put(3, rows_of([7], 3)[:, :1], first=3)
        batch.put(3, rows_of([7], 3)[:, :1], first=4)
        for layer in (0, 1):
            batch.put(layer, rows_of(range(11), layer), -rows_of(range(11), layer))
    check(cache, range(11))


def test_the_number_of_rows_must_be_right():
    cache = make()
    k = rows_of(range(3), 2)
    with cache.batch(8) as batch:
        with pytest.raises(ValueError, match="takes one for each position"):
            batch.put(2, k, k)
        with pytest.raises(ValueError, match="takes one for each position"):
            batch.attend(2, np.ones((8, HEADS, DIM), np.float32), k, k)
        for layer in (0, 1):
            batch.put(layer, rows_of(range(8), layer), rows_of(range(8), layer))
        with pytest.raises(ValueError, match="token 3 of the batch was not put in layer 2"):
            batch.commit()
        batch.abort()


def test_lock_step():
    cache = make()
    ids = [5] * 9 + [2] * 9
    k = np.stack([rows_of([3, 7], 2, 1), rows_of([3, 7], 2, 2)]).transpose(0, 2, 1, 3)
    with cache.batch(positions=[*range(9), *range(9)], seq_ids=ids) as batch:
        batch.put(2, k, -k, layout="BHTD")
        batch.put(3, k[:, :1], layout="BHTD")
        for layer in (0, 1):
            x = rows_of(range(18), layer)
            batch.put(layer, x, x)
    for seq_id, tag in ((5, 1), (2, 2)):
        np.testing.assert_array_equal(cache.gather(2, seq_id=seq_id)[0], rows_of([3, 7], 2, tag).transpose(1, 0, 2))


def test_rows_are_written_in_place():
    cache = make()
    with cache.batch(9) as batch:
        with pytest.raises(ValueError, match="token 0 of the batch, at position 0, has no row in layer 2"):
            batch.slots(2)
        k, v = batch.slots(2, first=3)
        assert k.shape == (HEADS, 2, DIM)
        k[:] = rows_of([3, 7], 2).transpose(1, 0, 2)
        v[:] = -k
        batch.written(2, 3, 6)
        batch.put(3, rows_of([3, 7], 3)[:, :1])
        for layer in (0, 1):
            batch.put(layer, rows_of(range(9), layer), rows_of(range(9), layer))
    check(cache, range(9))


@pytest.mark.parametrize("block", [1, 4, 8])
def test_choosing_names_rows_by_their_positions_or_blocks(block):
    cache = make(block_size=3)
    rng = np.random.default_rng(3)
    q = rng.standard_normal((6, 3, DIM)).astype(np.float32)
    feed(cache, 37)
    with cache.batch(6) as batch:
        put_all(batch)
        chosen = batch.choose(3, q, width=3, block=block)
        for i, p in enumerate(batch.positions):
            seen = [s for s in complete(range(43)) if s <= p]
            scores = (np.einsum("hd,td->ht", q[i], rows_of(seen, 3)[:, 0]) * DIM**-0.5).sum(axis=0)
            best = {}
            for s, score in zip(seen, scores, strict=True):
                name = s if block == 1 else s // block
                best[name] = max(score, best.get(name, -np.inf))
            wanted = sorted(sorted(best, key=lambda name: -best[name])[:3])
            assert chosen[i, 0].tolist() == wanted
        with pytest.raises(ValueError, match="multiple of the layer's stride"):
            batch.choose(3, q, width=3, block=6)


@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_chosen_entries_name_the_rows_that_stand_for_them(block):
    cache = make(block_size=3)
    feed(cache, 37)
    q = np.random.default_rng(4).standard_normal((5, HEADS, DIM)).astype(np.float32)
    with cache.batch(5) as batch:
        put_all(batch)
        entries = np.array([[0, 1, 5, 5, 9, -1, 30]] * 5, np.int32)
        for tail in (False, True):
            out = batch.attend(2, q, chosen=entries, chosen_block=block, chosen_tail=tail)
            for i, p in enumerate(batch.positions):
                named = {t for e in entries[i] if e >= 0 for t in range(e * block, (e + 1) * block)}
                if tail:
                    named |= set(range((int(p) + 1) // block * block, 100))
                stored = [s for s in complete(range(42)) if named & set(range(s - N + 1, s + 1))]
                np.testing.assert_allclose(out[i], expected(q[i], p, stored), atol=2e-6)


def test_chosen_pools_of_an_ordinary_layer():
    """Models with pooled index keys choose blocks, and attend to their tokens and to the tail."""
    cache = make()
    feed(cache, 30)
    q = np.random.default_rng(5).standard_normal((1, HEADS, DIM)).astype(np.float32)
    with cache.batch(1) as batch:
        put_all(batch)
        pools = batch.choose(3, q, width=2, block=N)
        out = batch.attend(0, q, chosen=pools, chosen_block=N, chosen_tail=True)
        seen = [p for b in pools[0, 0] for p in range(b * N, b * N + N)] + [28, 29, 30]
        k = rows_of(seen, 0)
        np.testing.assert_allclose(out[0], softmax_over(q[0], k, -k, DIM**-0.5), atol=2e-6)


def test_trees_and_masks():
    cache = make()
    feed(cache, 10)
    parents = [-1, 0, 0, 1, 2]
    positions = [10, 11, 11, 12, 12]
    q = np.random.default_rng(6).standard_normal((5, HEADS, DIM)).astype(np.float32)
    with cache.batch(positions=positions, parents=parents) as batch:
        k = np.stack([row(11, 2, 1), row(11, 2, 2)])
        batch.put(2, k, -k)
        out = batch.attend(2, q)
        stored = rows_of([3, 7], 2)
        for token, own in ((3, 0), (4, 1)):
            keys = np.concatenate([stored, k[own : own + 1]])
            np.testing.assert_allclose(out[token], softmax_over(q[token], keys, -keys, DIM**-0.5), atol=2e-6)
        out = batch.attend(2, q, masked=[(0, 4, 8)])
        np.testing.assert_allclose(out[0], softmax_over(q[0], stored[:1], -stored[:1], DIM**-0.5), atol=2e-6)
        out = batch.attend(2, q, masked=[(0, 4, 7)])  # its row stands at 7
        np.testing.assert_allclose(out[0], softmax_over(q[0], stored, -stored, DIM**-0.5), atol=2e-6)
        batch.put(3, k[:, :1])
        for layer in (0, 1):
            batch.put(layer, rows_of(positions, layer), rows_of(positions, layer))
        batch.commit([0, 2, 4])
    assert cache.positions(layer=2).tolist() == [3, 7, 11]
    np.testing.assert_array_equal(cache.gather(2)[0][:, 2], row(11, 2, 2))


def test_speculation_and_truncation_fall_out():
    cache = make()
    feed(cache, 14)
    with cache.batch(6) as batch:
        put_all(batch)
        batch.commit([0, 1, 2, 3])
    check(cache, range(18))
    for length in (18, 17, 16, 15, 11, 8, 7):
        cache.truncate(length)
        check(cache, range(length))
        assert cache.next_position() == length
    feed(cache, 9)
    check(cache, range(16))
    cache.truncate(0)
    feed(cache, 5)
    check(cache, range(5))


def test_edits_move_whole_blocks():
    theta = kvcache.Rope(tuple(10000.0 ** (-np.arange(0, DIM, 2) / DIM)))
    cache, plain = make(rope=theta), KVCache(1, HEADS, DIM, dtype="f32", rope=theta)
    feed(cache, 24)
    k = rows_of(complete(range(24)), 2)
    with plain.batch(positions=complete(range(24))) as batch:
        batch.put(0, k, -k)
    for begin, end in ((4, 6), (5, 8), (3, 7)):
        with pytest.raises(NotSupportedError, match="would cut some of its rows"):
            cache.remove(begin, end, shift=True)
        with pytest.raises(NotSupportedError, match="would cut some of its rows"):
            cache.remove(begin, end, shift=False)
    with pytest.raises(NotSupportedError, match="would cut some of its rows"):
        cache.shift(8, None, 3)
    with pytest.raises(NotSupportedError, match="divisor is 2"):
        cache.divide(0, None, 2)
    cache.divide(0, None, 1)
    assert cache.positions(layer=2).tolist() == complete(range(24))
    for edit in (
        lambda c: c.remove(4, 8, shift=True),
        lambda c: c.shift(8, None, 12),
        lambda c: c.remove(24, 28, shift=False),
        lambda c: c.shift(0, None, -4),
        lambda c: c.remove(25, None),
    ):
        edit(cache)
        edit(plain)
        assert cache.positions(layer=2).tolist() == plain.positions(layer=0).tolist()
        for a, b in zip(cache.gather(2), plain.gather(0), strict=True):
            np.testing.assert_array_equal(a, b)
    cache.settle()
    plain.settle()
    np.testing.assert_array_equal(cache.gather(2)[0], plain.gather(0)[0])
    cache.compact()
    np.testing.assert_array_equal(cache.gather(2)[0], plain.gather(0)[0])


def test_sequences_share_rows_and_go_on_apart():
    cache = make()
    feed(cache, 14)
    cache.fork(0, 1)
    cache.copy_prefix(0, 2, 11)
    cache.share_range(0, 3, 0, 13)
    for seq_id, n in ((0, 14), (1, 14), (2, 11), (3, 13)):
        check(cache, range(n), seq_id)
        feed(cache, 7, seq_ids=[seq_id] * 7)
        check(cache, range(n + 7), seq_id)
    with pytest.raises(NotSupportedError, match="begin is 6"):
        cache.share_range(0, 4, 6, 12)
    cache.share_range(0, 4, 8, 15)
    assert cache.positions(seq_id=4, layer=2).tolist() == [11]


def test_listed_positions_keep_the_rows_that_stand_there():
    cache = make()
    feed(cache, 20)
    cache.keep_positions([0, 2, 3, 7, 8, 12, 15, 17])
    assert cache.positions(layer=0).tolist() == [0, 2, 3, 7, 8, 12, 15, 17]
    assert cache.positions(layer=2).tolist() == [3, 7, 15]
    np.testing.assert_array_equal(cache.gather(2)[0], rows_of([3, 7, 15], 2).transpose(1, 0, 2))


def test_rows_are_read_and_replaced_by_position():
    cache = make()
    feed(cache, 20)
    assert cache.get(2, 6) is None
    np.testing.assert_array_equal(cache.get(2, 7)[0], row(7, 2))
    k, _ = cache.extract(2, 4, 13)
    np.testing.assert_array_equal(k, rows_of([7, 11], 2).transpose(1, 0, 2))
    new = rows_of([7, 11], 2, 9).transpose(1, 0, 2)
    assert cache.inject(2, 4, new, -new) == 2
    np.testing.assert_array_equal(cache.gather(2)[0][:, 1:3], new)
    with pytest.raises(IndexError, match="layer 2: 23 to 27"):
        cache.inject(2, 16, rows_of([19, 23, 27], 2).transpose(1, 0, 2), rows_of([19, 23, 27], 2).transpose(1, 0, 2))
    assert [p for span in cache.spans(2) for p in span.positions.tolist()] == [3, 7, 11, 15, 19]
    runs = [run for block in cache.blocks(2) for run in block.holders.get(0, [])]
    assert [(run.position, run.count) for run in runs] == [(3, 5)]


def test_dense_rows_and_weights():
    cache = make()
    feed(cache, 13)
    q = np.random.default_rng(7).standard_normal((3, HEADS, DIM)).astype(np.float32)
    weights = cache.weights(2, q, positions=[2, 8, 12])
    stored = rows_of([3, 7, 11], 2)
    assert weights.shape == (HEADS, 3)
    wanted = np.zeros((HEADS, 3))
    for i, p in enumerate([2, 8, 12]):
        n = (p + 1) // N
        scores = np.einsum("hd,thd->ht", q[i], stored[:n]) * DIM**-0.5
        wanted[:, :n] += np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True) if n else 0
    np.testing.assert_allclose(weights, wanted, atol=2e-6)
    with cache.batch(4) as batch:
        put_all(batch)
        k, _, mask = batch.dense(2)
        np.testing.assert_array_equal(k, rows_of([3, 7, 11, 15], 2).transpose(1, 0, 2))
        assert np.isfinite(mask).sum(axis=-1).tolist() == [3, 3, 4, 4]


def test_rows_are_restored():
    cache = make()
    feed(cache, 9)
    for flags, positions in (([0, 2, 3], range(14)), ([1], range(8, 14))):
        with cache.batch(positions=positions, replaced=flags) as batch:
            for layer in flags:
                k = rows_of(complete(positions) if layer > 1 else positions, layer)
                batch.put(layer, k[:, :1]) if layer == 3 else batch.put(layer, k, -k)
    check(cache, range(14))
    feed(cache, 4)
    check(cache, range(18))


@pytest.mark.parametrize("lacking", [2, 0])
def test_a_layer_that_was_not_restored_lacks_rows(lacking):
    cache = make()
    with cache.batch(positions=range(10), replaced=[lacking ^ 2] + ([3] if lacking == 0 else []) + [1]) as batch:
        for layer in [lacking ^ 2] + ([3] if lacking == 0 else []) + [1]:
            k = rows_of(complete(range(10)) if layer > 1 else range(10), layer)
            batch.put(layer, k[:, :1]) if layer == 3 else batch.put(layer, k, -k)
    with pytest.raises(kvcache.RowsGoneError):
        feed(cache, 1)


def test_limits_count_rows():
    cache = make(max_seq_len=5)
    with pytest.raises(kvcache.CacheFullError):
        feed(cache, 6)
    window = [Layer(HEADS, DIM, dtype="f32", policy=SlidingWindow(4)), layers()[2]]
    cache = KVCache(window, max_seq_len=5, block_size=4)
    for _ in range(11):
        assert cache.room() > 1
        put_both(cache, 2)
    assert cache.room() == 1
    with pytest.raises(kvcache.CacheFullError):
        put_both(cache, 2)
    put_both(cache, 1)
    assert cache.room() == 0


def put_both(cache, n):
    with cache.batch(n) as batch:
        batch.put(0, rows_of(range(n), 0), rows_of(range(n), 0))
        k = rows_of(complete(batch.positions), 2)
        batch.put(1, k, k)


def test_reserved_memory_suffices():
    cache = make(block_size=4)
    cache.reserve(64)
    before = cache.nbytes
    for n in (3, 1, 9, 20, 31):
        feed(cache, n)
    assert cache.nbytes <= before
    check(cache, range(64))


def test_unstored_sequences_have_rows_while_their_batch_is_open():
    cache = make(strategy="disabled")
    q = np.ones((11, HEADS, DIM), np.float32)
    with cache.batch(11) as batch:
        put_all(batch)
        np.testing.assert_allclose(batch.attend(2, q)[10], expected(q[10], 10, [3, 7]), atol=2e-6)
        k = rows_of([3, 7], 2)
        np.testing.assert_allclose(batch.attend(2, q)[10], expected(q[10], 10, [3, 7]), atol=2e-6)
    with cache.batch(11) as batch:
        np.testing.assert_allclose(batch.attend(2, q, k, -k)[10], expected(q[10], 10, [3, 7]), atol=2e-6)
        batch.abort()
    assert cache.next_position() == 0


def test_a_copy_has_the_rows():
    cache = make()
    feed(cache, 11)
    copy = copying.deepcopy(cache)
    feed(copy, 3)
    check(copy, range(14))
    check(cache, range(11))


def test_saved_states(tmp_path):
    cache = make()
    feed(cache, 15)
    cache.fork(0, 3)
    feed(cache, 6, seq_ids=[3] * 6)
    cache.save(tmp_path / "state")
    loaded = KVCache.load(tmp_path / "state")
    assert loaded.layers == cache.layers
    for c in (loaded, make()):
        if c is not loaded:
            c.restore(tmp_path / "state")
        check(c, range(15))
        check(c, range(21), 3)
        feed(c, 2)
        check(c, range(17))
    other = KVCache(layers(stride=2))
    with pytest.raises(
        kvcache.StateFormatError, match=r"stride=4\) in the file, and FullAttention\(stride=2\) in the cache"
    ):
        other.restore(tmp_path / "state")


def test_what_a_stride_does_not_go_with():
    with pytest.raises(NotSupportedError, match="no layer has a row for each token"):
        KVCache(layers()[2:])
    with pytest.raises(ValueError, match="stride=0"):
        FullAttention(stride=0)
    with pytest.raises(NotSupportedError, match="not each token has a row to select"):
        Layer(2, 32, dtype="f16", sketch=True, policy=FullAttention(stride=2))
    with pytest.raises(NotSupportedError, match="a block_size that is a multiple"):
        kvcache.PrefixCache(make(block_size=6), fingerprint="model")
    with pytest.raises(NotSupportedError, match="reuse_min_tokens is 16"):
        kvcache.PrefixCache(make(rope=kvcache.Rope((1.0, 0.5))), fingerprint="model", reuse_min_tokens=16)


def test_figures_and_words():
    assert repr(FullAttention()) == "FullAttention()"
    assert repr(FullAttention(stride=4)) == "FullAttention(stride=4)"
    layer = layers()[2]
    assert layer.most_bytes(1000) == layer.bytes_per_token * 250
    assert FullAttention() == FullAttention(stride=1) != FullAttention(stride=2)


def test_choices_are_those_of_a_layer_with_rows_at_these_positions():
    """An ordinary layer, to which only tokens at these positions were fed, gives the same choices and scores."""
    keys = Layer(2, DIM, v_head_dim=0, dtype="f32")
    plain = KVCache([keys], block_size=8)
    strided = dataclasses.replace(keys, policy=FullAttention(stride=N))
    cache = KVCache([Layer(1, DIM, dtype="f32"), strided], block_size=5)
    rng = np.random.default_rng(9)
    k = rng.standard_normal((50, 2, DIM)).astype(np.float32)
    with cache.batch(190) as batch:
        batch.put(0, np.zeros((190, 1, DIM), np.float32), np.zeros((190, 1, DIM), np.float32))
        batch.put(1, k[:47])
    with plain.batch(positions=complete(range(190))) as batch:
        batch.put(0, k[:47])
    positions = [191, 195, 199]
    q = rng.standard_normal((3, 4, DIM)).astype(np.float32)
    among = np.array([[3, 11, 27, 45, 190, 191, 199, -1]] * 3, np.int32)
    with cache.batch(positions=range(190, 200)) as batch, plain.batch(positions=positions) as other:
        batch.put(1, k[47:])
        other.put(0, k[47:])
        queries = np.zeros((10, 4, DIM), np.float32)
        queries[[1, 5, 9]] = q
        for options in ({}, {"relu": True, "num_choices": 2}, {"among": among}):
            own = dict(options)
            if "among" in own:
                own["among"] = np.repeat(among[:1], 10, axis=0)
                options["among"] = np.array(
                    [[3, 11, 27, 47, 191, 191, 199, -1]] * 3, np.int32
                )  # rows that stand for them
            found = batch.choose(1, queries, width=5, return_scores=True, **own)
            wanted = other.choose(0, q, width=5, return_scores=True, **options)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a[[1, 5, 9]], b)
        chosen = batch.choose(1, queries, width=5, num_first=2, num_local=2)
        for p, entries in zip(batch.positions, chosen[:, 0], strict=True):
            assert {3, 7, (p + 1) // N * N - 5, (p + 1) // N * N - 1} <= set(entries)
        batch.abort()
        other.abort()
