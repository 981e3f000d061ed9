"""The oracle of support/oracle.py gives known answers, so that it is worth comparing with."""

import numpy as np
import pytest
from support.oracle import (
    CacheBusyError,
    CacheFullError,
    ChunkedAttention,
    FullAttention,
    KVCache,
    NotSupportedError,
    RowsGoneError,
    SlidingWindow,
)


def feed(cache, n, seq_id=0, start=None):
    start = cache.next_position(seq_id) if start is None else start
    x = np.arange(start, start + n, dtype=float)[:, None, None]
    with cache.batch(positions=range(start, start + n), seq_ids=[seq_id] * n) as batch:
        for layer in range(len(cache.policy)):
            batch.put(layer, x, x)


def mask_of(batch):
    return [int((row == 0).sum()) for row in batch.dense(0)[2]]


def test_a_window_keeps_sinks_and_says_when_rows_are_gone():
    cache = KVCache(1, 1, 1, None, policy=SlidingWindow(4, num_sink_tokens=1))
    for _ in range(10):
        feed(cache, 1)
    assert cache.positions() == [0, 6, 7, 8, 9]
    assert cache.lost[0][0] == (1, 6)
    assert [cache.can_resume(p) for p in (8, 9, 10, 11)] == [False, True, True, False]
    for length in (2, 5, 8):
        with pytest.raises(RowsGoneError):
            cache.truncate(length)
    assert cache.next_position() == 10
    cache.truncate(9)
    assert cache.next_position() == 9
    cache.truncate(1)  # to the sink, of which nothing was lost
    feed(cache, 1)
    assert cache.positions() == [0, 1]


def test_where_a_chunk_begins_a_sequence_goes_on_without_a_row():
    cache = KVCache(1, 1, 1, None, policy=ChunkedAttention(4))
    for _ in range(10):
        feed(cache, 1)
    with pytest.raises(RowsGoneError):
        cache.truncate(7)
    cache.truncate(8)
    assert (cache.positions(), cache.next_position()) == ([], 8)
    feed(cache, 1)
    assert cache.positions() == [8]


def test_resume_window_keeps_more():
    cache = KVCache(1, 1, 1, None, policy=SlidingWindow(4, resume_window=6))
    for _ in range(10):
        feed(cache, 1)
    assert cache.positions() == [4, 5, 6, 7, 8, 9]
    cache.truncate(8)
    feed(cache, 1)


def test_a_layer_that_lost_its_rows_still_says_so():
    """Here another layer still holds the sequence, so that it could go on there, and would see less than it should."""
    cache = KVCache(2, 1, 1, None, policy=[FullAttention(), SlidingWindow(4)], max_sequences=3)
    for _ in range(10):
        feed(cache, 1)
    for cut in (lambda: cache.copy_prefix(0, 1, 5), lambda: cache.truncate(5), lambda: cache.remove(5)):
        with pytest.raises(RowsGoneError):
            cut()
    assert (cache.sequences, cache.next_position(), cache.seq_len(layer=1)) == ([0], 10, 4)
    assert not cache.can_resume(5)
    with pytest.raises(RowsGoneError):
        feed(cache, 1, start=5)
    cache.truncate(0)
    assert cache.can_resume(0)
    feed(cache, 3)


def test_a_fork_has_lost_what_its_source_has():
    cache = KVCache(1, 1, 1, None, policy=SlidingWindow(4, num_sink_tokens=1), max_sequences=2)
    for _ in range(10):
        feed(cache, 1)
    cache.fork(0, 1)
    for seq_id in range(2):
        assert cache.positions(seq_id=seq_id) == [0, 6, 7, 8, 9]
        with pytest.raises(RowsGoneError):
            cache.truncate(6, seq_id=seq_id)
        assert [cache.misses(p, seq_id) for p in (1, 8, 9)] == [True, True, False]


def test_a_range_is_shared_behind_what_there_is():
    cache = KVCache(2, 1, 1, None, policy=[FullAttention(), SlidingWindow(4)], max_sequences=4)
    for _ in range(10):
        feed(cache, 1)
    feed(cache, 2, seq_id=1, start=20)
    cache.share_range(0, 1, 4, 8)
    assert (cache.positions(seq_id=1), cache.positions(seq_id=1, layer=1)) == ([20, 21, 4, 5, 6, 7], [20, 21, 7])
    assert cache.lost_at(1, 1) == (4, 7)
    assert [cache.can_resume(p, seq_id=1) for p in (9, 10, 22)] == [False, True, True]
    assert cache.live(0) == 12
    cache.share_range(0, 1, 4, 8)
    assert cache.seq_len(1) == 6
    cache.share_range(0, 2)
    assert cache.lost_at(1, 2) == cache.lost_at(1, 0) == (0, 7)
    feed(cache, 1)
    feed(cache, 1, seq_id=2)
    with pytest.raises(ValueError, match="another row"):
        cache.share_range(0, 2)


