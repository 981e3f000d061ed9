"""A window costs a window: what layers with a window, or chunks, hold after a batch, and what they give back."""

import numpy as np
import pytest

import kvcache
from kvcache import ChunkedAttention, FullAttention, SlidingWindow

HEADS, DIM, BLOCK = 2, 32, 64


def make(policy=None, num_layers=1, **arguments):
    policy = SlidingWindow(256) if policy is None else policy
    arguments = {"dtype": "f16", "block_size": BLOCK, "max_seq_len": None, "max_sequences": None, **arguments}
    return kvcache.KVCache(num_layers, HEADS, DIM, policy=policy, **arguments)


def feed(cache, num_tokens, seq_ids=(0,)):
    """Feed as many tokens of each sequence, in one batch."""
    ids = [s for s in seq_ids for _ in range(num_tokens)]
    positions = [cache.next_position(s) + i for s in seq_ids for i in range(num_tokens)]
    with cache.batch(positions=positions, seq_ids=ids) as batch:
        for layer in range(cache.num_layers):
            rows = np.zeros((len(ids), HEADS, DIM), np.float32)
            batch.put(layer, rows, rows)


def rows_bytes(cache, num_rows):
    """The bytes of rows in every layer, and what bookkeeping may come to."""
    return cache.most_bytes(1) * num_rows + 24_000


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (SlidingWindow(256), 256),
        (SlidingWindow(256, num_sink_tokens=4), 260),
        (SlidingWindow(256, num_sink_tokens=100), 356),
        (SlidingWindow(100, resume_window=300), 300),
        (ChunkedAttention(256), 256),
        (ChunkedAttention(200, resume_window=64), 264),
    ],
)
def test_after_a_commit_a_sequence_takes_its_window_and_two_blocks(policy, kept, dtype):
    cache = make(policy, num_layers=2, dtype=dtype)
    most = rows_bytes(cache, kept + 2 * BLOCK)
    for num_tokens in (5_000, 1, 700, 64, 3, 3, 3, *[1] * 130):
        feed(cache, num_tokens)
        assert cache.seq_len() <= kept
        assert cache.nbytes <= most, num_tokens
        if num_tokens == 5_000:
            assert cache.validate() is None


def test_each_of_several_sequences_takes_its_window_and_two_blocks():
    cache = make()
    feed(cache, 2_000, (0, 1, 2))
    assert cache.nbytes <= rows_bytes(cache, 3 * (256 + 2 * BLOCK))
    cache.fork(2, 3)
    feed(cache, 1_000, (0, 2, 3))
    assert cache.nbytes <= rows_bytes(cache, 4 * (256 + 2 * BLOCK))
    cache.clear(0)
    feed(cache, 1, (1,))
    assert cache.stats()["blocks_free"] >= 4  # what a sequence leaves that ends is kept for reuse


def test_layers_that_see_everything_keep_everything():
    cache = make([FullAttention(), SlidingWindow(256)], num_layers=2)
    feed(cache, 4_000)
    assert cache.seq_len(layer=0) == 4_000
    assert cache.seq_len(layer=1) == 256
    row = cache.most_bytes(1) // 2
    bookkeeping = 4_000 * 24  # 12 bytes a token in its list, 7 in its block
    assert cache.nbytes <= row * (4_000 + BLOCK + 256 + 2 * BLOCK) + bookkeeping


def test_the_latest_positions_are_kept_and_no_answer_depends_on_blocks():
    for block_size in (1, 16, 64, 1_000):
        cache = make(SlidingWindow(100, num_sink_tokens=3, resume_window=120), block_size=block_size)
        feed(cache, 777)
        assert list(cache.positions()) == [0, 1, 2, *range(657, 777)]
        assert cache.can_resume(756)
        assert not cache.can_resume(755)
        cache.truncate(756)
        feed(cache, 30)
        assert cache.next_position() == 786


def test_the_last_token_of_a_prompt_can_be_taken_back():
    cache = make(SlidingWindow(100))
    feed(cache, 500)
    cache.truncate(499)
    feed(cache, 1)
    with pytest.raises(kvcache.RowsGoneError):
        cache.truncate(498)


def test_a_commit_of_some_tokens_expires_by_these():
    cache = make(SlidingWindow(100))
    with cache.batch(500) as batch:
        rows = np.zeros((500, HEADS, DIM), np.float32)
        batch.put(0, rows, rows)
        batch.commit(range(150))
    assert list(cache.positions()) == list(range(50, 150))
    feed(cache, 1)
    with cache.batch(8) as batch:
        batch.put(0, rows[:8], rows[:8])
        batch.commit([])
    assert list(cache.positions()) == list(range(52, 151))


def test_what_was_reserved_stays_until_it_is_used():
    cache = make(SlidingWindow(256))
    cache.reserve(1_000)
    opened = cache.stats()["blocks_opened"]
    before = cache.nbytes
    for _ in range(10):
        feed(cache, 40)
    assert cache.stats()["blocks_opened"] == opened
    assert before - rows_bytes(cache, 4 * BLOCK) < cache.nbytes <= before  # what has expired, was used
    feed(cache, 600)
    assert cache.stats()["blocks_opened"] == opened
    cache.reserve(640)
    opened = cache.stats()["blocks_opened"]
    feed(cache, 1)
    feed(cache, 600)
    assert cache.stats()["blocks_opened"] == opened


def test_what_was_retained_before_the_commit_stays():
    cache = make(SlidingWindow(100))
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    tokens = list(range(1_000))
    seq_id, _ = prefix.acquire(tokens)
    rows = np.zeros((1_000, HEADS, DIM), np.float32)
    with cache.batch(positions=range(1_000), seq_ids=[seq_id] * 1_000) as batch:
        batch.put(0, rows, rows)
    prefix.release(seq_id, tokens)
    _, matched = prefix.acquire([*tokens, 1])
    assert matched >= 960


def test_rows_that_others_hold_stay():
    cache = make(SlidingWindow(100))
    feed(cache, 100)
    cache.fork(0, 1)
    feed(cache, 1_000)
    assert list(cache.positions(seq_id=1)) == list(range(1, 100))
    k = cache.spans(0, seq_id=1)[0].k
    cache.clear(1)
    feed(cache, 1_000)
    assert not k.any()  # a view, whose block stays as long
    assert cache.validate() is None


def test_decoding_reuses_blocks_and_takes_no_new_ones():
    cache = make(SlidingWindow(256, num_sink_tokens=4))
    feed(cache, 1_000)
    for _ in range(70):
        feed(cache, 1)
    stats = cache.stats()
    for _ in range(500):
        feed(cache, 1)
    after = cache.stats()
    assert after["blocks_opened"] == stats["blocks_opened"]
    assert after["blocks_returned"] == stats["blocks_returned"]


def test_rows_that_a_batch_expires_as_it_begins_are_given_back_as_well():
    cache = make(SlidingWindow(256), rope=False)
    feed(cache, 256)
    for seq_id in range(1, 20):  # one sequence of the rows of 20, as a runner that stitches texts together makes it
        cache.fork(0, seq_id)
    cache.clear(0)
    feed(cache, 256, range(1, 20))
    for seq_id in range(2, 20):
        cache.shift(0, None, 256 * (seq_id - 1), seq_id=seq_id)
        cache.share_range(seq_id, 1)
        cache.clear(seq_id)
    assert cache.seq_len(1) > 4_000
    assert cache.nbytes > rows_bytes(cache, 4_000)
    feed(cache, 1, (1,))
    assert cache.seq_len(1) == 256
    assert cache.nbytes <= rows_bytes(cache, 256 + 2 * BLOCK)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (SlidingWindow(256), 256),
        (SlidingWindow(200, num_sink_tokens=6, resume_window=250), 256),
        (ChunkedAttention(200, resume_window=56), 256),
    ],
)
def test_as_many_rows_as_the_policy_keeps_are_room_for_any_number_of_tokens(policy, kept):
    cache = make(policy, num_layers=2, max_seq_len=kept, max_sequences=3)
    for seq_id in (0, 1, 2):
        assert cache.room(seq_id) > 1_000_000
        feed(cache, 1_000, (seq_id,))
        assert cache.seq_len(seq_id) <= kept
    feed(cache, 700, (0, 1, 2))
    cache.reserve(2_000)
    feed(cache, 1)
    assert cache.seq_len() <= kept
    assert cache.utilization <= 1
    with pytest.raises(kvcache.CacheFullError, match="max_sequences is 3"):
        feed(cache, 1, (3,))


def test_one_row_less_than_the_policy_keeps_is_room_for_so_many_tokens():
    cache = make(max_seq_len=255, max_sequences=1)
    assert cache.room() == 255
    with pytest.raises(kvcache.CacheFullError, match="256 tokens do not fit"):
        feed(cache, 256)
    feed(cache, 255)
    assert cache.room() == 0
    both = make([FullAttention(), SlidingWindow(256)], num_layers=2, max_seq_len=1_000, max_sequences=1)
    feed(both, 990)
    assert both.room() == 10
    with pytest.raises(kvcache.CacheFullError, match="holds 990 of max_seq_len 1000"):
        feed(both, 11)