def test_what_was_evicted_is_not_missing_where_dst_holds_a_row():
    cache = KVCache(1, 1, 1, None, policy=SlidingWindow(4), max_sequences=2)
    for _ in range(10):
        feed(cache, 1)
    feed(cache, 4, seq_id=1)
    cache.share_range(0, 1, 2, 4)
    assert cache.lost_at(0, 1) == (0, 0)
    cache.share_range(0, 1, 2, 6)
    assert cache.lost_at(0, 1) == (4, 6)
    assert [cache.can_resume(p, seq_id=1) for p in (4, 6)] == [False, False]
    cache.truncate(4, seq_id=1)
    assert cache.can_resume(4, seq_id=1)


def test_full_changes_nothing():
    cache = KVCache(2, 1, 1, 4, policy=[FullAttention(), SlidingWindow(2)])
    feed(cache, 3)
    before = [dict(table) for table in cache.rows]
    with pytest.raises(CacheFullError):
        feed(cache, 2)
    assert before == cache.rows
    cache.fork(0, 1)  # takes no room; the next batch does
    with pytest.raises(CacheFullError):
        feed(cache, 1)


def test_remove_moves_later_tokens_and_shared_rows_stay():
    cache = KVCache(1, 1, 1, 16, max_sequences=2, rope=lambda layer, k, delta: k + delta)
    feed(cache, 6)
    cache.fork(0, 1)
    cache.remove(1, 3, seq_id=1)
    assert cache.positions(seq_id=1) == [0, 1, 2, 3]
    assert [float(cache.get(0, p, seq_id=1)[0][0, 0]) for p in range(4)] == [0, 1, 2, 3]
    assert cache.positions() == [0, 1, 2, 3, 4, 5]
    cache.rope = None
    with pytest.raises(NotSupportedError):
        cache.remove(1, 2)


def test_chunks_and_trees():
    cache = KVCache(1, 1, 1, 32, policy=ChunkedAttention(4))
    x = np.zeros((6, 1, 1))
    batch = cache.batch(6)
    batch.put(0, x, x)
    assert mask_of(batch) == [1, 2, 3, 4, 1, 2]
    cache = KVCache(1, 1, 1, 32)
    feed(cache, 2)
    x = np.zeros((4, 1, 1))
    batch = cache.batch(positions=[2, 3, 3, 4], parents=[-1, 0, 0, 2])
    batch.put(0, x, x)
    assert mask_of(batch) == [3, 4, 4, 5]
    batch.commit(keep=[0, 2, 3])
    assert cache.positions() == [0, 1, 2, 3, 4]


def test_attend_is_the_softmax():
    cache = KVCache(1, 1, 2, 8)
    k, v = np.zeros((2, 1, 2)), np.array([[[1.0]], [[4.0]]])
    q = np.array([[[5.0, 5.0]], [[np.log(3) * 2**0.5, 0]]])
    k[0, 0, 0] = 1
    batch = cache.batch(2)
    np.testing.assert_allclose(batch.attend(0, q, k, v)[:, 0, 0], [1, (3 * 1 + 4) / 4])
    np.testing.assert_allclose(batch.attend(0, q[1:], first=1)[:, 0, 0], [(3 * 1 + 4) / 4])


def test_an_open_batch_owns_its_sequences():
    cache = KVCache(1, 1, 1, 8, max_sequences=4)
    feed(cache, 2)
    feed(cache, 2, seq_id=1)
    batch = cache.batch(1)
    for edit in (
        lambda: cache.batch(1), cache.clear, cache.compact, lambda: cache.clear(0), lambda: cache.keep(1),
        lambda: cache.fork(0, 2), lambda: cache.copy_prefix(1, 0, 1), lambda: cache.truncate(1),
    ):  # fmt: skip
        with pytest.raises(CacheBusyError):
            edit()
    cache.fork(1, 2)
    cache.keep(0)
    with pytest.raises(ValueError, match="not put"):
        batch.commit()
    batch.abort()
    assert cache.positions() == [0, 1]
    assert cache.sequences == [0]


def test_an_edit_that_copies_shared_rows_looks_at_capacity():
    cache = KVCache(1, 1, 1, None, capacity=6, max_sequences=None)
    feed(cache, 4)
    cache.fork(0, 1)
    with pytest.raises(CacheFullError):
        cache.inject(0, 0, np.ones((1, 3, 1)), np.ones((1, 3, 1)), seq_id=1)
    assert cache.live(0) == 4
    cache.inject(0, 0, np.ones((1, 2, 1)), np.ones((1, 2, 1)), seq_id=1)
    assert cache.live(0) == 6