def test_a_capacity_of_its_own_counts_the_tokens_of_the_batch():
    cache = make(max_seq_len=256, max_sequences=2, capacity=600)
    assert cache.room() == 600
    feed(cache, 600)
    assert cache.room() == 600 - 255
    with pytest.raises(kvcache.CacheFullError, match="capacity 600"):
        feed(cache, 346)
    limited = make(max_seq_len=256, max_sequences=1, max_bytes=cache.most_bytes(1) * 1_000)
    room = limited.room()
    assert 800 < room < 1_000
    feed(limited, room)


def test_rows_that_share_positions_count_one_by_one():
    cache = make(SlidingWindow(8), max_seq_len=8, rope=False)
    feed(cache, 8)
    cache.divide(0, None, 4)  # four rows at each position
    assert cache.seq_len() == 8
    assert cache.room() == 0
    with pytest.raises(kvcache.CacheFullError, match="holds 8 of max_seq_len 8"):
        feed(cache, 1)


def test_retained_rows_make_way_for_a_window_within_its_capacity():
    cache = make(SlidingWindow(128), max_seq_len=128, max_sequences=2)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    for first in (0, 1_000, 2_000):
        tokens = list(range(first, first + 128))
        seq_id, _ = prefix.acquire(tokens)
        feed(cache, 128, (seq_id,))
        prefix.release(seq_id, tokens)
    assert cache.room(99) > 1_000
    feed(cache, 1_000, (99,))
    assert cache.stats()["live_slots"] <= 256
    assert cache.validate() is None


@pytest.mark.parametrize("max_seq_len", [None, 256, 300])
@pytest.mark.parametrize("policy", [SlidingWindow(256), ChunkedAttention(200, resume_window=56)])
def test_most_bytes_counts_every_row_of_an_open_batch(policy, max_seq_len):
    """`max_seq_len` bounds no batch of layers that keep no more rows."""
    cache = make(policy, num_layers=2, max_seq_len=max_seq_len)
    token = cache.most_bytes(1)
    for num_tokens in (256, 5_000, 20_000):
        with cache.batch(num_tokens) as batch:
            held = cache.stats()["live_slots"] * token
            assert held <= cache.most_bytes(cache.next_position() + num_tokens, batch_tokens=num_tokens)
            assert held >= cache.most_bytes(num_tokens, batch_tokens=num_tokens)
            batch.abort()
    assert cache.most_bytes(20_000) == 256 * token


def test_max_seq_len_bounds_the_batch_where_one_layer_keeps_more():
    for policy in ([FullAttention(), SlidingWindow(256)], [SlidingWindow(301), SlidingWindow(256)]):
        cache = make(policy, num_layers=2, max_seq_len=300, max_sequences=1)
        assert cache.room() == 300
        assert cache.most_bytes(20_000, batch_tokens=20_000) == 300 * cache.most_bytes(1)


def test_explain_says_what_an_open_batch_holds():
    cache = make([FullAttention(), SlidingWindow(256), SlidingWindow(256)], num_layers=3, max_seq_len=4_096)
    line = "until it is committed, a batch takes up to {} more for each token, in layers with windows or chunks"
    assert cache.explain().splitlines() == [
        "strategy: always",
        "every sequence is stored",
        line.format("512 B"),
    ]
    adaptive = make(ChunkedAttention(256), max_seq_len=256, strategy=kvcache.Adaptive())
    assert adaptive.explain().splitlines()[1:] == [
        "a sequence of 256 tokens takes 64.0 KiB",
        line.format("256 B"),
    ]
    assert "until" not in make(FullAttention()).explain()
    assert "until" not in make(strategy="disabled").explain()  # a batch holds the rows of one layer


@pytest.mark.parametrize("max_seq_len", [None, 256])
def test_adaptive_counts_what_an_open_batch_holds(monkeypatch, max_seq_len):
    monkeypatch.setattr("kvcache.system.available_memory", lambda: (20 << 20, "a test"))
    cache = make(num_layers=2, max_seq_len=max_seq_len, strategy=kvcache.Adaptive(0.5))
    long = 40_000  # 19.5 MiB of rows, of which the windows keep 256 KiB
    assert cache.most_bytes(long) < 1 << 20
    assert cache.most_bytes(long, batch_tokens=long) == long * cache.most_bytes(1)
    feed(cache, long)
    assert cache.seq_len() == 0
    assert "is not stored" in cache.explain()
    for _ in range(10):
        feed(cache, 4_000)
        assert cache.nbytes < 10 << 20
    assert cache.seq_len() == 256
    assert "is stored" in cache.explain()
